"""Diagnoses the faults of a loss whose gradients are not those of its intended objective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from klrl.base.tables import read_table
from klrl.doctor.aims import Aim, Meant, aims
from klrl.doctor.problems import Problem
from klrl.doctor.terms import TOLERANCE, Reading, factors, fit, kl_terms, read, return_terms
from klrl.kl.divergences import MEASURED


@dataclass(frozen=True)
class Fault:
    """One fault of a gradient."""

    code: str  # for programs
    words: str  # its symptom, and a remedy


def _declared() -> Iterator[Fault]:
    for code, words in read_table(Path(__file__).with_suffix(".yaml")).items():
        if "PART" in words:
            yield Fault(f"return_{code}", words.replace("PART", "the return"))
            yield Fault(f"kl_{code}", words.replace("PART", "the KL"))
        else:
            yield Fault(code, words)


#: Code -> fault, for the faults with fixed words.
FAULTS = {fault.code: fault for fault in _declared()}
#: Divergence and scope of a gradient -> its fault, if the reverse KL(pi||ref) is intended.
_OF_REVERSE = {("reverse", "token"): "own_step", ("forward", "token"): "forward_kl"}
#: Part of a loss -> its gradient on a problem: ``return``, at coef = 0; ``kl``, divided by coef.
#: A penalty alone has no ``return``.
Parts = Mapping[str, Tensor]


@dataclass(frozen=True)
class Diagnosis:
    """The faults, scales and aims of a loss's gradients on problems of one kind."""

    faults: Sequence[Fault]
    #: Per problem, the factor between the loss's gradient and the true one: from the return's part
    #: if that is right; from the KL's part if it is the only part; else 1.
    scale: Sequence[float]
    aims: Mapping[str, Aim]  # part -> the aim whose gradient it has, or else should have
    varies: bool = False  # whether the scale depends on coef


def diagnose(
    parts: Sequence[Parts], at_logits: Sequence[Parts], problems: Sequence[Problem], meant: Meant,
    coef: float,
) -> Diagnosis:  # fmt: skip
    """Compare the parts of a loss with known gradients.

    Args:
        parts: gradients at the policy's table, for each problem.
        at_logits: gradients at each step's logits, for the first problems; empty if pi = pi_old.
        problems: those of ``parts``.
        meant: the objective whose gradients the parts should have, up to a factor.
        coef: reward per nat.
    """
    faults: list[Fault] = []
    scale: list[float] = []
    aims_of: dict[str, Aim] = {}
    for part in parts[0]:
        gradients, at = ([each[part] for each in of] for of in (parts, at_logits))
        found, times, told = _judge(part, gradients, at, problems, meant)
        aims_of[part] = found or meant.of(part)[0]
        faults += told
        sizes = [abs(factor) for factor in times]
        if part == "kl" and "return" in parts[0]:
            ratios = [size / s for size, s in zip(sizes, scale, strict=False)]
            if ratios and max(abs(ratio - 1) for ratio in ratios) > 10 * TOLERANCE:
                faults.append(_unbalanced(min(ratios), max(ratios)))
        elif found or part == "kl":
            scale = sizes
    if faults and "return" in parts[0] and scale:
        wholes = [whole(each, coef) for each in parts]
        common = factors(wholes, problems, partial(truth, aims_of, coef))
        if common and common[0] > 0:  # both parts have the same factor, which depends on coef
            return Diagnosis([], common, aims_of, varies=True)
    if "kl" in parts[0] and any("unknown" in fault.code for fault in faults):
        mixed = _mixture(parts, problems, meant, coef)
        faults = [mixed] if mixed else faults
    return Diagnosis(faults, scale or [1.0] * len(problems), aims_of)


def whole(parts: Parts, coef: float) -> Tensor:
    """Sum the gradients of the parts, the KL's times ``coef``."""
    weighted = [coef * each if part == "kl" else each for part, each in parts.items()]
    return torch.stack(weighted).sum(0)


def truth(of: Mapping[str, Aim], coef: float, problem: Problem) -> Tensor:
    """Sum the true gradients of the parts' aims, the KL's times ``coef``."""
    return whole({part: aim.gradient(problem) for part, aim in of.items()}, coef)


def _judge(
    part: str, gradients: Sequence[Tensor], at_logits: Sequence[Tensor],
    problems: Sequence[Problem], meant: Meant,
) -> tuple[Aim | None, list[float], list[Fault]]:  # fmt: skip
    """Return the aim whose gradient a part has, if any; its factors, if known; and its faults."""
    rights = meant.of(part)
    sizes = [TOLERANCE * float(rights[0].gradient(problem).norm()) for problem in problems]
    if all(float(g.norm()) <= size for g, size in zip(gradients, sizes, strict=True)):
        return None, [], [FAULTS[f"no_{part}"]]
    for right in rights:
        if times := factors(gradients, problems, right.gradient):
            return right, times, [FAULTS[_code(part, "sign")]] if times[0] < 0 else []
    terms = partial(kl_terms, to=meant.to) if part == "kl" else return_terms
    reading, times = read(at_logits, problems, terms), []
    if not reading and part == "kl":
        near = read(at_logits, problems, partial(kl_terms, to="old"))
        if near and near.what in MEASURED:
            return None, [], [FAULTS["to_old"]]
    if not reading and (fitted := fit(gradients, problems, terms)):
        reading, times = fitted
    told = _of_reading(reading, part, meant, problems[0].kind.steps) if reading else []
    return None, times, told or [FAULTS[_code(part, "unknown")]]


def _code(part: str, fault: str) -> str:
    return fault if part == "kl" else f"return_{fault}"


def _of_reading(reading: Reading, part: str, meant: Meant, steps: int) -> list[Fault]:
    """List the faults of a part with this reading; ``steps``: most steps of an episode."""
    what, scope, wanted = reading.what, reading.scope, meant.scope
    if steps == 1 and what == meant.divergence:
        scope = wanted
    codes = [_code(part, "sign")] if reading.sign < 0 else []
    codes += [_code(part, "length")] if reading.by_length else []
    codes += [what] if what not in (*MEASURED, "return") else []
    faults = [FAULTS[code] for code in codes]
    if what in MEASURED and (what, scope) != (meant.divergence, wanted):
        faults.append(_other(what, scope, meant))
        wanted = wanted if what == meant.divergence else scope
    right = {"sequence", "prefix" if scope == "token" else "", "token" if wanted == "token" else ""}
    if not reading.exact and reading.weight not in right:
        faults.append(FAULTS[f"{part}_weight_{reading.weight}"])
    return [*faults, *([FAULTS[f"{part}_{reading.cut}"]] if reading.cut else [])]


def _other(what: str, scope: str, meant: Meant) -> Fault:
    """Make the fault of a gradient that belongs to a different divergence or scope."""
    known = _OF_REVERSE.get((what, scope))
    if known and (meant.divergence, meant.to) == ("reverse", "ref"):
        return FAULTS[known]
    words = (
        f"the KL's gradient is that of {aims(what, scope, meant.to)[0].words}, not of "
        f"{meant.of('kl')[0].words}: if that is what you want, add --divergence {what} "
        f"--scope {scope}"
    )
    return Fault(f"is_{what}_{scope}", words)


def _unbalanced(low: float, high: float) -> Fault:
    """Make the fault of different factors on the KL's part and on the return's."""
    times, why = f"{high:.3g}", "look for a factor on one of the parts"
    if high - low > TOLERANCE * high:
        times = f"{low:.3g} to {high:.3g}"
        why = "the KL is not scaled as the return is; is the advantage normalised?"
    return Fault("scale", f"coef acts as {times} times its value: {why}")


def _mixture(
    parts: Sequence[Parts], problems: Sequence[Problem], meant: Meant, coef: float
) -> Fault | None:
    """Make the fault of a gradient that is a sum of known ones, with mean shares; else None."""
    names = [("reverse", "token"), ("forward", "token"), ("reverse", "sequence")]
    own, forward, both = (aims(*name)[0] for name in names)
    shares = []
    for of, problem in zip(parts, problems, strict=True):
        gradient, step = whole(of, coef), own.gradient(problem)
        known = {
            "each step's own KL": coef * step,
            "the KL of later steps": coef * (both.gradient(problem) - step),
            "the forward KL": coef * forward.gradient(problem),
        }
        if "return" in of:
            known = {"return": meant.of("return")[0].gradient(problem), **known}
        known = {name: each for name, each in known.items() if each.norm() > 1e-9}
        columns = torch.stack(list(known.values()), 1)
        weights = torch.linalg.lstsq(columns, gradient, driver="gelsd").solution
        if (columns @ weights - gradient).norm() > TOLERANCE * gradient.norm():
            return None
        shares.append(weights / weights[0] if "return" in of else weights)
    told = " + ".join(
        f"{share:.2f} x {name}"
        for name, share in zip(known, torch.stack(shares).mean(0).tolist(), strict=True)
        if name != "return" and abs(share) > 10 * TOLERANCE
    )
    right = meant.of("kl")[0].words
    return Fault("mixture", f"the KL's gradient is a mixture: {told}; right is {right}")
