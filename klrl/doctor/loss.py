"""``klrl doctor --loss``: the gradient of a loss against the true one, over many small problems.

The objective is J = E[return] - coef * D, where D is KL(pi||pi_ref) unless another divergence is
named. The policy that sampled is the policy that learns (ratio 1), as in the first step of an
iteration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from klrl.base.errors import ConfigError
from klrl.base.seeds import generators_kept
from klrl.base.text import text_table
from klrl.doctor.aims import Aim
from klrl.doctor.faults import FAULTS, Fault, Meant, diagnose, mixture
from klrl.doctor.problems import KINDS, Problem, tabular
from klrl.doctor.terms import factors
from klrl.doctor.user_code import load, make_network
from klrl.doctor.user_loss import FunctionLoss, Loss, find_loss, gradient

#: How far pi has moved.
MOVED = Aim("forward", "sequence", "whole", "old")


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest of a number over the problems of a kind."""

    min: float
    median: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of some numbers."""
        ordered = sorted(values)
        return Spread(ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1])

    @property
    def text(self) -> str:
        """From the smallest to the largest."""
        if 0 <= self.min <= self.max < 1e-9:
            return "< 1e-9"
        low, high = (f"{x:.3g}" for x in (self.min, self.max))
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class KindResult:
    """What came out for the problems of one kind."""

    name: str
    moved: Spread | None  # KL(pi_old||pi) of an episode, nats; None where pi sampled
    kl: Spread | None  # the divergence of an episode, nats; None where there is none
    cosine: Spread  # of minus the loss's expected gradient with that of J
    error: Spread  # |gradient / scale - true| / |true|: the bias
    #: What the loss multiplies the gradient with (a mean over steps, for example), read off the
    #: return's part; 1 where that is not the return's.
    scale: Spread
    #: Mean over problems of a sampled batch's gradient along the true one; 1 is unbiased.
    sampled: float
    stderr: float  # of ``sampled``
    #: Of the gradient of a sampled batch of some 1,300 episodes, per square of the true one's norm.
    variance: float
    objective: str  # J, of which the gradient is, or should be
    varies: bool  # whether the scale depends on coef
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class LossReport:
    """The verdict on a loss."""

    loss: str  # its name
    described: str  # its convention
    placement: str
    divergence: str
    scope: str
    stale: int  # updates from pi_old, which sampled, to pi
    coef: float
    seeds: int  # problems of each kind
    has_return: bool  # else it is a penalty alone
    kinds: tuple[KindResult, ...]

    @property
    def ok(self) -> bool:
        """Whether the loss has the true gradient everywhere."""
        return not any(kind.faults for kind in self.kinds)


def examine_loss(
    loss: str | Loss,
    *,
    actor: str | None = None,
    placement: str = "loss",
    divergence: str | None = None,
    scope: str | None = None,
    stale: int = 0,
    settings: Mapping[str, object] | None = None,
    seeds: int = 100,
) -> LossReport:
    """Compare the gradient of a loss with the true one; arguments as of ``klrl doctor --loss``.

    Raises:
        ConfigError: a loss that cannot be called as docs/doctor.md says, or has no gradient.
        LossError: the loss raises.
    """
    if seeds < 2:
        raise ConfigError(f"--seeds {seeds}: give 2 or more")
    if stale < 0:
        raise ConfigError(f"--stale {stale}: give 0 or more")
    if placement == "reward" and divergence not in (None, "reverse"):
        raise ConfigError(
            f"--divergence {divergence}: --placement reward charges k1, whose gradient is that of "
            "the reverse KL; leave one of them out"
        )
    torch.set_num_threads(1)
    if isinstance(loss, str):
        loss = find_loss(loss, settings or {}, placement, divergence)
    if not loss.has_return and placement != "loss":
        raise ConfigError(
            f"--placement {placement}: {loss.name} takes neither rewards nor advantages, where the "
            "KL would be charged; take one of them, or leave --placement out"
        )
    if not loss.has_return and divergence == "none":
        raise ConfigError(
            f"--divergence none: {loss.name} takes neither rewards nor advantages, so nothing is "
            "left; take one of them, or name the divergence"
        )
    make = tabular if actor is None else make_network(actor, load("--actor", actor))
    divergence = divergence or "reverse"
    scope = scope or ("sequence" if divergence in ("reverse", "none") else "token")
    with generators_kept():
        torch.manual_seed(0)
        kinds = tuple(
            _examine_kind(
                loss,
                [Problem(kind, seed, make, divergence, stale) for seed in range(seeds)],
                Meant(divergence, scope, loss.to if stale else "ref"),
            )
            for kind in KINDS
        )
    coef = 0.0 if divergence == "none" else loss.coef
    return LossReport(
        loss.name, loss.described, placement, divergence, scope, stale, coef, seeds,
        loss.has_return, kinds,
    )  # fmt: skip


@dataclass(frozen=True)
class _Case:
    """Minus the gradients of a loss on one problem, flat."""

    whole: Tensor  # at its coef
    without: Tensor  # at coef = 0; 0 for a penalty alone
    sampled: Tensor
    padding: bool  # whether the padding's content changes the gradient


def _examine_kind(loss: Loss, problems: Sequence[Problem], meant: Meant) -> KindResult:
    cases = [_case(loss, problem, loss.coef if meant.kl else 0.0) for problem in problems]
    diagnosis = diagnose(
        [(case.without - case.whole) / loss.coef for case in cases] if meant.kl else None,
        [-case.without for case in cases] if loss.has_return else None,
        problems,
        meant,
        partial(_at_logits, loss, problems[:6]) if problems[0].stale else None,
    )
    faults, scale = diagnosis.faults, diagnosis.scale or [1.0] * len(cases)
    parts = [(1.0, diagnosis.gain)] * loss.has_return
    parts += [(loss.coef, diagnosis.kl)] if diagnosis.kl else []
    trues = {
        problem: torch.stack([-coef * aim.gradient(problem) for coef, aim in parts]).sum(0)
        for problem in problems
    }
    common = None
    if faults and loss.has_return and diagnosis.scale:
        common = factors([case.whole for case in cases], problems, trues.__getitem__)
    if common and common[0] > 0:  # one factor for both parts, another one for each coef
        faults, scale = [], common
    elif any(fault.code.startswith("unknown") for fault in faults) and meant.kl:
        whole = [-case.whole for case in cases]
        mixed = mixture(whole, problems, meant, loss.has_return, loss.coef)
        faults = [mixed] if mixed else faults
    if any(case.padding for case in cases):
        # What padding has spoilt is no known gradient.
        faults = [FAULTS["mask"], *(f for f in faults if not f.code.startswith("unknown"))]
    cosines, errors, sampled, noise = [], [], [], 0.0
    for case, true, factor in zip(cases, trues.values(), scale, strict=True):
        cosine = case.whole @ true / (case.whole.norm() * true.norm()).clamp_min(1e-300)
        cosines.append(float(cosine.clamp(-1.0, 1.0)))  # 0 where a gradient is 0
        errors.append(float((case.whole / factor - true).norm() / true.norm()))
        sampled.append(float(case.sampled @ true / (true @ true)) / factor)
        noise += float((case.sampled - case.whole).square().sum()) / factor**2
    along = torch.tensor(sampled)
    return KindResult(
        problems[0].kind.name,
        moved=_spread(MOVED, problems) if problems[0].stale else None,
        kl=_spread(meant.kl[0], problems) if meant.kl else None,
        cosine=Spread.of(cosines),
        error=Spread.of(errors),
        scale=Spread.of(scale),
        sampled=float(along.mean()),
        stderr=float(along.std() / math.sqrt(len(cases))),
        variance=noise / sum(float(true @ true) for true in trues.values()),
        objective=" ".join(
            aim.words if aim.what == "return" else f"- {coef:g} x {aim.words}"
            for coef, aim in parts
        ),
        varies=bool(diagnosis.faults) and not faults,
        faults=tuple(faults),
    )


def _at_logits(loss: Loss, problems: Sequence[Problem], part: str) -> list[Tensor]:
    """As :func:`diagnose` wants it."""
    zero = [loss.at_logits(p, 0.0) if loss.has_return else torch.zeros(()) for p in problems]
    if part == "return":
        return zero
    ends = zip(problems, zero, strict=True)
    return [(loss.at_logits(p, loss.coef) - without) / loss.coef for p, without in ends]


def _spread(aim: Aim, problems: Sequence[Problem]) -> Spread:
    return Spread.of([float(aim.value(problem).detach()) for problem in problems])


def _case(loss: Loss, problem: Problem, coef: float) -> _Case:
    every, charged = problem.everything, loss.on(problem, coef)

    def ascent(value: Tensor) -> Tensor:
        return -gradient(loss.name, value, problem)

    whole = ascent(charged(every, False))
    padding = False
    if isinstance(loss, FunctionLoss) and not every.mask.all():
        other = ascent(charged(every, True))
        padding = float((other - whole).norm()) > 1e-6 * float(whole.norm())
    without = torch.zeros_like(whole)
    if loss.has_return:
        without = ascent(loss.on(problem, 0.0)(every, False)) if coef else whole
    sampled = ascent(charged(problem.sample(), False))
    return _Case(whole, without, sampled, padding)


def report_text(report: LossReport) -> str:
    """The report in plain words."""
    heads = ["D, nats", "cosine", "relative error", "scale", "sampled", "variance"]
    at = "at pi = pi_old (ratio 1)"
    if report.stale:
        heads.insert(0, "KL(old||pi)")
        at = f"pi {report.stale} updates from pi_old"
    rows = [
        (
            kind.name,
            *([kind.moved.text] if kind.moved else []),
            kind.kl.text if kind.kl else "",
            kind.cosine.text,
            kind.error.text,
            kind.scale.text,
            f"{kind.sampled:.3f} +- {kind.stderr:.3f}",
            f"{kind.variance:.2g}",
        )
        for kind in report.kinds
    ]
    lines = [
        f"{report.loss}: {report.described}",
        f"Its expected gradient against that of J = {report.kinds[-1].objective},",
        f"in float64, {at}, placement={report.placement};",
        f"from the smallest to the largest of {report.seeds} random problems of each kind:",
        text_table([("", *heads), *rows], indent=2),
        "scale: what the loss multiplies the gradient with; the error is taken without it.",
        "sampled: gradients of randomly drawn batches along the true one, mean +- standard error;",
        "1 is unbiased. variance: of such a batch's gradient, per square of the true one's norm.",
        "",
    ]
    if report.ok:
        told = "RIGHT: the gradient of J on every problem"
        if any(kind.varies for kind in report.kinds):
            told += ", up to a factor that depends on coef"
        return "\n".join([*lines, told])
    of_kinds: dict[Fault, list[str]] = {}
    for kind in report.kinds:
        for fault in kind.faults:
            of_kinds.setdefault(fault, []).append(kind.name)
    lines += [f"WRONG ({', '.join(names)}): {fault.words}" for fault, names in of_kinds.items()]
    return "\n".join(lines)
