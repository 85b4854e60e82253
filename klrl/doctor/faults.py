"""Diagnoses the faults of a loss whose gradients are not those of its intended objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from klrl.base.tables import read_table
from klrl.doctor.aims import Aim, aims
from klrl.doctor.problems import Problem
from klrl.doctor.terms import TOLERANCE, Reading, factors, fit, kl_terms, read, return_terms
from klrl.doctor.user_loss import Loss
from klrl.kl.divergences import MEASURED


@dataclass(frozen=True)
class Fault:
    """One fault of a gradient."""

    code: str  # for programs
    words: str  # its symptom, and a remedy


def _declared() -> dict[str, Fault]:
    found = {}
    for code, words in read_table(Path(__file__).with_suffix(".yaml")).items():
        parts = {"return_": "the return", "kl_": "the KL"} if "PART" in words else {"": ""}
        for prefix, part in parts.items():
            found[prefix + code] = Fault(prefix + code, words.replace("PART", part))
    return found


#: Code -> fault, for the faults with fixed words.
FAULTS = _declared()
#: Divergence and scope of a gradient -> code of its fault, if KL(pi||ref) is intended.
_OF_REVERSE = {("reverse", "token"): "own_step", ("forward", "token"): "forward_kl"}
#: Part of a loss, ``return``, ``kl`` or ``whole`` -> its gradient: see :meth:`Loss.parts`.
Parts = Mapping[str, Tensor]
#: Part of a loss -> terms; the part is right if it minimises any of them.
Meant = Mapping[str, Sequence[Aim]]


@dataclass(frozen=True)
class Diagnosis:
    """The faults of a loss on the problems of one kind."""

    faults: Sequence[Fault]
    #: Per problem, the loss's gradient as a multiple of the true one: measured on the return if its
    #: part is right, on the KL if there is no return, else 1; if ``varies``, on the whole loss.
    scale: Sequence[float]
    aims: Mapping[str, Aim]  # part -> the term that it minimises, or should minimise if it is wrong
    varies: bool = False  # whether ``scale`` depends on coef


def diagnose(
    loss: Loss, parts: Sequence[Parts], at_logits: Sequence[Parts], problems: Sequence[Problem],
    meant: Meant,
) -> Diagnosis:  # fmt: skip
    """Compare the parts of a loss with known gradients, and with ``meant``, its objective.

    ``parts`` has gradients with respect to the policy's table, for each problem; ``at_logits`` has
    those for each step's logits, on the first problems, and is empty if pi = pi_old.
    """
    faults: list[Fault] = []
    scale: list[float] = []
    found: dict[str, Aim] = {}
    for part in [each for each in meant if each in parts[0]]:
        gradients, at = ([each[part] for each in of] for of in (parts, at_logits))
        right, times, told = _judge(part, gradients, at, problems, meant)
        found[part] = right or meant[part][0]
        faults += told
        sizes = [abs(factor) for factor in times]
        if part == "kl" and "return" in parts[0]:
            ratios = [size / s for size, s in zip(sizes, scale, strict=False)]
            if ratios and max(abs(ratio - 1) for ratio in ratios) > 10 * TOLERANCE:
                faults.append(_unbalanced(ratios, loss.coef_name))
        elif right or part == "kl":
            scale = sizes
    unknown = any("unknown" in fault.code for fault in faults)
    if "return" in found and "kl" in found:
        other = _other_coef(loss, parts, problems, found)
        wholes, true = [each["whole"] for each in parts], partial(truth, found, loss.coef)
        if faults and other == [] and (common := factors(wholes, problems, true)):
            return Diagnosis([], common, found, varies=True)  # right up to a factor
        if other and (unknown or not faults):
            faults, unknown = other, False
    if "kl" in parts[0] and unknown:
        faults = _mixture(parts, problems, meant, loss.coef) or faults
    return Diagnosis(faults, scale or [1.0] * len(problems), found)


def truth(of: Mapping[str, Aim], coef: float, problem: Problem) -> Tensor:
    """Sum the true gradients of the parts' aims, that of the KL times ``coef``."""
    weights = {"return": 1.0, "kl": coef}
    return torch.stack([weights[part] * of[part].gradient(problem) for part in of]).sum(0)


def _judge(
    part: str, gradients: Sequence[Tensor], at_logits: Sequence[Tensor],
    problems: Sequence[Problem], meant: Meant,
) -> tuple[Aim | None, list[float], list[Fault]]:  # fmt: skip
    """Return the aim that a part minimises (else None), the part's known factors, and faults."""
    rights, prefix = meant[part], "return_" if part == "return" else ""
    for right in rights:
        if times := factors(gradients, problems, right.gradient):
            return right, times, [FAULTS[f"{prefix}sign"]] if times[0] < 0 else []
    terms = partial(kl_terms, to=rights[0].to) if part == "kl" else return_terms
    sizes = [TOLERANCE * float(rights[0].gradient(problem).norm()) for problem in problems]
    tiny = all(float(g.norm()) <= size for g, size in zip(gradients, sizes, strict=True))
    # A known term in tiny units, as of a mean over 32768 positions, is a gradient all the same.
    if tiny and not fit(gradients, problems, terms):
        return None, [], [FAULTS[f"no_{part}"]]
    reading, times = read(at_logits, problems, terms), []
    if not reading and part == "kl":
        near = read(at_logits, problems, partial(kl_terms, to="old"))
        if near and near.what in MEASURED:
            return None, [], [FAULTS["to_old"]]
    if not reading and (fitted := fit(gradients, problems, terms)):
        reading, times = fitted
    told = _of_reading(reading, prefix, rights[0], problems[0].kind.steps) if reading else []
    return None, times, told or [FAULTS[f"{prefix}unknown"]]


def _of_reading(reading: Reading, prefix: str, right: Aim, steps: int) -> list[Fault]:
    """List the faults that a reading shows; ``steps`` is the maximum length of an episode."""
    what, scope, wanted = reading.what, reading.scope, right.scope
    if steps == 1 and what == right.what:
        scope = wanted
    signs = {"sign": reading.sign < 0, "length": reading.by_length}
    faults = [FAULTS[prefix + code] for code, seen in signs.items() if seen]
    if what in MEASURED and (what, scope) != (right.what, wanted):
        faults.append(_other(what, scope, right))
        wanted = wanted if what == right.what else scope
    elif what not in (*MEASURED, "return"):
        faults.append(FAULTS[what])
    part = prefix or "kl_"
    unbiased = {"sequence", "prefix" if scope == "token" else "sequence", wanted}
    if not reading.exact and reading.weight not in unbiased:
        faults.append(FAULTS[f"{part}weight_{reading.weight}"])
    return [*faults, *([FAULTS[part + reading.cut]] if reading.cut else [])]


def _other(what: str, scope: str, right: Aim) -> Fault:
    """Make the fault of a gradient that belongs to a different divergence or scope."""
    known = _OF_REVERSE.get((what, scope))
    if known and (right.what, right.to) == ("reverse", "ref"):
        return FAULTS[known]
    words = (
        f"the KL's gradient is that of {aims(what, scope, right.to)[0].words}, not of "
        f"{right.words}: if that is what you want, add --divergence {what} --scope {scope}"
    )
    return Fault(f"is_{what}_{scope}", words)


def _unbalanced(ratios: Sequence[float], name: str, at: str = "") -> Fault:
    """Make the fault of a loss whose KL has a different factor than its return."""
    low, high = min(ratios), max(ratios)
    times, why = f"{high:.3g}", "look for a factor on one of the parts"
    if high - low > TOLERANCE * high:
        times = f"{low:.3g} to {high:.3g}"
        why = "the KL is not scaled as the return is; is the advantage normalised?"
    return Fault("scale", f"{name} acts as {times} times its value{at}: {why}")


def _other_coef(
    loss: Loss, parts: Sequence[Parts], problems: Sequence[Problem], of: Mapping[str, Aim]
) -> list[Fault] | None:
    """Return faults of coef at coef and 2 coef; None if no sum of the aims is the gradient."""
    wholes = (each["whole"] for each in parts)
    twice = (loss.expected(problem, 2 * loss.coef) for problem in problems[:3])  # a few suffice
    for gradients, at, told in ((wholes, 1, ""), (twice, 2, f" at coef={2 * loss.coef:g}")):
        ratios = []
        for gradient, problem in zip(gradients, problems, strict=False):
            known = {part: aim.gradient(problem) for part, aim in of.items()}
            if (weights := _weights(gradient, known)) is None:
                return [FAULTS["other_coef"]] if told else None
            ratios.append(float(weights[1]) / loss.coef / at)
        if max(abs(ratio - 1) for ratio in ratios) > 10 * TOLERANCE:
            return [_unbalanced(ratios, loss.coef_name, told)]
    return []


def _weights(gradient: Tensor, known: Mapping[str, Tensor]) -> Tensor | None:
    """Write a gradient as a sum of ``known``; return its weights / the return's, else None."""
    columns = torch.stack([*known.values()], 1)
    weights = torch.linalg.lstsq(columns, gradient, rcond=1e-9, driver="gelsd").solution
    if (columns @ weights - gradient).norm() > TOLERANCE * gradient.norm():
        return None
    if "return" not in known:
        return weights
    return weights / weights[0] if weights[0] > TOLERANCE * weights.abs().max() else None


def _mixture(
    parts: Sequence[Parts], problems: Sequence[Problem], meant: Meant, coef: float
) -> list[Fault]:
    """Return a fault if the gradient is a weighted sum of known gradients, else none."""
    names = [("reverse", "token"), ("forward", "token"), ("reverse", "sequence")]
    own, forward, both = (aims(*name)[0] for name in names)
    shares = []
    for of, problem in zip(parts, problems, strict=True):
        gradient, step = of["whole"], own.gradient(problem)
        known = {
            "each step's own KL": coef * step,
            "the KL of later steps": coef * (both.gradient(problem) - step),
            "the forward KL": coef * forward.gradient(problem),
        }
        if "return" in of:
            known = {"return": meant["return"][0].gradient(problem), **known}
        if (weights := _weights(gradient, known)) is None:
            return []
        shares.append(weights)
    told = " + ".join(
        f"{share:.2f} x {name}"
        for name, share in zip(known, torch.stack(shares).mean(0).tolist(), strict=True)
        if name != "return" and abs(share) > 10 * TOLERANCE
    )
    right = meant["kl"][0].words
    return [Fault("mixture", f"the KL's gradient is a mixture: {told}; right is {right}")]
