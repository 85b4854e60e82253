"""``klrl doctor --loss``: compares a loss's gradient with the true one on many small problems.

The objective is J = E[return] - coef * D, where D is KL(pi||pi_ref) or the chosen divergence.
Without ``--stale`` pi itself samples (pi_old = pi), as in the first gradient step on a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from klrl.base.errors import ConfigError
from klrl.base.seeds import generators_kept
from klrl.base.text import text_table
from klrl.doctor.aims import Aim, aims
from klrl.doctor.faults import FAULTS, Fault, Meant, diagnose, truth
from klrl.doctor.problems import KINDS, Problem
from klrl.doctor.terms import TOLERANCE
from klrl.doctor.user_loss import Loss, load

#: The distance of pi from pi_old: KL(pi_old||pi) of whole episodes.
MOVED = Aim("forward", "sequence", "whole", "old")


@dataclass(frozen=True)
class Spread:
    """Smallest and largest value of a number over the problems of a kind."""

    min: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Compute the spread of some numbers; a rounding error is 0."""
        known = [x if abs(x) >= 1e-9 else 0.0 for x in values]
        return Spread(min(known), max(known))

    @property
    def text(self) -> str:
        """The range from smallest to largest."""
        if self.min == self.max == 0:
            return "< 1e-9"
        low, high = (f"{x:.3g}" for x in (self.min, self.max))
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class KindResult:
    """The results of a loss on the problems of one kind."""

    name: str
    moved: Spread | None  # KL(pi_old||pi) of whole episodes, nats; None if pi = pi_old
    cosine: Spread  # between minus the loss's expected gradient and the gradient of J
    error: Spread  # |gradient / scale - true| / |true|: the bias
    scale: Spread  # |gradient| / |true|, see :class:`klrl.doctor.faults.Diagnosis`
    #: Mean over problems of (g . true) / (scale |true|^2), with g the gradient on a sampled batch;
    #: 1 if unbiased.
    sampled: float
    stderr: float  # standard error of ``sampled``
    #: Variance of g / (scale |true|)^2; a sampled batch has some 1,300 episodes.
    variance: float
    objective: str  # J, whose gradient the loss has, or should have
    varies: bool  # whether ``scale`` depends on coef
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class LossReport:
    """The verdict on a loss."""

    loss: str  # its name
    described: str  # its calling convention
    placement: str
    divergence: str
    scope: str
    stale: int  # number of random updates from pi_old, which samples, to pi
    coef: float
    seeds: int  # number of problems of each kind
    has_return: bool  # False: the loss is a penalty alone
    kinds: tuple[KindResult, ...]

    @property
    def ok(self) -> bool:
        """Whether the loss has the true gradient, up to a factor, on every problem."""
        return not any(kind.faults for kind in self.kinds)


def examine_loss(
    loss: str | Loss,
    *,
    placement: str = "loss",
    divergence: str | None = None,
    scope: str | None = None,
    stale: int = 0,
    settings: Mapping[str, object] | None = None,
    seeds: int = 100,
) -> LossReport:
    """Compare a loss's gradient with the true one; arguments are options of ``klrl doctor --loss``.

    Raises:
        ConfigError: an argument is out of range, or the loss is not as docs/doctor.md requires.
        LossError: the loss raises.
    """
    if seeds < 2:
        raise ConfigError(f"--seeds {seeds}: give 2 or more")
    if stale < 0:
        raise ConfigError(f"--stale {stale}: give 0 or more")
    if isinstance(loss, str):
        loss = Loss(loss, load("--loss", loss), settings or {}, placement, divergence)
    if loss.to == "old" and loss.takes_old and loss.coef and not stale:
        told = "takes no ref_log_probs, so its penalty is on the distance to pi_old, which is 0"
        raise ConfigError(f"{loss.setting}: {told}; add --stale 3, or take ref_log_probs")
    divergence = loss.divergence
    scope = scope or ("sequence" if divergence in ("reverse", "none") else "token")
    to, parts = loss.to if stale else "ref", {"return": "return", "kl": divergence}
    torch.set_num_threads(1)
    with generators_kept():
        torch.manual_seed(0)
        kinds = tuple(
            _examine_kind(
                loss,
                [Problem(kind, seed, divergence, stale) for seed in range(seeds)],
                {part: aims(what, scope, to) for part, what in parts.items()},
            )
            for kind in KINDS
        )
    return LossReport(
        loss.name, loss.described, loss.placement, divergence, scope, stale, loss.coef, seeds,
        loss.has_return, kinds,
    )  # fmt: skip


def _examine_kind(loss: Loss, problems: Sequence[Problem], meant: Meant) -> KindResult:
    coef, stale = loss.coef, problems[0].stale
    parts = [loss.parts(problem) for problem in problems]
    _require_sum(loss, problems[0], parts[0]["whole"])
    stepwise = [loss.parts(x, at_logits=True) for x in problems[: 6 if stale else 0]]
    found = diagnose(loss, parts, stepwise, problems, meant)
    padded, cosines, errors, sampled, noise, size = False, [], [], [], 0.0, 0.0
    for problem, of, factor in zip(problems, parts, found.scale, strict=True):
        got, true = of["whole"], truth(found.aims, coef, problem)
        some = loss.gradient(problem.numbers(problem.sample(), coef, loss.placement), coef)
        numbers = problem.numbers(problem.everything, coef, loss.placement)
        if not numbers.mask.all():
            other = loss.gradient(numbers.other_padding(), coef)
            padded |= float((other - got).norm()) > 1e-6 * float(got.norm())
        cosine = got @ true / (got.norm() * true.norm()).clamp_min(1e-300)
        gone = got.norm() < 1e-6 * true.norm()  # rounding errors have any direction
        cosines.append(0.0 if gone else float(cosine.clamp(-1.0, 1.0)))
        errors.append(float((got / factor - true).norm() / true.norm()))
        sampled.append(float(some @ true / (true @ true)) / factor)
        noise += float((some - got).square().sum()) / factor**2
        size += float(true @ true)
    faults = found.faults
    if padded:  # drop the faults that say only that the gradient is unknown
        faults = [FAULTS["mask"], *(f for f in faults if "unknown" not in f.code)]
    along = torch.tensor(sampled)
    return KindResult(
        problems[0].kind.name,
        moved=Spread.of([float(MOVED.value(x).detach()) for x in problems]) if stale else None,
        cosine=Spread.of(cosines),
        error=Spread.of(errors),
        scale=Spread.of(found.scale),
        sampled=float(along.mean()),
        stderr=float(along.std() / math.sqrt(len(problems))),
        variance=noise / size,
        objective=" ".join(
            f"- {coef:g} x {aim.words}" if part == "kl" else aim.words
            for part, aim in found.aims.items()
        ),
        varies=found.varies and not faults,
        faults=tuple(faults),
    )


def _require_sum(loss: Loss, problem: Problem, gradient: Tensor) -> None:
    """Refuse a loss whose gradient is random, or depends on the order of the episodes."""
    every, generator = problem.everything, torch.Generator().manual_seed(0)
    other = every.rows(torch.randperm(len(every.mask), generator=generator))
    at = loss.gradient(problem.numbers(other, loss.coef, loss.placement), loss.coef)
    if (at - gradient).norm() > TOLERANCE * gradient.norm() + 1e-6:  # float32 rounds by less
        told = "is random or depends on the order of the episodes (groups? a mini-batch?)"
        raise ConfigError(f"{loss.setting}: {told}; take the whole batch as one")


def report_text(report: LossReport) -> str:
    """Format the report in plain words."""
    heads = ["cosine", "relative error", "scale", "sampled", "variance"]
    at = "at pi = pi_old (ratio 1)"
    if report.stale:
        heads.insert(0, "KL(old||pi)")
        at = f"pi {report.stale} updates from pi_old"
    rows = [
        (
            kind.name,
            *([kind.moved.text] if kind.moved else []),
            kind.cosine.text,
            kind.error.text,
            kind.scale.text,
            f"{kind.sampled:.3f} +- {kind.stderr:.3f}",
            f"{kind.variance:.2g}",
        )
        for kind in report.kinds
    ]
    verdicts: dict[str, list[str]] = {}
    for kind in report.kinds:
        for fault in kind.faults:
            verdicts.setdefault(fault.words, []).append(kind.name)
    told = [f"WRONG ({', '.join(names)}): {words}" for words, names in verdicts.items()]
    factor = ", up to a factor that depends on coef" * any(kind.varies for kind in report.kinds)
    return "\n".join([
        f"{report.loss}: {report.described}",
        f"Its expected gradient against that of J = {report.kinds[-1].objective},",
        f"in float64, {at}, placement={report.placement};",
        f"smallest to largest over {report.seeds} random problems of each kind:",
        text_table([("", *heads), *rows], indent=2),
        "scale: size of the loss's gradient / the true one; the error leaves it out.",
        "sampled: gradients of randomly drawn batches along the true one, mean +- standard error;",
        "1 is unbiased. variance: of such a batch's gradient, per square of the true one's norm.",
        "",
        *(told or [f"RIGHT: the gradient of J on every problem{factor}"]),
    ])  # fmt: skip
