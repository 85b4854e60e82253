"""What is wrong with a loss whose gradients are not those of what it is meant for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from klrl.base.tables import read_table
from klrl.doctor.aims import Aim, aims
from klrl.doctor.problems import Problem
from klrl.doctor.terms import TOLERANCE, Reading, factors, fit, kl_terms, read, return_terms
from klrl.kl.divergences import MEASURED


@dataclass(frozen=True)
class Fault:
    """What is wrong with a gradient."""

    code: str  # for programs
    words: str  # what it looks like, and a remedy


def _declared() -> Iterator[Fault]:
    for code, told in read_table(Path(__file__).with_suffix(".yaml")).items():
        if "PART" in told:
            yield Fault(f"return_{code}", told.replace("PART", "the return"))
            yield Fault(f"kl_{code}", told.replace("PART", "the KL"))
        else:
            yield Fault(code, told)


#: code -> fault, of those whose words are always the same
FAULTS = {fault.code: fault for fault in _declared()}


#: What is said of the reverse KL's relatives.
_OF_REVERSE = {("reverse", "token"): "own_step", ("forward", "token"): "forward_kl"}


class Meant:
    """What a loss is meant for: any of its aims is right, the error is that from the first."""

    def __init__(self, divergence: str, scope: str, to: str = "ref") -> None:
        self.divergence, self.scope, self.to = divergence, scope, to
        self.kl = [] if divergence == "none" else aims(divergence, scope, to)
        self.returns = aims("return", scope, to)

    def of(self, part: str) -> list[Aim]:
        """Those of a part, return or kl."""
        return self.kl if part == "kl" else self.returns

    def other(self, what: str, scope: str) -> Fault:
        """The gradient is that of another divergence."""
        known = _OF_REVERSE.get((what, scope))
        if known and (self.divergence, self.to) == ("reverse", "ref"):
            return FAULTS[known]
        words = (
            f"the KL's gradient is that of {aims(what, scope, self.to)[0].words}, not of "
            f"{self.kl[0].words}: if that is what you want, add --divergence {what} --scope {scope}"
        )
        return Fault(f"is_{what}_{scope}", words)


def of_reading(reading: Reading, part: str, meant: Meant, steps: int) -> list[Fault]:
    """What is wrong with a part, return or kl, that consists of this; ``steps`` of an episode."""
    (what, scope, exact), of_return = reading.term, "return_" if part == "return" else ""
    wanted = meant.scope
    if steps == 1 and what == meant.divergence:
        scope = wanted
    codes = [f"{of_return}sign"] if reading.sign < 0 else []
    codes += [f"{of_return}length"] if reading.by_length else []
    codes += [what] if what not in (*MEASURED, "return") else []
    faults = [FAULTS[code] for code in codes]
    if what in MEASURED and (what, scope) != (meant.divergence, wanted):
        faults.append(meant.other(what, scope))
        wanted = wanted if what == meant.divergence else scope
    right = {"sequence", "prefix" if scope == "token" else "", "token" if wanted == "token" else ""}
    if not exact and reading.weight not in right:
        faults.append(FAULTS[f"{part}_weight_{reading.weight}"])
    faults += [FAULTS[f"{part}_{reading.cut}"]] if reading.cut else []
    return faults or [FAULTS["unknown" if part == "kl" else "unknown_return"]]


def _unbalanced(low: float, high: float) -> Fault:
    """The KL's part is longer or shorter than the return's."""
    times, why = f"{high:.3g}", "look for a factor on one of the parts"
    if high - low > TOLERANCE * high:
        times = f"{low:.3g} to {high:.3g}"
        why = "the KL is not scaled as the return is; is the advantage normalised?"
    return Fault("scale", f"coef acts as {times} times its value: {why}")


def mixture(
    whole: Sequence[Tensor], problems: Sequence[Problem], meant: Meant, has_return: bool,
    coef: float,
) -> Fault | None:  # fmt: skip
    """How much of each part a gradient has, where it consists of known ones on every problem.

    ``whole`` are gradients of the loss at ``coef``, in reward per nat, as of what is minimised.
    """
    names = [("reverse", "token"), ("forward", "token"), ("reverse", "sequence")]
    own, forward, both = (aims(*name)[0] for name in names)
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
            ends = dict.fromkeys(f"{x:.2f}" for x in (min(values), max(values)))
            told.append(f"{' to '.join(ends)} x {name}")
    words = f"the KL's gradient is a mixture: {' + '.join(told)}; right is {meant.kl[0].words}"
    return Fault("mixture", words)


#: Of the gradients of a loss on a problem: that of the return, at coef = 0; that of the kl, without
#: its coefficient. A penalty alone has no return.
Parts = Mapping[str, Tensor]


def diagnose(
    parts: Sequence[Parts], at_logits: Sequence[Parts], problems: Sequence[Problem], meant: Meant
) -> tuple[list[Fault], list[float] | None, dict[str, Aim]]:
    """Compare both parts of a loss with the gradients that losses are known to have.

    Args:
        parts: at the parameters, for each problem.
        at_logits: at the logits of each step, for the first problems; where pi has moved.
        problems: what they were taken on.
        meant: what they should be multiples of.

    Returns:
        The faults; what the loss multiplies the gradient with, per problem: read off the return's
        part where it is the return's, off the KL's where there is no other part, None: unknown;
        and the aim that each part has, or should have.
    """
    faults: list[Fault] = []
    scale: list[float] | None = None
    aims_of = {}
    for part in parts[0]:
        gradients, at = ([each[part] for each in of] for of in (parts, at_logits))
        found, times, told = _judge(part, gradients, at, problems, meant)
        aims_of[part] = found or meant.of(part)[0]
        faults += told
        sizes = [abs(factor) for factor in times]
        if part == "kl" and "return" in parts[0]:
            ratios = [size / s for size, s in zip(sizes, scale or [], strict=False)]
            if ratios and max(abs(ratio - 1) for ratio in ratios) > 10 * TOLERANCE:
                faults.append(_unbalanced(min(ratios), max(ratios)))
        elif sizes and (found or part == "kl"):
            scale = sizes
    return faults, scale, aims_of


def _judge(
    part: str, gradients: Sequence[Tensor], at_logits: Sequence[Tensor],
    problems: Sequence[Problem], meant: Meant,
) -> tuple[Aim | None, list[float], list[Fault]]:  # fmt: skip
    """The aim that a part has, if any; its factors where they are known; its faults."""
    is_kl, steps, rights = part == "kl", problems[0].kind.steps, meant.of(part)
    sizes = [TOLERANCE * float(rights[0].gradient(problem).norm()) for problem in problems]
    if all(float(g.norm()) <= size for g, size in zip(gradients, sizes, strict=True)):
        return None, [], [FAULTS["no_kl" if is_kl else "no_return"]]
    for right in rights:
        if times := factors(gradients, problems, right.gradient):
            away = [FAULTS["sign" if is_kl else "return_sign"]] if times[0] < 0 else []
            return right, times, away
    terms = partial(kl_terms, to=meant.to) if is_kl else return_terms
    if at_logits:
        some = problems[: len(at_logits)]
        if reading := read(at_logits, some, terms):
            return None, [], of_reading(reading, part, meant, steps)
        near = read(at_logits, some, partial(kl_terms, to="old")) if is_kl else None
        if near and near.term.what in MEASURED:
            return None, [], [FAULTS["to_old"]]
    if fitted := fit(gradients, problems, terms):
        return None, fitted[1], of_reading(fitted[0], part, meant, steps)
    return None, [], [FAULTS["unknown" if is_kl else "unknown_return"]]
