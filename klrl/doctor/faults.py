"""Gradients that wrong losses are known to have, and what to say of a loss that has one of them.

Each is the gradient of a known loss on a batch that holds every episode as often as it is probable,
so it is an expectation, like the gradient that it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from klrl.base.tables import read_table
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

    fault: Fault | None  # of a loss that has it; None for the right one
    summands: Summands | None = None  # such a loss; None: autograd of the objective gives it


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
    return Known(fault, lambda numbers: _charged(numbers, estimate(numbers)))


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


#: What the gradient of the KL part may be, to be minimised; the first that fits is said.
KNOWN_KL: tuple[Known, ...] = (
    Known(None),
    Known(FAULTS["own_step"], _exact),
    Known(FAULTS["forward_kl"], _forward),
    Known(FAULTS["later_only"], _later),
    Known(FAULTS["twice"], lambda numbers: _exact(numbers) + _k1(numbers)),
    Known(FAULTS["later_twice"], lambda numbers: _k1(numbers) + _later(numbers)),
    _in_reward("exact", _exact),
    _in_reward("k2", _sampled("k2")),
    _in_reward("k3", _sampled("k3")),
    Known(FAULTS["length"], _per_response(_k1)),
    Known(FAULTS["length_own_step"], _per_response(_sampled("k2"))),
    Known(FAULTS["length_forward_kl"], _per_response(_sampled("k3"))),
)
_RETURN_LENGTH = FAULTS["return_length"]
#: What the gradient of the return's part may be, to be minimised.
KNOWN_RETURN: tuple[Known, ...] = (
    Known(None),
    Known(FAULTS["own_reward"], lambda numbers: -numbers.log_probs * numbers.rewards),
    Known(_RETURN_LENGTH, _per_response(lambda numbers: -numbers.log_probs * numbers.advantages)),
    Known(_RETURN_LENGTH, _per_response(lambda numbers: -_charged(numbers, numbers.rewards))),
)


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
    gradients: Sequence[Tensor], problems: Sequence[Problem], right: Sequence[Tensor],
    knowns: Sequence[Known],
) -> Fit | None:  # fmt: skip
    """The first known gradient that these are multiples of, on every problem; None: none is.

    ``gradients`` are of a part of the loss, ``right`` the true ones of what is minimised.
    """
    for known in knowns:
        factors: list[float] = []
        for gradient, problem, true in zip(gradients, problems, right, strict=True):
            factor = _multiple(gradient, true if known.summands is None else _of(known, problem))
            if factor is None or factor * (factors or [factor])[0] <= 0:
                break
            factors.append(factor)
        else:
            return Fit(known, factors)
    return None


def _multiple(gradient: Tensor, of: Tensor) -> float | None:
    """The factor by which a gradient is a multiple of another; None: it is none."""
    square = float(of @ of)
    if square < 1e-20:
        return None
    factor = float(gradient @ of) / square
    off = float((gradient - factor * of).norm())
    return factor if off <= TOLERANCE * float(gradient.norm()) else None


def _of(known: Known, problem: Problem) -> Tensor:
    """A known gradient, in expectation."""
    assert known.summands is not None
    numbers = problem.numbers(problem.everything, 0.0)
    value = known.summands(numbers).masked_fill(~numbers.mask, 0.0).sum(1).mean()
    return flat_gradient(value, problem.parameters)


def mixture(
    whole: Sequence[Tensor],
    problems: Sequence[Problem],
    right: Mapping[str, Sequence[Tensor]],
    coef: float,
) -> Fault | None:
    """How much of each part a gradient has, where it consists of known ones on every problem.

    ``whole`` are gradients of the loss at ``coef``, in reward per nat; else as :func:`diagnose`.
    """
    shares: dict[str, list[float]] = {}
    for gradient, problem, gain, kl in zip(
        whole, problems, right["return"], right["kl"], strict=True
    ):
        own, forward = _of(Known(None, _exact), problem), _of(Known(None, _forward), problem)
        parts = {
            "return": gain,
            "each step's own KL": coef * own,
            "the KL of later steps": coef * (kl - own),
            "the forward KL": coef * forward,
        }
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
    return Fault(
        "mixture",
        f"the KL's gradient is a mixture: {' + '.join(told)}; right is 1 x each step's own KL + "
        "1 x the KL of later steps",
    )


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a loss on problems of one kind."""

    faults: list[Fault]
    #: What the loss multiplies the gradient with, per problem: read off the return's part where it
    #: is the return's, off the KL's where there is no other part; None: unknown.
    scale: list[float] | None


def diagnose(
    kl: Sequence[Tensor],
    returns: Sequence[Tensor] | None,
    problems: Sequence[Problem],
    right: Mapping[str, Sequence[Tensor]],
) -> Diagnosis:
    """Compare both parts of a loss with the gradients that losses are known to have.

    Args:
        kl: gradients of the KL's part, without its coefficient.
        returns: gradients at coef = 0; None for a penalty alone.
        problems: what they were taken on.
        right: what they should be multiples of: ``kl`` and ``return``.
    """
    of_kl = fit(kl, problems, right["kl"], KNOWN_KL)
    faults = _faults(of_kl, kl, right["kl"], ("no_kl", "sign", "unknown"))
    if returns is None:
        return Diagnosis(faults, None if of_kl is None else [abs(f) for f in of_kl.factors])
    of_return = fit(returns, problems, right["return"], KNOWN_RETURN)
    told = "no_return", "return_sign", "unknown_return"
    faults = [*_faults(of_return, returns, right["return"], told), *faults]
    if of_return is None or of_return.known.fault is not None:
        return Diagnosis(faults, None)
    scale = [abs(factor) for factor in of_return.factors]
    if of_kl is not None:
        ratios = [abs(f) / s for f, s in zip(of_kl.factors, scale, strict=True)]
        if max(abs(ratio - 1) for ratio in ratios) > 10 * TOLERANCE:
            faults.append(_unbalanced(min(ratios), max(ratios)))
    return Diagnosis(faults, scale)


def _faults(
    fitted: Fit | None,
    gradients: Sequence[Tensor],
    right: Sequence[Tensor],
    fallback: tuple[str, str, str],
) -> list[Fault]:
    """The faults of one part; ``fallback``: no gradient, the opposite one, an unknown one."""
    none, away, unknown = (FAULTS[code] for code in fallback)
    if all(g.norm() <= TOLERANCE * r.norm() for g, r in zip(gradients, right, strict=True)):
        return [none]
    if fitted is None:
        return [unknown]
    faults = [away] if fitted.factors[0] < 0 else []
    return faults if fitted.known.fault is None else [*faults, fitted.known.fault]
