"""One gradient step as a function of tensors alone, so that it can be compiled.

    step(flat, exp_avg, exp_avg_sq, count, rows, coefficients) -> metrics

``flat`` [P] contains every parameter of policy and critic once; the modules' parameters are views
of ``flat``, so a step changes them in place. ``exp_avg``, ``exp_avg_sq`` and ``count`` are Adam's
state. ``rows`` [B, C] is a minibatch, packed by :class:`Columns`. ``coefficients`` is the tensor
(lr, beta, kl.coef), since each new Python number would trigger a compilation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim.adamw import adamw as torch_adamw

from klrl.config import AdamWConfig, KLPENConfig, OptimConfig
from klrl.control.policy.distributions import Family, Params
from klrl.control.policy.networks import Agent, Networks, PairedNetworks, can_be_paired
from klrl.losses.policy import LossTerms, PolicyLoss, Scored

#: Adam's decay rates (Kingma and Ba 2015).
BETA1, BETA2 = 0.9, 0.999

#: Key -> tensor [B, ...], the entries of a minibatch.
Minibatch = Mapping[str, Tensor]
#: A function ``step`` as in the module's docstring; it changes its first four arguments in place.
Step = Callable[..., Tensor]


class Columns:
    """The layout of named tensors [B, ...] as columns of one float32 matrix [B, C].

    One gather then shuffles all entries, and a minibatch is a single input of a compiled step.
    Integers (actions) are exact in float32 up to 2^24. The bytes of pixels are viewed as floats,
    four in each; copying such floats preserves every bit.
    """

    def __init__(self, example: Mapping[str, Tensor]) -> None:
        for key, value in example.items():
            if value.dtype not in (torch.float32, torch.int64, torch.uint8):
                raise TypeError(
                    f"{key} is {value.dtype}: a minibatch may only contain float32, int64 and uint8"
                )
        self.shapes = {key: (value.shape[1:], value.dtype) for key, value in example.items()}
        self.widths = [_width(*like) for like in self.shapes.values()]

    def pack(self, frames: Mapping[str, Tensor]) -> Tensor:
        """Pack the tensors into one matrix [B, C]."""
        return torch.cat([_columns(frames[key]) for key in self.shapes], 1)

    def unpack(self, rows: Tensor) -> dict[str, Tensor]:
        """Restore the named tensors; float32 tensors are views."""
        parts = zip(rows.split(self.widths, 1), self.shapes.items(), strict=True)
        return {key: _as(part, *like) for part, (key, like) in parts}


def _width(shape: torch.Size, dtype: torch.dtype) -> int:
    """The number of columns for a tensor [B, *shape]."""
    return -(-shape.numel() // 4) if dtype == torch.uint8 else shape.numel()


def _columns(value: Tensor) -> Tensor:
    """Convert [B, ...] to columns [B, width] of float32."""
    flat = value.flatten(1) if value.ndim > 1 else value.unsqueeze(1)
    if value.dtype != torch.uint8:
        return flat.float()
    return pad(flat, (0, -flat.shape[1] % 4)).view(torch.float32)


def _as(part: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Convert columns [B, width] to [B, *shape]."""
    if dtype == torch.uint8:
        return part.view(torch.uint8)[:, : shape.numel()].reshape(-1, *shape)
    if not shape:
        part = part.squeeze(1)
    elif len(shape) > 1:
        part = part.reshape(-1, *shape)
    return part if dtype == torch.float32 else part.to(dtype)


@dataclass(frozen=True)
class AdamSettings:
    """The optimiser's settings that a step reads; they are constant during a run."""

    eps: float
    max_grad_norm: float  # Euclidean norm
    weight_decay: float  # decoupled from the gradient; 0 is plain Adam


class Adam:
    """Adam's state for one flat tensor; all parameters become views of this tensor."""

    def __init__(self, parameters: list[nn.Parameter], settings: AdamSettings) -> None:
        self.settings = settings
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters])
        offset = 0
        for p in parameters:
            p.data = self.flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.count = self.flat.new_zeros(())

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors that a step changes in place."""
        return self.flat, self.exp_avg, self.exp_avg_sq, self.count

    def state_dict(self) -> dict[str, Tensor]:
        """The moments and the step count; the modules' ``state_dict`` has the parameters."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a checkpoint's moments in place."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])


def adam(config: OptimConfig, parameters: list[nn.Parameter]) -> Adam:
    """``optim=adam``."""
    return Adam(parameters, AdamSettings(config.eps, config.max_grad_norm, weight_decay=0.0))


def adamw(config: AdamWConfig, parameters: list[nn.Parameter]) -> Adam:
    """``optim=adamw``."""
    settings = AdamSettings(config.eps, config.max_grad_norm, config.weight_decay)
    return Adam(parameters, settings)


def score(
    loss: PolicyLoss, family: Family, params: Params, value: Tensor, batch: Minibatch
) -> Scored:
    """Compute a loss's inputs [B] from ``params`` and ``value``, the networks' current outputs.

    ``batch`` contains ``action_log_prob, advantage, value_target, state_value`` [B], the family's
    sample, the old policy's parameters and the noise of :func:`draw`. If the loss charges the KL to
    the reference, ``batch`` also contains ``ref_log_prob`` [B] and ``ref_<parameter>``.
    """
    exact_ref = None
    log_prob = family.log_prob(params, batch[family.sample_key])
    kl_old = _kl_old(loss, family, params, batch)
    # Without an entropy bonus, the entropy is detached.
    scored = params if loss.entropy_bonus else _detached(params)
    entropy = family.entropy(scored, batch.get("entropy_noise"))
    if loss.reference_estimator == "exact":
        ref = {key: batch[f"ref_{key}"] for key in family.param_keys}
        noise = batch.get("divergence_noise")
        exact_ref = family.divergence(loss.divergence.name, params, ref, noise)
    return Scored(
        log_prob=log_prob,
        old_log_prob=batch["action_log_prob"],
        advantage=batch["advantage"],
        kl_old=kl_old,
        entropy=entropy,
        value=value,
        value_target=batch["value_target"],
        old_value=batch["state_value"],
        ref_log_prob=batch.get("ref_log_prob"),
        exact_ref=exact_ref,
        sampler_log_prob=batch.get("sampler_log_prob"),
    )


def draw(loss: PolicyLoss, family: Family, batch: Minibatch) -> dict[str, Tensor]:
    """Draw the random numbers that :func:`score` reads.

    ``entropy_noise`` [B, samples, A] if the entropy has no closed form; ``old_sample``
    [B, samples_mc_kl, ...] if KL(old||new) is sampled; ``divergence_noise``
    [B, samples_mc_js, A] if the loss charges a divergence that is estimated from draws.
    """
    drawn, old = {}, _old(family, batch)
    noise = family.entropy_noise(old, loss.config.samples_mc_entropy)
    if noise is not None:
        drawn["entropy_noise"] = noise
    if loss.kl_old == "sampled":
        assert isinstance(loss.config, KLPENConfig)
        drawn["old_sample"] = family.sample(old, loss.config.samples_mc_kl).movedim(0, 1)
    if loss.reference_estimator == "exact":
        divergence = loss.divergence
        noise = family.divergence_noise(divergence.name, old, divergence.samples)
        if noise is not None:
            drawn["divergence_noise"] = noise
    return drawn


def _kl_old(loss: PolicyLoss, family: Family, params: Params, batch: Minibatch) -> Tensor:
    """KL(old||new) [B] in closed form; if sampled, the mean of log old - log new over draws."""
    old = _old(family, batch)
    if loss.kl_old == "sampled":
        sample = batch["old_sample"]
        wide_old, wide_new = ({k: v.unsqueeze(1) for k, v in p.items()} for p in (old, params))
        return (family.log_prob(wide_old, sample) - family.log_prob(wide_new, sample)).mean(1)
    return family.kl(old, _detached(params) if loss.kl_old == "measured" else params)


def _old(family: Family, batch: Minibatch) -> dict[str, Tensor]:
    return {key: batch[key] for key in family.param_keys}


def _detached(params: Params) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in params.items()}


@dataclass(frozen=True)
class StepParts:
    """The objects from which a step is built; they stay the same during a run."""

    agent: Agent
    loss: PolicyLoss
    optim: AdamSettings
    columns: Columns


def loss_terms(
    problem: StepParts, outputs: tuple[Tensor, ...], batch: Mapping[str, Tensor], coef: Tensor
) -> LossTerms:
    """Compute a minibatch's loss from the networks' outputs; ``coef`` is (lr, beta, kl.coef)."""
    *params, value = outputs
    if problem.loss.natural:  # gradient steps then train only the critic
        params = [each.detach() for each in params]
    family = problem.agent.family
    named = dict(zip(family.param_keys, params, strict=True))
    return problem.loss(score(problem.loss, family, named, value, batch), coef[1], coef[2])


def _clipping(gradient: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return the factor that clips the gradient's norm to ``limit``, and this norm."""
    norm = gradient.norm()
    # The factor of torch.nn.utils.clip_grad_norm_, including its 1e-6.
    return (limit / (norm + 1e-6)).clamp(max=1.0), norm


def _pure_adam(
    optim: AdamSettings, state: tuple[Tensor, ...], gradient: Tensor, lr: Tensor
) -> None:
    """Adam in place (Kingma and Ba 2015, algorithm 1), in operations that a compiler can fuse."""
    flat, exp_avg, exp_avg_sq, count = state
    count.add_(1)
    exp_avg.mul_(BETA1).add_(gradient, alpha=1 - BETA1)
    exp_avg_sq.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
    # Not 1 - b^t: in float32 this difference has a relative error of 1e-5 at t = 1.
    mean = exp_avg / -torch.expm1(count * math.log(BETA1))
    spread = (exp_avg_sq / -torch.expm1(count * math.log(BETA2))).sqrt() + optim.eps
    if optim.weight_decay:  # Loshchilov and Hutter (2019)
        flat.mul_(1 - lr * optim.weight_decay)
    flat.sub_(lr * mean / spread)


def _fused_adam(
    optim: AdamSettings, state: tuple[Tensor, ...], gradient: Tensor, lr: Tensor
) -> None:
    """Adam by torch's fused kernel: in eager mode, one call instead of 18 operations."""
    flat, exp_avg, exp_avg_sq, count = state
    torch_adamw(  # with weight_decay=0 equal to torch's Adam, to the bit
        [flat],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [count],
        fused=True,
        amsgrad=False,
        beta1=BETA1,
        beta2=BETA2,
        lr=lr,
        weight_decay=optim.weight_decay,
        eps=optim.eps,
        maximize=False,
    )


def _metrics(loss: PolicyLoss, measured: dict[str, Tensor], norm: Tensor) -> Tensor:
    return torch.cat([loss.measure(measured), norm.reshape(1)])


def eager_step(problem: StepParts) -> Step:
    """Build the step for eager mode, with autograd on the modules and torch's fused Adam."""
    both = problem.agent.networks
    networks: Networks | PairedNetworks = both
    parameters: list[Any] = both.in_order()
    if can_be_paired(both):
        networks = PairedNetworks(both)
        parameters = networks.leaves
    # One buffer for all steps: new memory of 1,024-wide networks costs a fifth of a step.
    gradient = torch.cat([p.detach().reshape(-1) for p in parameters])

    def step(
        flat: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, count: Tensor, rows: Tensor, coef: Tensor
    ) -> Tensor:
        batch = problem.columns.unpack(rows)
        terms = loss_terms(problem, networks(batch["observation"]), batch, coef)
        natural = problem.loss.natural  # if true, no gradient reaches the policy
        gradients = torch.autograd.grad(terms.total, parameters, materialize_grads=natural)
        with torch.no_grad():
            torch.cat([g.reshape(-1) for g in gradients], out=gradient)
            factor, norm = _clipping(gradient, problem.optim.max_grad_norm)
            gradient.mul_(factor)
            _fused_adam(problem.optim, (flat, exp_avg, exp_avg_sq, count), gradient, coef[0])
            return _metrics(problem.loss, terms.measured, norm)

    return step


def pure_step(problem: StepParts) -> Step:
    """Build the step for a compiler, with torch.func's gradient with respect to ``flat``."""
    networks = problem.agent.networks
    names = {id(p): name for name, p in networks.named_parameters()}
    parameters = networks.in_order()
    sizes = [p.numel() for p in parameters]
    shapes = [(names[id(p)], p.shape) for p in parameters]

    def loss_of(flat: Tensor, rows: Tensor, coef: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        batch = problem.columns.unpack(rows)
        parts = zip(flat.split(sizes), shapes, strict=True)
        weights = {name: part.view(shape) for part, (name, shape) in parts}
        # A shared trunk is one module with two names. With ``tie_weights``, torch 2.13 would swap
        # its tensors twice and not restore them.
        outputs = torch.func.functional_call(
            networks, weights, (batch["observation"],), tie_weights=False
        )
        terms = loss_terms(problem, outputs, batch, coef)
        return terms.total, terms.measured

    def step(
        flat: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, count: Tensor, rows: Tensor, coef: Tensor
    ) -> Tensor:
        gradient, measured = torch.func.grad(loss_of, has_aux=True)(flat, rows, coef)
        factor, norm = _clipping(gradient, problem.optim.max_grad_norm)
        _pure_adam(problem.optim, (flat, exp_avg, exp_avg_sq, count), gradient * factor, coef[0])
        return _metrics(problem.loss, measured, norm)

    return step


def check_inputs(example: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Refuse inputs whose shape, stride, dtype or device differs from the example's."""
    for i, (expected, value) in enumerate(zip(example, given, strict=True)):
        layout, built_for = input_layout(value), input_layout(expected)
        if layout != built_for:
            raise RuntimeError(f"input {i} of the compiled update is {layout}, not {built_for}")


def input_layout(value: Tensor) -> tuple[object, ...]:
    """Describe what a compiled step requires of an input."""
    return tuple(value.shape), value.stride(), value.dtype, value.device
