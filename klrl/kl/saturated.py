"""log pi(a|s) of a TanhNormal whose action was rounded to a bound (a saturated action).

The action is a = mid + half * tanh(u). In float32 every u above about 7 gives the same a. TorchRL's
inverse maps this a to a single u, whose log-prob may be wrong by a hundred nats (at loc 15).

The true u is lost, but its distribution is known from the policy's parameters in the data: a
Gaussian, truncated at a known cut. :func:`draw` draws a new u from it, and replaces the stored
log-prob by that of the new u. Policy, reference and loss read the new u, so ratio, KL and score
belong to one sample. The means of ratio, KL and score are the same as for the lost u.

The draw needs no random generator: its randomness comes from the bits of the parameters and of the
stored log-prob. So a second draw for the same transition gives the same u. Inside an environment
this is necessary: TorchRL gives a transform a copy of the transition, and discards the copy's u.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import softplus
from torchrl.modules import TanhNormal

from klrl.kl.estimators import sum_beyond
from klrl.kl.shapes import add_heads

#: The key under which a policy may store the sample before tanh, next to its action.
PRE_TANH = "pre_tanh"
#: No sample is this many standard deviations from loc: PyTorch's float32 Gaussian ends at 6.7.
REACH = 7.0
#: Largest rounding error of a log-prob: the sum of an absolute part (nats) and a relative part.
TOLERANCE = (1.0, 1e-2)

ActionKey: TypeAlias = str | tuple[str, ...]


@torch.no_grad()
def draw(
    batch: TensorDictBase,
    sampled: Distribution,
    action_key: ActionKey,
    log_prob_keys: Sequence[ActionKey],
) -> None:
    """Write samples before tanh and their log-probs into a batch with saturated actions.

    For an action that is not saturated, the sample is TorchRL's inverse of tanh. For a saturated
    action that ``sampled`` cannot have produced, klrl also writes the inverse, but warns, and keeps
    the stored log-prob. If no new u is drawn, the batch is unchanged.

    Args:
        batch: the transitions, changed in place.
        sampled: the distribution that the actions were sampled from.
        action_key: key of the action; not read for a composite, whose heads have their own keys.
        log_prob_keys: keys of the sampling policy's log-probs; empty if the batch has none.
    """
    if not any_lost(sampled, batch, action_key):
        return
    heads = _tanh_heads(sampled, action_key)
    written = [batch.get(key) for key in log_prob_keys]
    stored = add_heads(written) if written else None
    rows = batch.ndim if stored is None else stored.ndim
    drawn, span = batch.copy(), torch.zeros(())
    for number, (key, head) in enumerate(heads):
        u, log_prob_bound = _beyond_the_cut(head, batch.get(key), stored, number)
        drawn.set(kept_at(sampled, key), u)
        span = span.to(log_prob_bound) + sum_beyond(log_prob_bound, rows)
    each = log_probs(sampled, drawn, action_key)
    total = add_heads(list(each.values()))
    lost, possible = span > 0, sum_beyond(total, rows).isfinite()
    if stored is not None:
        slack = span + TOLERANCE[0] + TOLERANCE[1] * stored.abs()
        possible = (sum_beyond(total, rows) - stored).abs() <= slack
    if not bool(possible[lost].all()):
        warn()
    if not bool(possible[lost].any()):
        return
    for key, head in heads:
        u, inverse = drawn.get(kept_at(sampled, key)), head.transforms[0].inv(batch.get(key))
        batch.set(kept_at(sampled, key), torch.where(expanded(possible, u), u, inverse))
    for key, value in zip(log_prob_keys, written, strict=True):
        new = sum_beyond(each.get(key, total) if len(written) > 1 else total, value.ndim)
        batch.set(key, torch.where(expanded(possible, value), new.to(value), value))


def log_probs(
    dist: Distribution, batch: TensorDictBase, action_key: ActionKey
) -> dict[ActionKey, Tensor]:
    """Compute log pi(a|s) of every head, from the sample before tanh if the batch has one.

    Returns key -> log-prob, in the batch shape of the head's distribution. The key is that of the
    head's action, with the suffix ``_log_prob``.
    """
    each = {}
    for key, head in _heads(dist, action_key):
        u = batch.get(kept_at(dist, key), None)
        before = isinstance(head, TanhNormal) and u is not None
        value = log_prob_before_tanh(head, u) if before else head.log_prob(batch.get(key))
        each[_suffixed(key, "log_prob")] = value
    return each


def any_kept(dist: Distribution, batch: TensorDictBase, action_key: ActionKey) -> bool:
    """Whether the batch has a sample before tanh for a TanhNormal head."""
    keys = [kept_at(dist, key) for key, _ in _tanh_heads(dist, action_key)]
    return any(batch.get(key, None) is not None for key in keys)


def any_lost(dist: Distribution, batch: TensorDictBase, action_key: ActionKey) -> bool:
    """Whether an action is saturated and its sample before tanh is missing."""
    return not any_kept(dist, batch, action_key) and any(
        batch.get(key, None) is not None and bool(saturated(head, batch.get(key)).any())
        for key, head in _tanh_heads(dist, action_key)
    )


def warn() -> None:
    """Warn that log-probs cannot be computed from saturated actions."""
    warnings.warn(
        "actions lie on the bounds of TanhNormal to within rounding, so their log-prob cannot be "
        "computed from them. No parameters in the data could have produced these actions: klrl "
        "uses TorchRL's log-prob, which may be wrong by many nats. Keep loc, scale and log-prob of "
        "the policy in the data, or the sample before tanh (pre_tanh), or sample in float64",
        stacklevel=3,
    )


def sibling(key: ActionKey, name: str = PRE_TANH) -> ActionKey:
    """Return the key ``name`` next to ``key``: ``("a", "action")`` -> ``("a", "pre_tanh")``."""
    return (*key[:-1], name) if isinstance(key, tuple) else name


def kept_at(dist: Distribution, action_key: ActionKey) -> ActionKey:
    """Return the key of a sample before tanh; a composite's key includes the action's name."""
    composite = isinstance(dist, CompositeDistribution)
    return _suffixed(action_key, PRE_TANH) if composite else sibling(action_key)


def saturated(dist: TanhNormal, action: Tensor) -> Tensor:
    """Return a mask of the coordinates that equal a bound to within rounding."""
    t, least, _ = _squashed(dist, action)
    return t.abs() >= least


def log_prob_before_tanh(dist: TanhNormal, u: Tensor) -> Tensor:
    """Compute log pi(a|s) = log N(u; loc, scale) - log |da/du| from u [..., A]."""
    low, high = (torch.as_tensor(bound).to(u) for bound in (dist.low, dist.high))
    each = dist.root_dist.log_prob(u) - _log_slope(u) - (0.5 * (high - low)).log()
    return each.flatten(-len(dist.event_shape)).sum(-1) if dist.event_shape else each


def _beyond_the_cut(
    dist: TanhNormal, action: Tensor, stored: Tensor | None, n: int
) -> tuple[Tensor, Tensor]:
    """Draw u [..., A] where the action is saturated; bound how far log-probs of draws differ."""
    # A draw of N(loc, scale) above the cut: u = loc + scale z with z = -Phi^-1(v Phi(-alpha)),
    # alpha = (cut - loc) / scale, and v uniform in (0, 1). If alpha > REACH, u is NaN. The log-prob
    # of the draw is const + 2 scale z - z^2 / 2.
    t, least, ulp = _squashed(dist, action)
    # The cut is half a float's spacing below ``least``: all tanh(u) above it round to >= ``least``.
    side, cut = t.sign(), torch.atanh(least.double() - ulp.double() / 4)
    loc, scale = dist.root_dist.loc, dist.root_dist.scale
    stored = action.new_zeros(()) if stored is None else expanded(stored, action)
    v = _uniform(*torch.broadcast_tensors(loc, scale, stored, action.new_tensor(n)))
    # Mirror the Gaussian at the lower bound, so that the draw there is above the cut too.
    alpha = (cut - side * loc.double()) / scale.double()
    z = -torch.special.ndtri(v * torch.special.log_ndtr(-alpha).exp())
    z = z.clamp_min(alpha).masked_fill(alpha > REACH, torch.nan)
    u = (loc.double() + side * scale.double() * z).to(action)
    log_prob_bound = (REACH - alpha.clamp_min(-REACH)).abs().to(u) * (REACH + 2 * scale)
    beyond, inverse = t.abs() >= least, dist.transforms[0].inv(action)
    return torch.where(beyond, u, inverse), torch.where(beyond, log_prob_bound, 0.0)


def _uniform(*known: Tensor) -> Tensor:
    """Hash the bits of the given tensors (MurmurHash3's last step) to numbers in (0, 1)."""
    bits = torch.zeros_like(known[0], dtype=torch.int64)
    for value in known:
        bits = _mixed(bits ^ value.float().view(torch.int32))
    # Number the entries with equal bits, so that their draws differ.
    order = bits.flatten().argsort(stable=True)
    found, number = bits.flatten()[order], torch.empty_like(order)
    number[order] = torch.arange(len(order), device=order.device) - torch.searchsorted(found, found)
    return (_mixed(bits ^ number.view_as(bits)).double() + 0.5) / 2**32


def _mixed(bits: Tensor) -> Tensor:
    bits = bits & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = (bits ^ (bits >> shift)) * factor & 0xFFFFFFFF
    return bits


def _heads(dist: Distribution, action_key: ActionKey) -> list[tuple[ActionKey, Distribution]]:
    if isinstance(dist, CompositeDistribution):
        return list(dist.dists.items())
    return [(action_key, dist)]


def _tanh_heads(dist: Distribution, action_key: ActionKey) -> list[tuple[ActionKey, Any]]:
    return [each for each in _heads(dist, action_key) if isinstance(each[1], TanhNormal)]


def _suffixed(key: ActionKey, suffix: str) -> ActionKey:
    return f"{key}_{suffix}" if isinstance(key, str) else (*key[:-1], f"{key[-1]}_{suffix}")


def _squashed(dist: TanhNormal, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tanh(u), the smallest saturated |tanh(u)|, and twice the floats' spacing near 1."""
    # TorchRL clips |tanh(u)| to 1 - resolution. The action's rounding depends on its bounds' size.
    low, high = (torch.as_tensor(bound).to(action) for bound in (dist.low, dist.high))
    half = 0.5 * (high - low)
    info = torch.finfo(action.dtype)
    ulp = info.eps * torch.maximum(low.abs(), high.abs()) / half
    slack = 2 * ulp.clamp_min(info.resolution)
    # Round the slack up to a power of two, so that this dtype represents 1 - slack exactly.
    return (action - 0.5 * (high + low)) / half, 1 - slack.log2().ceil().exp2(), ulp


def _log_slope(u: Tensor) -> Tensor:
    """log dtanh/du = 2 (log 2 - |u| - log(1 + exp(-2 |u|))), stable for both signs of u."""
    return 2 * (math.log(2) - u.abs() - softplus(-2 * u.abs()))


def expanded(rows: Tensor, like: Tensor) -> Tensor:
    """Append dimensions of 1 to ``rows`` [*B], so that it broadcasts with ``like`` [*B, ...]."""
    return rows.reshape((*rows.shape, *[1] * (like.ndim - rows.ndim)))
