"""The networks of policy and critic, with observation normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn

from klrl.control.env.observation import Layout
from klrl.control.policy.distributions import EXCLUDED, Family

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


class ObservationNormalizer(nn.Module):
    """Normaliser (x - mean) / std with running statistics, clipped to +-10.

    The training loop calls :meth:`update` after the learner's update, so the statistics are
    constant from a rollout's start to the end of its update. A copied policy has its own
    statistics, since they are buffers.
    """

    clip = 10.0

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        # In float64, since sums over a million frames exceed float32's precision.
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean64", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(size, dtype=torch.float64))

    mean: Tensor
    std: Tensor
    count: Tensor
    mean64: Tensor
    squares: Tensor

    def forward(self, observation: Tensor) -> Tensor:
        """Normalise [..., D]."""
        return ((observation - self.mean) / self.std).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, observation: Tensor) -> None:
        """Add the observations [..., D] of one rollout to the statistics.

        Merges count, mean and sum of squared deviations of two samples (Chan et al. 1979).
        """
        x = observation.flatten(0, -2).double()
        n, mean = float(x.shape[0]), x.mean(0)
        deviations = ((x - mean) ** 2).sum(0)
        total = self.count + n
        shift = mean - self.mean64
        self.squares += deviations + shift**2 * self.count * n / total
        self.mean64 += shift * n / total
        self.count.copy_(total)
        self.mean.copy_(self.mean64)
        std = (self.squares / total).sqrt()
        # A constant, up to rounding, gets std 1: with 1e-4 a later change of .001 would be 10.
        constant = std <= torch.finfo(torch.float32).eps * self.mean64.abs().clamp(min=1e-5)
        self.std.copy_(torch.where(constant, std.clamp(min=1.0), std.clamp(min=1e-4)))


class VectorNormalizer(ObservationNormalizer):
    """Normaliser of the vectors in packed observations [..., D], where the vectors come first."""

    def forward(self, observation: Tensor) -> Tensor:
        """Normalise the vectors; leave the other entries unchanged."""
        size = self.mean.shape[0]
        rest = observation[..., size:]
        return torch.cat([super().forward(observation[..., :size]), rest], -1)

    def update(self, observation: Tensor) -> None:
        """Add the vectors of one rollout to the statistics."""
        super().update(observation[..., : self.mean.shape[0]])


def mlp(sizes: Sequence[int], activation: str) -> nn.Sequential:
    """Make linear layers (orthogonal, gain sqrt(2), bias 0), each followed by an activation."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [orthogonal(nn.Linear(inputs, outputs), math.sqrt(2)), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


def orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    """Initialise orthogonal weights with a gain, and bias 0 (Andrychowicz et al. 2021, 3.2)."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class PolicyNet(nn.Module):
    """Network from observations [..., D] to the distribution's parameters.

    ``outputs`` is the dimension A of a Gaussian or the number K of logits; ``init_std`` is None for
    logits. The last ``masked`` numbers of an observation are the mask of the logits; an action that
    the mask excludes has probability 0.
    """

    head: nn.Module
    log_std: nn.Parameter | None

    def __init__(
        self,
        normalizer: nn.Module,
        trunk: nn.Sequential,
        outputs: int,
        init_std: float | None,
        masked: int = 0,
    ) -> None:
        super().__init__()
        self.normalizer, self.trunk, self.masked = normalizer, trunk, masked
        self.inputs, self.outputs = _inputs(trunk), outputs
        # With gain 0.01 the initial policy hardly depends on the state (Andrychowicz et al. 2021).
        self.head = orthogonal(nn.Linear(_width(trunk), outputs), 0.01)
        if init_std is None:
            self.register_parameter("log_std", None)
        else:
            self.log_std = nn.Parameter(torch.full((outputs,), math.log(init_std)))

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        """Return (loc, scale), each [..., A], or (logits,) [..., K]."""
        return self.of_normalized(self.normalizer(observation))

    def of_normalized(self, observation: Tensor) -> tuple[Tensor, ...]:
        """Compute the parameters from an already normalised observation [..., D]."""
        return self.of_features(self.trunk(observation), observation)

    def of_features(self, hidden: Tensor, observation: Tensor) -> tuple[Tensor, ...]:
        """Compute the parameters from the trunk's output [..., H] and the observation's mask."""
        out = self.head(hidden)
        if isinstance(out, tuple):  # (loc, scale) of a custom network
            return out
        if self.log_std is None:
            return (self.allowed(out, observation),)
        return out, self.log_std.exp().expand_as(out)

    def allowed(self, logits: Tensor, observation: Tensor) -> Tensor:
        """Set the logits of excluded actions to -1e9; the observation contains the mask."""
        if not self.masked:
            return logits
        return logits.masked_fill(observation[..., -self.masked :] == 0, EXCLUDED)


class ValueNet(nn.Module):
    """Network from observations [..., D] to state values [..., 1].

    With ``detach_trunk``, the critic's gradient does not reach the trunk.
    """

    head: nn.Module

    def __init__(
        self, normalizer: nn.Module, trunk: nn.Sequential, detach_trunk: bool = False
    ) -> None:
        super().__init__()
        self.normalizer, self.trunk, self.detach_trunk = normalizer, trunk, detach_trunk
        self.inputs = _inputs(trunk)
        self.head = orthogonal(nn.Linear(_width(trunk), 1), 1.0)

    def forward(self, observation: Tensor) -> Tensor:
        """The state value [..., 1]."""
        return self.of_normalized(self.normalizer(observation))

    def of_normalized(self, observation: Tensor) -> Tensor:
        """The state value [..., 1] from an already normalised observation [..., D]."""
        return self.of_features(self.trunk(observation))

    def of_features(self, hidden: Tensor) -> Tensor:
        """The state value [..., 1] from the trunk's output [..., H]."""
        return self.head(hidden.detach() if self.detach_trunk else hidden)


def _inputs(trunk: nn.Sequential) -> int:
    """Return the input width of the trunk's first module, the length D of an observation."""
    widths: list[Any] = [m.in_features for m in trunk if hasattr(m, "in_features")]
    return int(widths[0])


def _width(trunk: nn.Sequential) -> int:
    return next(m.out_features for m in reversed(trunk) if isinstance(m, nn.Linear))


class Networks(nn.Module):
    """Policy and critic as one function of normalised observations, as the learner calls them."""

    def __init__(self, policy: PolicyNet, value: ValueNet) -> None:
        super().__init__()
        self.policy, self.value = policy, value

    def forward(self, normalized: Tensor) -> tuple[Tensor, ...]:
        """Map [B, D] to (the family's parameters..., value [B])."""
        if self.policy.trunk is self.value.trunk and not _is_mlp(self.policy.trunk):
            # A shared trunk with encoders is evaluated once, to save time. A shared MLP is
            # evaluated twice, since one evaluation would change the rounding of the gradient.
            hidden = self.policy.trunk(normalized)
            value = self.value.of_features(hidden).squeeze(-1)
            return (*self.policy.of_features(hidden, normalized), value)
        value = self.value.of_normalized(normalized).squeeze(-1)
        return (*self.policy.of_normalized(normalized), value)

    def in_order(self) -> list[nn.Parameter]:
        """List each parameter once; matching parameters of the two trunks are adjacent."""
        # The trunk of a custom network is empty, while the other trunk may have parameters.
        pairs = zip(self.policy.trunk.parameters(), self.value.trunk.parameters(), strict=False)
        parameters = [p for pair in pairs for p in pair] + list(self.parameters())
        return list({id(p): p for p in parameters}.values())


class PairedNetworks:
    """Policy and critic, evaluated together to halve the operations of eager mode.

    Their trunks have the same shape. Matching weights are adjacent in memory and are viewed as one
    tensor [2, H, D], so one batched product evaluates a layer of both trunks.
    """

    def __init__(self, networks: Networks) -> None:
        self._policy, self._value = networks.policy, networks.value
        policy, value = (linears(net.trunk) for net in (self._policy, self._value))
        self._weights = [
            (_both(p.weight, v.weight), _both(p.bias, v.bias))
            for p, v in zip(policy, value, strict=True)
        ]
        self._activations = [x for x in self._policy.trunk if not isinstance(x, nn.Linear)]
        trunks = {id(x) for net in (self._policy, self._value) for x in net.trunk.parameters()}
        rest = [p for p in networks.in_order() if id(p) not in trunks]
        #: The tensors to differentiate by; flattened, they are in the order of ``in_order``.
        self.leaves: list[Tensor] = [x for pair in self._weights for x in pair] + list(rest)

    def __call__(self, normalized: Tensor) -> tuple[Tensor, ...]:
        """Map [B, D] to (the family's parameters..., value [B])."""
        hidden = normalized.expand(2, -1, -1)
        for (weight, bias), activate in zip(self._weights, self._activations, strict=True):
            hidden = activate(torch.baddbmm(bias.unsqueeze(1), hidden, weight.transpose(1, 2)))
        policy, value = hidden.unbind(0)
        parameters = self._policy.of_features(policy, normalized)
        return (*parameters, self._value.head(value).squeeze(-1))


#: A pair saves operations, 3 to 6 % of a step of 64-wide trunks, but torch copies the gradients of
#: batched products: a pair of 256-wide trunks saves nothing, one of 1,024 takes 1.6 times as long.
WIDE = 256


def can_be_paired(networks: Networks) -> bool:
    """Whether the trunks are two MLPs of equal shape, not wide, with matching layers adjacent."""
    policy, value = networks.policy.trunk, networks.value.trunk
    alike = len(policy) == len(value) > 0 and _is_mlp(policy) and _is_mlp(value)
    wide = any(layer.out_features >= WIDE for layer in linears(policy))
    if policy is value or wide or not alike:
        return False
    pairs = zip(policy.parameters(), value.parameters(), strict=True)
    parameters = [p for pair in pairs for p in pair]
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parameters]
    following = [p.data_ptr() for p in parameters[1:]]
    return all(end == start for end, start in zip(ends, following, strict=False))


def _is_mlp(trunk: nn.Sequential) -> bool:
    """Whether a trunk has only linear layers and activations, no encoders."""
    return 2 * len(linears(trunk)) == len(trunk)


def linears(trunk: nn.Sequential) -> list[nn.Linear]:
    """List the linear layers of a trunk."""
    return [layer for layer in trunk if isinstance(layer, nn.Linear)]


def _both(policy: Tensor, value: Tensor) -> Tensor:
    """View two tensors that are adjacent in memory as one leaf tensor [2, ...]."""
    both = policy.detach().as_strided((2, *policy.shape), (policy.numel(), *policy.stride()))
    assert both[1].data_ptr() == value.data_ptr()
    return both.requires_grad_()


@dataclass
class Agent:
    """A policy with its critic."""

    actor: ProbabilisticTensorDictSequential
    critic: TensorDictModule  # observation -> ``state_value`` [..., 1]
    family: Family
    normalizer: ObservationNormalizer | None  # shared by both networks; None without normalisation
    layout: Layout | None = None  # None if an observation is a plain vector
    notes: tuple[str, ...] = ()  # lines for the user, at the start of a run

    @property
    def modules(self) -> nn.ModuleDict:
        """Both networks, for checkpoints and moves between devices."""
        return nn.ModuleDict({"actor": self.actor, "critic": self.critic})

    def to(self, device: torch.device) -> Agent:
        """Move both networks and the family's tensors to a device."""
        self.modules.to(device)
        self.family.to(device)
        return self

    @property
    def networks(self) -> Networks:
        """Policy and critic without TorchRL's wrappers, as the learner calls them."""
        return Networks(self.policy_net, self.value_net)

    @property
    def policy_net(self) -> PolicyNet:
        """The policy without TorchRL's wrappers."""
        return self.actor[0].module

    @property
    def value_net(self) -> ValueNet:
        """The critic without TorchRL's wrapper."""
        return self.critic.module

    def synthetic_observations(self, count: int) -> Tensor:
        """Make observations [count, D], the same at every call, to try networks on."""
        if self.layout is not None:
            return torch.from_numpy(self.layout.random_transports(np.random.default_rng(0), count))
        generator = torch.Generator().manual_seed(0)
        return torch.randn(count, self.value_net.inputs, generator=generator)
