"""Gradients that wrong losses are known to have, and what to say of a loss that has one of them.

Each is the gradient of a known loss on a batch that holds every episode as often as it is probable,
so it is an expectation, like the gradient that it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from klrl.base.tables import read_table
from klrl.doctor.aims import RETURNS, Aim, aims, every_aim
from klrl.doctor.problems import Numbers, Problem, flat_gradient
from klrl.kl.charge import to_go
from klrl.kl.estimators import ESTIMATORS

#: Largest relative error of a gradient that still is the same: float32 inside a loss costs 1e-6.
TOLERANCE = 1e-4
#: Summands per step [N, steps], to be minimised.
Summands = Callable[[Numbers], Tensor]


@dataclass(frozen=True)
class Fault:
    """What is wrong with a gradient."""

    code: str  # for programs
    words: str  # what it looks like, and a remedy


@dataclass(frozen=True)
class Known:
    """A known gradient."""

    fault: Fault | None  # of a loss that has it; None for a right one
    value: Callable[[Problem], Tensor]  # whose gradient it is, to be minimised
    words: str = ""  # of a right one

    def gradient(self, problem: Problem) -> Tensor:
        """Of its value, in expectation."""
        if self.value not in problem.kept:
            problem.kept[self.value] = flat_gradient(self.value(problem), problem.parameters)
        return problem.kept[self.value]


def _expected(fault: Fault | None, summands: Summands) -> Known:
    """The known gradient of a loss that is the mean over episodes of the sum over steps."""

    def value(problem: Problem) -> Tensor:
        numbers = problem.numbers(problem.everything, 0.0)
        return summands(numbers).masked_fill(~numbers.mask, 0.0).sum(1).mean()

    return Known(fault, value)


def _ratio(numbers: Numbers) -> Tensor:
    """r = log pi_theta - log pi_ref of what was done."""
    return numbers.log_probs - numbers.ref_log_probs


def _exact(numbers: Numbers) -> Tensor:
    """KL(pi_theta(.|s) || pi_ref(.|s)): its gradient is each step's own."""
    return (numbers.logits.exp() * (numbers.logits - numbers.ref_logits)).sum(-1)


def _forward(numbers: Numbers) -> Tensor:
    """KL(pi_ref(.|s) || pi_theta(.|s))."""
    return (numbers.ref_logits.exp() * (numbers.ref_logits - numbers.logits)).sum(-1)


def _charged(numbers: Numbers, kl: Tensor, placement: str = "reward") -> Tensor:
    """Log pi_theta times what is still to come: a KL, or a reward, under the score function."""
    return numbers.log_probs * to_go(kl.detach(), numbers.mask, placement)


def _per_response(summands: Summands) -> Summands:
    return lambda numbers: summands(numbers) / numbers.mask.sum(1, keepdim=True)


def _sampled(name: str) -> Summands:
    """An estimator at what was done."""
    return lambda numbers: ESTIMATORS[name](_ratio(numbers))


def _in_reward(name: str, estimate: Summands) -> Known:
    """An estimator other than k1 in the reward."""
    fault = Fault(
        f"{name}_in_reward",
        f"the KL's gradient is that of {name} charged in the reward, which is another one: charge "
        "k1 there",
    )
    return _expected(fault, lambda numbers: _charged(numbers, estimate(numbers)))


def _declared() -> Iterator[Fault]:
    words = read_table(Path(__file__).with_suffix(".yaml"))
    length = words.pop("LENGTH")
    for code, told in words.items():
        yield Fault(code, told.replace("LENGTH", length))


#: code -> fault, of those whose words are always the same
FAULTS = {fault.code: fault for fault in _declared()}


def _k1(numbers: Numbers) -> Tensor:
    """What the KL's gradient should be: k1 in the reward."""
    return _charged(numbers, _ratio(numbers))


def _later(numbers: Numbers) -> Tensor:
    """The same without each step's own."""
    return _charged(numbers, _ratio(numbers), "split")


#: Of the KL part of losses that are meant for the reverse KL; the first that fits is reported.
KNOWN_REVERSE: tuple[Known, ...] = (
    _expected(FAULTS["own_step"], _exact),
    _expected(FAULTS["forward_kl"], _forward),
    _expected(FAULTS["later_only"], _later),
    _expected(FAULTS["twice"], lambda numbers: _exact(numbers) + _k1(numbers)),
    _expected(FAULTS["later_twice"], lambda numbers: _k1(numbers) + _later(numbers)),
    _in_reward("exact", _exact),
    _in_reward("k2", _sampled("k2")),
    _in_reward("k3", _sampled("k3")),
    _expected(FAULTS["length"], _per_response(_k1)),
    _expected(FAULTS["length_own_step"], _per_response(_sampled("k2"))),
    _expected(FAULTS["length_forward_kl"], _per_response(_sampled("k3"))),
)
_RETURN_LENGTH = FAULTS["return_length"]
#: Of the return's part.
KNOWN_RETURN: tuple[Known, ...] = (
    _expected(FAULTS["own_reward"], lambda numbers: -numbers.log_probs * numbers.rewards),
    _expected(_RETURN_LENGTH, _per_response(lambda ns: -ns.log_probs * ns.advantages)),
    _expected(_RETURN_LENGTH, _per_response(lambda ns: -_charged(ns, ns.rewards))),
)


def _other(aim: Aim, meant: Aim) -> Known:
    """The gradient of another divergence than the one that is meant."""
    words = (
        f"the KL's gradient is that of {aim.words}, not of {meant.words}: if that is what you "
        f"want, add {aim.options}"
    )
    return Known(Fault(f"is_{aim.divergence}_{aim.scope}", words), aim.value)


class Meant:
    """What a loss is meant for: right gradients of both parts, and known wrong ones."""

    def __init__(self, divergence: str, scope: str, to: str = "ref") -> None:
        self.aims = () if divergence == "none" else aims(divergence, scope, to)
        self.kl = [Known(None, aim.value, aim.words) for aim in self.aims]
        self.returns = [
            Known(None, partial(_negative, value), words) for words, value in RETURNS[scope].items()
        ]
        known = KNOWN_REVERSE if divergence == "reverse" else ()
        others = [aim for aim in every_aim(to) if aim not in self.aims]
        self.wrong_kl = [*known, *(_other(aim, self.aims[0]) for aim in others if self.aims)]


def _negative(value: Callable[[Problem], Tensor], problem: Problem) -> Tensor:
    return -value(problem)


def _unbalanced(low: float, high: float) -> Fault:
    """The KL's part is longer or shorter than the return's."""
    if high - low <= TOLERANCE * high:
        words = f"coef acts as {high:.3g} times its value: look for a factor on one of the parts"
    else:
        words = (
            f"coef acts as {low:.3g} to {high:.3g} times its value: the KL is not scaled as the "
            "return is; is the advantage normalised?"
        )
    return Fault("scale", words)


@dataclass(frozen=True)
class Fit:
    """A known gradient that a loss has on all problems of a kind."""

    known: Known
    factors: Sequence[float]  # by what the loss multiplies it, per problem; all of one sign


def fit(
    gradients: Sequence[Tensor], problems: Sequence[Problem], knowns: Iterable[Known]
) -> Fit | None:
    """The first known gradient that these, of a part of a loss, are multiples of everywhere."""
    for known in knowns:
        factors: list[float] = []
        for gradient, problem in zip(gradients, problems, strict=True):
            factor = multiple(gradient, known.gradient(problem))
            if factor is None or factor * (factors or [factor])[0] <= 0:
                break
            factors.append(factor)
        else:
            return Fit(known, factors)
    return None


def multiple(gradient: Tensor, of: Tensor) -> float | None:
    """The factor by which a gradient is a multiple of another; None: it is none."""
    square = float(of @ of)
    if square < 1e-20:
        return None
    factor = float(gradient @ of) / square
    off = float((gradient - factor * of).norm())
    return factor if off <= TOLERANCE * float(gradient.norm()) else None


def mixture(
    whole: Sequence[Tensor],
    problems: Sequence[Problem],
    meant: Meant,
    has_return: bool,
    coef: float,
) -> Fault | None:
    """How much of each part a gradient has, where it consists of known ones on every problem.

    ``whole`` are gradients of the loss at ``coef``, in reward per nat, as of what is minimised.
    """
    own, forward, both = (
        Known(None, Aim(*names).value)
        for names in (
            ("reverse", "token", "own"),
            ("forward", "token", "own"),
            ("reverse", "sequence", "whole"),
        )
    )
    shares: dict[str, list[float]] = {}
    for gradient, problem in zip(whole, problems, strict=True):
        step = own.gradient(problem)
        parts = {
            "each step's own KL": coef * step,
            "the KL of later steps": coef * (both.gradient(problem) - step),
            "the forward KL": coef * forward.gradient(problem),
        }
        if has_return:
            parts = {"return": meant.returns[0].gradient(problem), **parts}
        parts = {name: part for name, part in parts.items() if part.norm() > 1e-9}
        columns = torch.stack(list(parts.values()), 1)
        weights = torch.linalg.lstsq(columns, gradient, driver="gelsd").solution
        if (columns @ weights - gradient).norm() > TOLERANCE * gradient.norm():
            return None
        unit = float(weights[0]) if "return" in parts else 1.0
        for name, weight in zip(parts, weights.tolist(), strict=True):
            shares.setdefault(name, []).append(weight / unit)
    told = []
    for name, values in shares.items():
        if name != "return" and max(map(abs, values)) > 10 * TOLERANCE:
            low, high = (f"{x:.2f}" for x in (min(values), max(values)))
            told.append(f"{low if low == high else f'{low} to {high}'} x {name}")
    right = meant.aims[0].words
    if meant.aims[0] == Aim("reverse", "sequence", "whole"):
        right = "1 x each step's own KL + 1 x the KL of later steps"
    return Fault("mixture", f"the KL's gradient is a mixture: {' + '.join(told)}; right is {right}")


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a loss on problems of one kind, or what is right."""

    faults: list[Fault]
    #: What the loss multiplies the gradient with, per problem: read off the return's part where it
    #: is the return's, off the KL's where there is no other part; None: unknown.
    scale: list[float] | None
    gain: Known  # the right gradient that the return's part has, or should have
    kl: Known | None


def diagnose(
    kl: Sequence[Tensor] | None,
    returns: Sequence[Tensor] | None,
    problems: Sequence[Problem],
    meant: Meant,
) -> Diagnosis:
    """Compare both parts of a loss with the gradients that losses are known to have.

    Args:
        kl: gradients of the KL's part, without its coefficient; None where there is none.
        returns: gradients at coef = 0; None for a penalty alone.
        problems: what they were taken on.
        meant: what they should be multiples of.
    """
    faults: list[Fault] = []
    scale, right, charged = None, meant.returns[0], meant.kl[0] if meant.kl else None
    if returns is not None:
        found = fit(returns, problems, [*meant.returns, *KNOWN_RETURN])
        told = "no_return", "return_sign", "unknown_return"
        faults += _faults(found, returns, problems, right, told)
        if found is not None and found.known.fault is None:
            right, scale = found.known, [abs(factor) for factor in found.factors]
    if kl is None or charged is None:
        return Diagnosis(faults, scale, right, charged)
    found = fit(kl, problems, [*meant.kl, *meant.wrong_kl])
    faults += _faults(found, kl, problems, charged, ("no_kl", "sign", "unknown"))
    if found is not None and found.known.fault is None:
        charged = found.known
    if found is not None and returns is None:
        scale = [abs(factor) for factor in found.factors]
    elif found is not None and scale is not None:
        ratios = [abs(f) / s for f, s in zip(found.factors, scale, strict=True)]
        if max(abs(ratio - 1) for ratio in ratios) > 10 * TOLERANCE:
            faults.append(_unbalanced(min(ratios), max(ratios)))
    return Diagnosis(faults, scale, right, charged)


def _faults(
    fitted: Fit | None,
    gradients: Sequence[Tensor],
    problems: Sequence[Problem],
    right: Known,
    fallback: tuple[str, str, str],
) -> list[Fault]:
    """The faults of one part; ``fallback``: no gradient, the opposite one, an unknown one."""
    none, away, unknown = (FAULTS[code] for code in fallback)
    sizes = [TOLERANCE * float(right.gradient(problem).norm()) for problem in problems]
    if all(float(g.norm()) <= size for g, size in zip(gradients, sizes, strict=True)):
        return [none]
    if fitted is None:
        return [unknown]
    faults = [away] if fitted.factors[0] < 0 else []
    return faults if fitted.known.fault is None else [*faults, fitted.known.fault]
