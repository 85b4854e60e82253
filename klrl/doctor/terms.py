"""What the parts of a loss consist of: a known term, times an importance weight.

Each term is given by its gradient at the logits of every step. Its expectation is compared with
that of a loss; or, step by step, with the gradient of a loss there, which shows every weight and
where it was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, softplus

from klrl.doctor.problems import Numbers, Problem, flat_gradient, mean_by_state
from klrl.kl.charge import to_go
from klrl.kl.divergences import MEASURED, over_actions

#: Largest relative error of a gradient that still is the same: float32 inside a loss costs 1e-6.
TOLERANCE = 1e-4
#: Weights [N, steps] of log-ratios r = log pi - log pi_old, 0 outside the mask, and lengths. The
#: first that fits is reported: the right one of whole episodes where these have one step.
WEIGHTS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sequence": lambda r, _: r.sum(1, keepdim=True).exp().expand_as(r),
    "prefix": lambda r, _: r.cumsum(1).exp(),
    "token": lambda r, _: r.exp(),
    "none": lambda r, _: torch.ones_like(r),
    "before": lambda r, _: (r.cumsum(1) - r).exp(),
    "geometric": lambda r, n: (r.sum(1, keepdim=True) / n).exp().expand_as(r),
    "inverse": lambda r, _: (-r).exp(),
}
#: What is charged in a reward in place of k1, of log-ratios that are 0 outside the mask.
REWARDED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k2": lambda r: r**2 / 2,
    "k3": lambda r: torch.expm1(-r) + r,
    "abs": torch.abs,
}


class Term(NamedTuple):
    """A term without its weight."""

    what: str  # return, or the divergence whose gradient it has; else the code of a fault
    scope: str
    exact: bool  # a sum over the actions, which needs no ratio of its own


class Reading(NamedTuple):
    """What a part of a loss consists of."""

    term: Term
    weight: str  # one of WEIGHTS
    by_length: bool  # divided by the length of each response
    sign: int
    cut: str = ""  # truncated: constant beyond a bound; clipped: 0 there


#: Terms of a batch, and what computes their gradients where the mask holds, [M, actions].
Terms = list[tuple[Term, Callable[[], Tensor]]]
TermsOf = Callable[[Numbers], Terms]


def return_terms(numbers: Numbers) -> Terms:
    """Of the return, to be minimised."""
    gains, total = to_go(numbers.rewards, numbers.mask), numbers.rewards.sum(1, keepdim=True)
    credits = numbers.advantages, gains, total, total - total.mean()
    scores = [("return", credit) for credit in credits] + [("own_reward", numbers.rewards)]
    return [(Term(what, "sequence", False), partial(_scored, numbers, -x)) for what, x in scores]


def kl_terms(numbers: Numbers, to: str) -> Terms:
    """Of a divergence from ``to``, to be minimised."""
    mask, log_p = numbers.mask, numbers.logits.detach()
    log_q = (numbers.ref_logits if to == "ref" else numbers.old_logits).detach()
    at = numbers.actions[..., None]
    own, old = (
        (log_probs - log_q).gather(-1, at).squeeze(-1).masked_fill(~mask, 0.0)
        for log_probs in (log_p, numbers.old_logits)
    )
    total = own.sum(1, keepdim=True)
    all_to_go, later = to_go(own, mask), to_go(own, mask, "split")
    states = numbers.states

    def credited(x: Tensor) -> list[Tensor]:
        """To go, of the whole episode, and both without their means."""
        gains, whole = to_go(x, mask), x.sum(1, keepdim=True)
        mean = mean_by_state(gains, numbers, int(states.max()) + 1)[states]
        return [gains, whole, gains - mean, whole - whole.mean()]

    def at_logits(divergence: str) -> Tensor:
        leaf = log_p.clone().requires_grad_()
        value = over_actions(divergence, leaf.log_softmax(-1), log_q).sum()
        return torch.autograd.grad(value, leaf)[0][mask]

    twice, scores = Term("twice", "token", True), []
    for scope, r in (("token", own), ("sequence", total)):
        scores += [  # f(u) - u f'(u) for D = E_pi[f(u)], u = exp(-r)
            ("reverse", scope, r),  # as k2 has it
            ("reverse", scope, r + 1),  # k1 under a differentiable ratio
            ("forward", scope, -torch.expm1(-r)),  # k3
            ("forward", scope, -(-r).exp()),
            ("js", scope, (math.log(2) - softplus(-r)) / 2),
            ("tv", scope, r.sign() / 2),
            ("k2_value", scope, r + r**2 / 2),  # k2 under a differentiable ratio
            ("k3_swapped", scope, torch.expm1(r)),
        ]
    scores += [
        ("reverse", "sequence", all_to_go),
        ("later_only", "sequence", later),
        ("later_twice", "sequence", all_to_go + later),
        ("exact_in_reward", "sequence", to_go(over_actions("reverse", log_p, log_q), mask)),
        ("k1_in_loss", "token", torch.ones_like(own)),
        *(("stale_kl", "sequence", x) for x in (*credited(old), old)),
        *(
            (f"{name}_in_reward", "sequence", x)
            for r in (own, old)
            for name, value in REWARDED.items()
            for x in credited(value(r))
        ),
    ]
    return [
        *((Term(what, of, False), partial(_scored, numbers, x)) for what, of, x in scores),
        (twice, lambda: at_logits("reverse") + _scored(numbers, all_to_go)),
        *((Term(name, "token", True), partial(at_logits, name)) for name in MEASURED),
    ]


def _scored(numbers: Numbers, score: Tensor) -> Tensor:
    """The gradient of score * log pi(action) at the logits."""
    chosen = one_hot(numbers.actions, numbers.logits.shape[-1])
    return (score[..., None] * (chosen - numbers.logits.exp()))[numbers.mask].detach()


def _weights(numbers: Numbers) -> Iterator[tuple[str, bool, Tensor]]:
    """Those that differ, [M]; then those that are divided by the length."""
    mask = numbers.mask
    ratio = (numbers.log_probs - numbers.old_log_probs).detach().masked_fill(~mask, 0.0)
    lengths = mask.sum(1, keepdim=True)
    for by_length in (False,) if mask.all() else (False, True):
        for name, weight in WEIGHTS.items() if ratio.any() else [("sequence", WEIGHTS["none"])]:
            divisor = lengths if by_length else 1
            yield name, by_length, (weight(ratio, lengths) / divisor)[mask]


def factors(
    gradients: Sequence[Tensor], problems: Sequence[Problem], known: Callable[[Problem], Tensor]
) -> list[float]:
    """By what a known gradient is multiplied on each problem, all of one sign; empty: it is not."""
    found: list[float] = []
    for gradient, problem in zip(gradients, problems, strict=True):
        of = known(problem)
        square = float(of @ of)
        factor = float(gradient @ of) / square if square > 1e-20 else 0.0
        off = float((gradient - factor * of).norm())
        if off > TOLERANCE * float(gradient.norm()) or factor * (found or [factor])[0] <= 0:
            return []
        found.append(factor)
    return found


def fit(
    gradients: Sequence[Tensor], problems: Sequence[Problem], terms: TermsOf
) -> tuple[Reading, list[float]] | None:
    """The first term and weight whose expected gradient, times factors, these are everywhere."""
    first = problems[0].batch
    for at, (term, _) in enumerate(terms(first)):
        for number, (name, by_length, _) in enumerate(_weights(first)):

            def known(problem: Problem, at: int = at, number: int = number) -> Tensor:
                batch = problem.batch
                _, _, weight = [*_weights(batch)][number]
                step = terms(batch)[at][1]() * weight[:, None]
                value = (batch.logits[batch.mask] * step).sum() / len(batch.mask)
                return flat_gradient(value, problem.parameters)

            if found := factors(gradients, problems, known):
                return Reading(term, name, by_length, 1 if found[0] > 0 else -1), found
    return None


def read(
    gradients: Sequence[Tensor], problems: Sequence[Problem], terms: TermsOf
) -> Reading | None:
    """What these gradients at logits [N, steps, actions], one per problem, consist of."""
    found: list[dict[Reading, str]] = []
    for gradient, problem in zip(gradients, problems, strict=True):
        # log pi are logits too; softmax does not see a constant
        batch = problem.batch
        constant = batch.logits.detach().exp() * gradient.sum(-1, keepdim=True)
        at = len(gradient) * (gradient - constant)[batch.mask]
        found.append({r._replace(cut=""): r.cut for r in _readings(at, terms(batch), batch)})
    fits = []
    for reading in dict.fromkeys(reading for cuts in found for reading in cuts):
        cuts = [cuts[reading] for cuts in found if reading in cuts]
        if len(cuts) == len(found) or (any(cuts) and len(cuts) > 0.6 * len(found)):
            fits.append(reading._replace(cut=max(cuts)))  # where all are cut none can be told
    return min(fits, key=lambda reading: reading.cut != "", default=None)


def _readings(gradient: Tensor, terms: Terms, numbers: Numbers) -> Iterator[Reading]:
    weights = list(_weights(numbers))
    for term, compute in terms:
        known = compute()
        square = known.square().sum(-1)
        seen = square > 1e-12
        share = (gradient * known).sum(-1) / square.clamp_min(1e-300) * seen
        rest = gradient - share[:, None] * known
        if rest.abs().max() > 1e-5 * gradient.abs().max():
            continue
        sign = 1 if float(share.sum()) > 0 else -1
        for name, by_length, weight in weights:
            if (cut := _cut(sign * share[seen], weight[seen])) is not None:
                yield Reading(term, name, by_length, sign, cut)


def _cut(share: Tensor, weight: Tensor) -> str | None:
    """How a weight was cut so that it became this share of a term; None: it is another weight."""
    alive = share > 1e-9
    if (share < -1e-9).any() or not alive.any():
        return None
    scaled = (share / weight)[alive]
    unit = scaled.log().mul(1e5).round().mode().values.div(1e5).exp()
    same = (scaled / unit - 1).abs() < 1e-4
    bounds = (share[alive][~same] / unit).mul(1e4).round().unique()
    if same.double().mean() < 0.2 or len(bounds) > 2:
        return None
    return "clipped" if not alive.all() else "truncated" if len(bounds) else ""
