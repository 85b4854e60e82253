"""Run a policy in klrl's own loops: one small forward per step, without a distribution object.

The noise of many steps is drawn at once. A sample is then a function of its noise and of the
distribution's parameters (``Family.act``). Log-probs are not computed here, but afterwards, by one
forward for the whole rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from klrl.control.env.simulators import Array, Native, native
from klrl.control.policy.distributions import (
    Bernoulli,
    Categorical,
    Family,
    MultiCategorical,
    TanhNormalFamily,
)
from klrl.control.policy.networks import Agent, ObservationNormalizer, PolicyNet, linears

#: On a GPU machine, an MLP with fewer parameters than this still acts in numpy. For 8 environments,
#: numpy takes 41 us a step with 67,000 parameters and 66 us with 125,000 (one EPYC core). A GPU is
#: estimated at 35 to 50 us for any MLP: two memory copies (10 us each) and three kernel launches
#: (5 to 10 us each).
LARGE = 75_000


class Acting(Protocol):
    """Interface of a policy that acts in N simulators, with arrays or tensors as theirs."""

    def begin(self, steps: int, copies: int) -> None:
        """Draw noise for ``steps`` steps; actions are deterministic until the first call."""

    def sample(self, step: int, observation: Native) -> Native:
        """Return samples [N, A] or [N] for observations [N, D], with the noise of ``step``."""

    def action(self, sample: Native) -> Native:
        """Convert a sample to the action."""


def make_acting(agent: Agent, device: torch.device, simulators: str = "cpu") -> Acting:
    """Make the numpy version of an MLP, on a GPU only of a small one; else the torch version.

    ``simulators``: the device of the simulators in which the policy acts; numpy needs the CPU.
    """
    net = agent.policy_net
    small = device.type == "cpu" or sum(p.numel() for p in net.parameters()) < LARGE
    if simulators == "cpu" and small and runs_in_numpy(net):
        return NumpyActing(net, agent.family)
    return TorchActing(net, agent.family, device, simulators)


# -------------------------------------------------------------------------------------- numpy

#: Activation -> its in-place numpy version. GELU is left out, since numpy has no erf.
_NUMPY: dict[type[nn.Module], Callable[[Array], object]] = {
    nn.Tanh: lambda x: np.tanh(x, out=x),
    nn.ReLU: lambda x: np.maximum(x, 0, out=x),
    nn.ELU: lambda x: np.copyto(x, np.expm1(np.minimum(x, 0)), where=x < 0),
    nn.SiLU: lambda x: np.divide(x, 1 + np.exp(-np.maximum(x, -88)), out=x),  # e^89 overflows
}


def runs_in_numpy(net: PolicyNet) -> bool:
    """Whether :class:`NumpyActing` can evaluate a network."""
    known: tuple[type, ...] = (nn.Linear, *_NUMPY)
    plain = isinstance(net.normalizer, ObservationNormalizer | nn.Identity)
    plain = plain and isinstance(net.head, nn.Linear) and len(net.trunk) > 0
    return plain and all(isinstance(layer, known) for layer in net.trunk)


class NumpyActing:
    """An MLP policy in numpy; parameters on a CPU are read in place, those on a GPU are copied."""

    def __init__(self, net: PolicyNet, family: Family) -> None:
        self._net, self._family = net, family
        self._decide = _decision(family)
        self._noise: Array | None = None
        if isinstance(family, TanhNormalFamily):
            self._low = family.low.cpu().numpy()
            self._half_width = 0.5 * (family.high - family.low).cpu().numpy()
        self._refresh()

    def begin(self, steps: int, copies: int) -> None:
        """Read the parameters, draw noise [T, N, outputs], and scale Gaussian noise by the std."""
        self._refresh()
        noise = self._family.act_noise((steps, copies), self._net.outputs)
        if self._log_std is not None:
            noise = noise * torch.from_numpy(self._log_std).exp()
        self._noise = noise.numpy()

    def sample(self, step: int, observation: Array) -> Array:
        """Add the step's noise, if any, to the network's output; map the sum to a sample."""
        out = self._forward(observation)
        if self._noise is not None:
            out += self._noise[step]
        return self._decide(out)

    def action(self, sample: Array) -> Array:
        """Convert a sample to the action: squash it for TanhNormal, else return it unchanged."""
        if not isinstance(self._family, TanhNormalFamily):
            return sample
        return self._low + self._half_width * (np.tanh(sample) + 1)

    def _forward(self, observation: Array) -> Array:
        x = observation
        if self._normalizer is not None:
            mean, std, clip = self._normalizer
            x = (x - mean) / std
            np.minimum(np.maximum(x, -clip, out=x), clip, out=x)
        for weight, bias, activate in self._layers:
            x = x @ weight
            x += bias
            if activate is not None:
                activate(x)
        return x

    def _refresh(self) -> None:
        """Read the parameters again, since an optimiser or a checkpoint may have changed them."""
        net, normalizer = self._net, self._net.normalizer
        assert isinstance(net.head, nn.Linear)  # runs_in_numpy checks this
        layers = [*linears(net.trunk), net.head]
        tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
        tensors += [] if net.log_std is None else [net.log_std]
        if isinstance(normalizer, ObservationNormalizer):
            tensors += [normalizer.mean, normalizer.std]
        arrays = iter(arrays_of(tensors, copied=tensors[0].device.type != "cpu"))
        activations = [_NUMPY[type(x)] for x in net.trunk if not isinstance(x, nn.Linear)]
        self._layers = [
            (next(arrays).T, next(arrays), activate) for activate in [*activations, None]
        ]
        self._log_std = None if net.log_std is None else next(arrays)
        self._normalizer = None
        if isinstance(normalizer, ObservationNormalizer):
            self._normalizer = (next(arrays), next(arrays), normalizer.clip)


def arrays_of(tensors: Sequence[Tensor], *, copied: bool) -> list[Array]:
    """Convert tensors of one dtype and device to arrays: views, or copies if ``copied``."""
    tensors = [tensor.detach() for tensor in tensors]
    if copied:
        flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
        parts = flat.split([tensor.numel() for tensor in tensors])
        tensors = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    return [tensor.numpy() for tensor in tensors]


def _decision(family: Family) -> Callable[[Array], Array]:
    """Return ``Family.act`` in numpy: a map from network output plus noise to a sample."""
    if isinstance(family, Bernoulli):
        return lambda out: (out > 0).astype(np.int64)
    if isinstance(family, MultiCategorical):
        ends = np.cumsum(family.counts)
        parts = [slice(end - k, end) for end, k in zip(ends, family.counts, strict=True)]
        return lambda out: np.stack([out[:, part].argmax(-1) for part in parts], -1)
    if isinstance(family, Categorical):
        return lambda out: out.argmax(-1)
    return lambda out: out


# -------------------------------------------------------------------------------------- torch


class TorchActing:
    """A policy with any network, on any device; on a GPU a step replays a CUDA graph.

    Observations, samples and actions are on the device of the ``simulators``.
    """

    def __init__(
        self, net: PolicyNet, family: Family, device: torch.device, simulators: str = "cpu"
    ) -> None:
        self._net, self._device, self._simulators = net, device, simulators
        self._family = family.acting_on(torch.device(simulators))
        self._noise: Tensor | None = None
        self._captured: Callable[[Tensor], tuple[Tensor, ...]] | None = None

    def begin(self, steps: int, copies: int) -> None:
        """Draw noise [T, N, outputs]."""
        noise = self._family.act_noise((steps, copies), self._net.outputs)
        self._noise = noise.to(self._device)

    @torch.no_grad()
    def sample(self, step: int, observation: Native) -> Native:
        """Sample with the step's noise; without noise, return the mode."""
        inputs = torch.as_tensor(observation)
        if self._device.type == "cuda":
            if self._captured is None:
                from klrl.base.cuda_graph import captured_forward

                self._captured = captured_forward(self._net, inputs, self._device)
            outputs = self._captured(inputs)
        else:
            outputs = self._net(inputs.to(self._device))
        params = dict(zip(self._family.param_keys, outputs, strict=True))
        noise = outputs[0].new_zeros(()) if self._noise is None else self._noise[step]
        return native(self._family.act(params, noise).to(self._simulators))

    def action(self, sample: Native) -> Native:
        """Convert a sample to the action: squash it for TanhNormal, else return it unchanged."""
        return native(self._family.action(torch.as_tensor(sample)))
