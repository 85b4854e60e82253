"""Recognises a part of a loss as a known term times an importance weight.

The part's gradient is compared with that of each known term, in expectation or at each step's
logits. The comparison at each step also shows the weights, and where they are clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from klrl.doctor.problems import Numbers, Problem, mean_by_state
from klrl.kl.charge import to_go
from klrl.kl.divergences import MEASURED, over_actions

#: Gradients with a smaller relative difference count as equal; float32 in a loss causes 1e-6.
TOLERANCE = 1e-4
#: Name -> weight [N, steps], from log-ratios r = log pi - log pi_old (0 outside the mask) and
#: lengths n. The first weight that fits is reported, so that one-step episodes give ``sequence``.
WEIGHTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sequence": lambda r, _: r.sum(1, keepdim=True).exp().expand_as(r),
    "prefix": lambda r, _: r.cumsum(1).exp(),
    "token": lambda r, _: r.exp(),
    "none": lambda r, _: torch.ones_like(r),
    "before": lambda r, _: (r.cumsum(1) - r).exp(),
    "geometric": lambda r, n: (r.sum(1, keepdim=True) / n).exp().expand_as(r),
    "inverse": lambda r, _: (-r).exp(),
}
#: Wrong estimator in the reward -> its value, from log-ratios log p / q (0 outside the mask).
REWARDED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k2": lambda r: r**2 / 2,
    "k3": lambda r: torch.expm1(-r) + r,
    "abs": torch.abs,
}


class Reading(NamedTuple):
    """The known term and the weight that make up a part of a loss."""

    what: str  # return, a divergence, or else the code of a fault
    scope: str
    exact: bool = False  # whether the term sums over all actions: needs no ratio of its own step
    weight: str = "sequence"  # one of WEIGHTS, or ``reference``: pi / pi_ref of the episode
    by_length: bool = False  # whether the term is divided by the length of each response
    sign: int = 1
    #: How the weight was cut: ``truncated``, constant beyond a bound; ``clipped``, 0 beyond it;
    #: ``clip_max``, 0 where a descent step would bring the weight back towards 1.
    cut: str = ""

    def may_have(self, weight: str) -> bool:
        """Whether to try ``weight``; pi / pi_ref would turn the forward KL's gradient into k1's."""
        known = (("return", "sequence"), ("reverse", "sequence"))
        return weight != "reference" or self[:2] in known


#: Batch -> (term, gradient of the unweighted term at the M logits in the mask, [M, actions]).
Terms = Callable[[Numbers], Iterator[tuple[Reading, Tensor]]]


def return_terms(numbers: Numbers) -> Iterator[tuple[Reading, Tensor]]:
    """Yield the known terms for the return, with their gradients."""
    gains, total = to_go(numbers.rewards, numbers.mask), numbers.rewards.sum(1, keepdim=True)
    for credit in (numbers.advantages, gains, total, total - total.mean()):
        yield Reading("return", "sequence"), numbers.scored(-credit)
    yield Reading("own_reward", "sequence"), numbers.scored(-numbers.rewards)


def kl_terms(numbers: Numbers, to: str) -> Iterator[tuple[Reading, Tensor]]:
    """Yield the known terms for divergences from ``to`` (ref or old), with their gradients."""
    mask, log_p, states = numbers.mask, numbers.logits.detach(), numbers.states
    log_q = numbers.ref_logits if to == "ref" else numbers.old_logits
    own, old = (numbers.of_actions(x - log_q).where(mask, 0.0) for x in (log_p, numbers.old_logits))
    chosen = numbers.of_actions(log_p).where(mask, 0.0)
    gains, later = to_go(own, mask), to_go(own, mask, "split")

    def credited(x: Tensor) -> list[Tensor]:
        """List the sums to go of ``x``, its sums over the episode, and both minus their means."""
        gains, whole = to_go(x, mask), x.sum(1, keepdim=True)
        mean = mean_by_state(gains, numbers, int(states.max()) + 1)[states]
        return [gains, whole, gains - mean, whole - whole.mean()]

    def at_logits(divergence: str) -> Tensor:
        leaf = log_p.clone().requires_grad_()
        value = over_actions(divergence, leaf.log_softmax(-1), log_q).sum()
        return torch.autograd.grad(value, leaf)[0][mask]

    scores = []
    for scope, r in (("token", own), ("sequence", own.sum(1, keepdim=True))):
        scores += [  # score f(u) - u f'(u), for D = E_pi[f(u)] and u = exp(-r)
            ("reverse", scope, r),  # k2
            ("reverse", scope, r + 1),  # k1 under a differentiable ratio
            ("forward", scope, -torch.expm1(-r)),  # k3
            ("forward", scope, -(-r).exp()),
            ("js", scope, (math.log(2) - softplus(-r)) / 2),
            ("tv", scope, r.sign() / 2),
            ("k2_value", scope, r + r**2 / 2),  # k2 under a differentiable ratio
            ("k3_swapped", scope, torch.expm1(r)),
            ("u_log_u", scope, (r - 1) * (-r).exp()),
        ]
    scores += [
        ("reverse", "sequence", gains),
        ("later_only", "sequence", later),
        ("later_twice", "sequence", gains + later),
        ("exact_in_reward", "sequence", to_go(over_actions("reverse", log_p, log_q), mask)),
        ("k1_in_loss", "token", torch.ones_like(own)),
        ("undetached", "sequence", gains + chosen.cumsum(1)),
        ("undetached", "sequence", (own + chosen).sum(1, keepdim=True)),
        *(("stale_kl", "sequence", x) for x in (*credited(old), old)),
        *(
            (f"{name}_in_reward", "sequence", x)
            for r in (own, old)
            for name, value in REWARDED.items()
            for x in credited(value(r))
        ),
    ]
    for what, scope, score in scores:
        yield Reading(what, scope), numbers.scored(score)
    yield Reading("twice", "token", exact=True), at_logits("reverse") + numbers.scored(gains)
    for name in MEASURED:
        yield Reading(name, "token", exact=True), at_logits(name)


def _weights(numbers: Numbers) -> list[tuple[str, bool, Tensor]]:
    """List (name, by_length, values [M]): all weights; if lengths vary, also weights / length."""
    mask = numbers.mask
    ratio, to_ref = (
        (numbers.log_probs - other).detach().where(mask, 0.0)
        for other in (numbers.old_log_probs, numbers.ref_log_probs)
    )
    lengths = mask.sum(1, keepdim=True)
    known = WEIGHTS if ratio.any() else {"sequence": WEIGHTS["none"]}
    weights = {name: weight(ratio, lengths) for name, weight in known.items()}
    weights["reference"] = WEIGHTS["sequence"](to_ref, lengths)
    return [
        (name, by_length, (weight / (lengths if by_length else 1))[mask])
        for by_length in ((False,) if mask.all() else (False, True))
        for name, weight in weights.items()
    ]


def _factor(gradient: Tensor, known: Tensor) -> float:
    """Return f if the gradient is f * known; else 0."""
    square = float(known @ known)
    factor = float(gradient @ known) / square if square > 1e-20 else 0.0
    same = (gradient - factor * known).norm() <= TOLERANCE * gradient.norm()
    return factor if same else 0.0


def factors(
    gradients: Sequence[Tensor], problems: Sequence[Problem], known: Callable[[Problem], Tensor]
) -> list[float]:
    """Return gradient / known for each problem; [] unless all exist and have the same sign."""
    found: list[float] = []
    for gradient, problem in zip(gradients, problems, strict=True):
        factor = _factor(gradient, known(problem))
        if factor * (found or [factor])[0] <= 0:
            return []
        found.append(factor)
    return found


def fit(
    gradients: Sequence[Tensor], problems: Sequence[Problem], terms: Terms
) -> tuple[Reading, list[float]] | None:
    """Find the first term and weight that give these gradients, up to factors of one sign."""
    first = problems[0].batch
    for place, (term, at) in enumerate(terms(first)):
        for number, (name, by_length, weight) in enumerate(_weights(first)):
            if not term.may_have(name):
                continue
            if not _factor(gradients[0], first.at_table(at * weight[:, None])):
                continue
            if times := factors(gradients, problems, partial(_known, terms, place, number)):
                sign = 1 if times[0] > 0 else -1
                return term._replace(weight=name, by_length=by_length, sign=sign), times
    return None


def _known(terms: Terms, place: int, number: int, problem: Problem) -> Tensor:
    """Compute the expected gradient of term number ``place`` with weight number ``number``."""
    batch = problem.batch
    return batch.at_table([*terms(batch)][place][1] * _weights(batch)[number][2][:, None])


def read(gradients: Sequence[Tensor], problems: Sequence[Problem], terms: Terms) -> Reading | None:
    """Find the reading that fits the gradients at the logits of the first problems, if any does."""
    found: dict[Reading, list[str]] = {}
    for gradient, problem in zip(gradients, problems, strict=False):
        for reading, cut in dict(_readings(gradient, terms, problem.batch)).items():
            found.setdefault(reading, []).append(cut)
    count = len(gradients)
    fits = [  # a problem whose weights are all cut has no reading, so 60 % of problems suffice
        reading._replace(cut=max(cuts))
        for reading, cuts in found.items()
        if len(cuts) == count or (any(cuts) and len(cuts) > 0.6 * count)
    ]
    return min(fits, key=lambda reading: reading.cut != "", default=None)


def _readings(gradient: Tensor, terms: Terms, numbers: Numbers) -> Iterator[tuple[Reading, str]]:
    weights = _weights(numbers)
    for term, known in terms(numbers):
        square = known.square().sum(-1)
        seen = square > 1e-12
        share = (gradient * known).sum(-1) / square.clamp_min(1e-300) * seen
        rest = gradient - share[:, None] * known
        if rest.abs().max() > 1e-5 * gradient.abs().max():
            continue
        sign = 1 if float(share.sum()) > 0 else -1
        up = sign * known.gather(1, numbers.actions[numbers.mask][:, None])[:, 0] < 0
        for name, by_length, weight in weights:
            cut = _cut(sign * share[seen], weight[seen], up[seen]) if term.may_have(name) else None
            if cut is not None:
                yield term._replace(weight=name, by_length=by_length, sign=sign), cut


def _cut(share: Tensor, weight: Tensor, up: Tensor) -> str | None:
    """Return how ``weight`` was cut to give ``share``; None if ``share`` is a different weight.

    ``up``: whether a descent step raises the action's probability; if so, PPO cuts large weights.
    """
    alive = share > 1e-9
    if (share < -1e-9).any() or not alive.any():
        return None
    scaled = (share / weight)[alive]
    unit = scaled.log().mul(1e5).round().mode().values.div(1e5).exp()
    same = (scaled / unit - 1).abs() < 1e-4
    bounds = (share[alive][~same] / unit).mul(1e4).round().unique()
    if same.double().mean() < 0.2 or len(bounds) > 2:
        return None
    if alive.all():
        return "truncated" if len(bounds) else ""
    return "clip_max" if ((weight < 1) == up)[~alive].all() else "clipped"
