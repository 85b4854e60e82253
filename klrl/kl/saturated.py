"""log pi(a|s) of a TanhNormal whose action rounding has put on a bound.

a = mid + half * tanh(u). In float32 every u above 7 gives the same a, and TorchRL's inverse gives
one and the same u back: at loc 15 its log-prob is off by a hundred nats. What is known of such a u
is that it lies beyond the cut, and, from the parameters that the policy wrote, its distribution
there: a Gaussian cut off on one side. So its log-prob under any TanhNormal has a mean in closed
form, and the mean of k1 is the KL. (k2 and k3 are not linear in it; ``exact`` needs none of this.)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import softplus
from torchrl.modules import TanhNormal

from klrl.kl.estimators import sum_beyond

#: Where a policy may keep the sample before tanh, beside its action.
PRE_TANH = "pre_tanh"
_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def readable(
    log_prob: Tensor,
    dist: Distribution,
    batch: TensorDictBase,
    action_key: str | tuple[str, ...],
    known: Callable[[], tuple[Distribution | None, Tensor | None]],
) -> Tensor:
    """A log-prob, put right where tanh was saturated.

    Args:
        log_prob: as the distribution gives it, [...].
        dist: that distribution.
        batch: its actions, and ``pre_tanh`` beside the action where a policy kept it.
        action_key: of the action; a composite's heads name theirs.
        known: gives what the actions were sampled from, and the sample's log-prob [...] as that
            policy wrote it, each None where the data lack it. With the second the noise of what is
            not known cancels in the log-ratio.

    Returns:
        [...]; with a warning where an action is saturated and nothing else is known of it.
    """
    heads = [(key, head) for key, head in _heads(dist, action_key) if isinstance(head, TanhNormal)]
    if not heads:
        return log_prob
    u = None if isinstance(dist, CompositeDistribution) else batch.get(beside(action_key), None)
    if u is not None:
        return log_prob_before_tanh(heads[0][1], u)
    rows = [_any_beyond(saturated(head, batch.get(key)), log_prob.ndim) for key, head in heads]
    lost = torch.stack(rows).any(0)
    if not bool(lost.any()):
        return log_prob
    source, stored = known()
    if source is None:
        warn()
        return log_prob
    expected = _expected(dist, batch, action_key, source, log_prob.ndim)
    if stored is not None and stored.shape == log_prob.shape:
        # The same u on both sides: what the stored one has above its mean, this one has too.
        expected = expected + stored
        expected = expected - _expected(source, batch, action_key, source, log_prob.ndim)
    return torch.where(lost, expected, log_prob)


def any_lost(
    dist: Distribution | None, batch: TensorDictBase, action_key: str | tuple[str, ...]
) -> bool:
    """Whether an action is saturated, and its sample before tanh was not kept."""
    if dist is None or batch.get(beside(action_key), None) is not None:
        return False
    heads = _heads(dist, action_key)
    return any(
        isinstance(head, TanhNormal) and bool(saturated(head, batch.get(key)).any())
        for key, head in heads
    )


def warn(more: str = "") -> None:
    """Say that log-probs cannot be read from saturated actions, and the remedy.

    Args:
        more: a further remedy.
    """
    warnings.warn(
        "actions lie on the bounds of TanhNormal to within rounding, where their log-prob cannot "
        f"be computed from them: {more}keep in the data what the policy writes (loc, scale), or "
        "the sample before tanh (pre_tanh), or sample in float64",
        stacklevel=3,
    )


def beside(action_key: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Where ``pre_tanh`` stands: beside the action."""
    return (*action_key[:-1], PRE_TANH) if isinstance(action_key, tuple) else PRE_TANH


def saturated(dist: TanhNormal, action: Tensor) -> Tensor:
    """Which coordinates of an action are a bound, as far as its type can tell: bool."""
    t, slack = _squashed(dist, action)
    return t.abs() >= 1 - slack


def log_prob_before_tanh(dist: TanhNormal, u: Tensor) -> Tensor:
    """log pi(a|s) = log N(u; loc, scale) - log |da/du|, from the sample before tanh [..., A]."""
    root = dist.root_dist
    each = root.log_prob(u) - _log_slope(u) - _half(dist, u).log()
    return _sum_event(dist, each)


def expected_log_prob(dist: TanhNormal, action: Tensor, sampled: TanhNormal) -> Tensor:
    """log pi(a|s), where a is saturated its mean over what u may have been.

    With u ~ N(m, s) beyond the cut c, alpha = (c - m) / s and lambda = phi(alpha) / Phi(-alpha):
    E u = m + s lambda, Var u = s^2 (1 + alpha lambda - lambda^2). There log |dtanh/du| is
    2 (log 2 - u) to within exp(-2 c).

    Args:
        dist: of pi.
        action: [..., A].
        sampled: what the action was sampled from, with the same bounds.
    """
    t, slack = _squashed(dist, action)
    side = t.sign()
    cut = torch.atanh(1 - slack)
    u = torch.atanh(t.clamp(-1 + slack, 1 - slack))
    root, source = dist.root_dist, sampled.root_dist
    point = root.log_prob(u) - _log_slope(u)
    # Both bounds alike: mirrored, the cut is above.
    loc, scale, own = side * source.loc, source.scale, side * root.loc
    alpha = (cut - loc) / scale
    hazard = (-0.5 * alpha**2 - _HALF_LOG_2PI - torch.special.log_ndtr(-alpha)).exp()
    mean = loc + scale * hazard
    variance = scale**2 * (1 + alpha * hazard - hazard**2).clamp_min(0.0)
    square = (variance + (mean - own) ** 2) / (2 * root.scale**2)
    tail = -square - root.scale.log() - _HALF_LOG_2PI - 2 * (math.log(2) - mean)
    each = torch.where(t.abs() >= 1 - slack, tail, point) - _half(dist, u).log()
    return _sum_event(dist, each)


def _expected(
    dist: Distribution,
    batch: TensorDictBase,
    action_key: str | tuple[str, ...],
    sampled: Distribution,
    batch_dims: int,
) -> Tensor:
    """The sum over heads of :func:`expected_log_prob`, or of the plain log-prob."""
    sources = dict(_heads(sampled, action_key))
    each = [
        expected_log_prob(head, batch.get(key), sources[key])
        if isinstance(head, TanhNormal)
        else head.log_prob(batch.get(key))
        for key, head in _heads(dist, action_key)
    ]
    return torch.stack([sum_beyond(value, batch_dims) for value in each]).sum(0)


def _heads(
    dist: Distribution, action_key: str | tuple[str, ...]
) -> list[tuple[str | tuple[str, ...], Distribution]]:
    """(the key of its action, its distribution) of every head."""
    if isinstance(dist, CompositeDistribution):
        return list(dist.dists.items())
    return [(action_key, dist)]


def _squashed(dist: TanhNormal, action: Tensor) -> tuple[Tensor, Tensor]:
    """tanh(u) as the action gives it, and how far from 1 rounding lets it be.

    TorchRL keeps tanh(u) a ``resolution`` away from 1; the action has its bounds' rounding too.
    """
    low, high = (torch.as_tensor(bound).to(action) for bound in (dist.low, dist.high))
    half = 0.5 * (high - low)
    info = torch.finfo(action.dtype)
    ulp = info.eps * torch.maximum(low.abs(), high.abs()) / half
    slack = 2 * ulp.clamp_min(info.resolution)
    # A power of two: 1 - slack is then a number of this type, and the cut where it is said to be.
    return (action - low) / half - 1, slack.log2().ceil().exp2()


def _half(dist: TanhNormal, like: Tensor) -> Tensor:
    low, high = (torch.as_tensor(bound).to(like) for bound in (dist.low, dist.high))
    return 0.5 * (high - low)


def _log_slope(u: Tensor) -> Tensor:
    """log dtanh/du = 2 (log 2 - |u| - log(1 + exp(-2 |u|))), stable on both sides."""
    return 2 * (math.log(2) - u.abs() - softplus(-2 * u.abs()))


def _sum_event(dist: TanhNormal, each: Tensor) -> Tensor:
    return each.flatten(-len(dist.event_shape)).sum(-1) if dist.event_shape else each


def _any_beyond(flags: Tensor, batch_dims: int) -> Tensor:
    """Whether any flag beyond the batch's dimensions is set, [...]."""
    return flags.flatten(batch_dims).any(-1) if flags.ndim > batch_dims else flags
