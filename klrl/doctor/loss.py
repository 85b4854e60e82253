"""``klrl doctor --loss``: the gradient of a loss against the true one, over many small problems.

The objective is J = E[return] - coef * KL(pi||pi_ref). The policy that sampled is the policy that
learns (ratio 1), as in the first step of an iteration.
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
from klrl.doctor.faults import FAULTS, Fault, diagnose, mixture
from klrl.doctor.problems import KINDS, Kind, MakeNetwork, Problem, tabular
from klrl.doctor.user_code import load, make_network
from klrl.doctor.user_loss import FunctionLoss, Loss, find_loss, gradient

#: Reward per nat.
COEF = 0.5


@dataclass(frozen=True)
class Spread:
    """Smallest, median and largest of a number over the problems of a kind."""

    min: float
    median: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of some numbers."""
        tensor = torch.tensor(values, dtype=torch.float64)
        return Spread(float(tensor.min()), float(tensor.median()), float(tensor.max()))

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
    kl: Spread  # KL(pi||pi_ref) of an episode, nats
    cosine: Spread  # of minus the loss's expected gradient with that of J
    error: Spread  # |gradient / scale - true| / |true|
    #: What the loss multiplies the gradient with (a mean over steps, for example), read off the
    #: return's part; 1 where that is not the return's.
    scale: Spread
    #: Mean over problems of a sampled batch's gradient along the true one; 1 is unbiased.
    sampled: float
    stderr: float  # of ``sampled``
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class LossReport:
    """The verdict on a loss."""

    loss: str  # its name
    described: str  # its convention
    placement: str
    seeds: int  # problems of each kind
    has_return: bool  # else it is a penalty alone
    kinds: tuple[KindResult, ...]

    @property
    def ok(self) -> bool:
        """Whether the loss has the true gradient everywhere."""
        return not any(kind.faults for kind in self.kinds)


def examine_loss(
    name: str,
    *,
    actor: str | None = None,
    placement: str = "loss",
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
    torch.set_num_threads(1)
    loss = find_loss(name, settings or {}, placement)
    if not loss.has_return and placement != "loss":
        raise ConfigError(
            f"--placement {placement}: {name} takes neither rewards nor advantages, where the KL "
            "would be charged; take one of them, or leave --placement out"
        )
    make = tabular if actor is None else make_network(actor, load("--actor", actor))
    with generators_kept():
        torch.manual_seed(0)
        kinds = tuple(_examine_kind(loss, kind, make, seeds) for kind in KINDS)
    return LossReport(name, loss.described, placement, seeds, loss.has_return, kinds)


@dataclass(frozen=True)
class _Case:
    """One problem: the gradients of what is maximised, flat; minus the loss's."""

    problem: Problem
    whole: Tensor  # at COEF
    without: Tensor | None  # at coef = 0; None for a penalty alone
    sampled: Tensor
    padding: bool  # whether the padding's content changes the gradient
    returns: Tensor  # the true gradient of E[return]; 0 for a penalty alone
    kl: Tensor  # of KL(pi||ref)

    @property
    def true(self) -> Tensor:
        return self.returns - COEF * self.kl

    @property
    def kl_part(self) -> Tensor:
        """The gradient of the loss in coef * KL, without coef: what is minimised."""
        without = 0.0 if self.without is None else self.without
        return (without - self.whole) / COEF


def _examine_kind(loss: Loss, kind: Kind, make: MakeNetwork, seeds: int) -> KindResult:
    cases = [_case(loss, Problem(kind, seed, make)) for seed in range(seeds)]
    problems = [case.problem for case in cases]
    right = {"kl": [case.kl for case in cases], "return": [-case.returns for case in cases]}
    diagnosis = diagnose(
        [case.kl_part for case in cases],
        [-case.without for case in cases if case.without is not None] or None,
        problems,
        right,
    )
    factors, faults = diagnosis.scale or [1.0] * seeds, diagnosis.faults
    if any(fault.code.startswith("unknown") for fault in faults):
        mixed = mixture([-case.whole for case in cases], problems, right, COEF)
        faults = [mixed] if mixed else faults
    if any(case.padding for case in cases):
        # What padding has spoilt is no known gradient.
        faults = [
            FAULTS["mask"],
            *(fault for fault in faults if not fault.code.startswith("unknown")),
        ]
    cosines, errors, parts = [], [], []
    for case, factor in zip(cases, factors, strict=True):
        true = case.true
        cosine = case.whole @ true / (case.whole.norm() * true.norm()).clamp_min(1e-300)
        cosines.append(float(cosine.clamp(-1.0, 1.0)))  # 0 where a gradient is 0
        errors.append(float((case.whole / factor - true).norm() / true.norm()))
        parts.append(float(case.sampled @ true / (true @ true)) / factor)
    along = torch.tensor(parts)
    return KindResult(
        kind.name,
        kl=Spread.of([case.problem.kl() for case in cases]),
        cosine=Spread.of(cosines),
        error=Spread.of(errors),
        scale=Spread.of(factors),
        sampled=float(along.mean()),
        stderr=float(along.std() / math.sqrt(seeds)),
        faults=tuple(faults),
    )


def _case(loss: Loss, problem: Problem) -> _Case:
    every, charged = problem.everything, loss.on(problem, COEF)

    def ascent(value: Tensor) -> Tensor:
        return -gradient(loss.name, value, problem)

    whole = ascent(charged(every, False))
    padding = False
    if isinstance(loss, FunctionLoss) and problem.kind.ends:
        other = ascent(charged(every, True))
        padding = float((other - whole).norm()) > 1e-6 * float(whole.norm())
    returns, kl = problem.true_gradients()
    without = None
    if loss.has_return:
        without = ascent(loss.on(problem, 0.0)(every, False))
    else:
        returns = torch.zeros_like(returns)
    sampled = ascent(charged(problem.sample(), False))
    return _Case(problem, whole, without, sampled, padding, returns, kl)


def report_text(report: LossReport) -> str:
    """The report in plain words."""
    gain = f"E[return] - {COEF} KL(pi||ref)" if report.has_return else f"-{COEF} KL(pi||ref)"
    heads = ("", "KL, nats", "cosine", "relative error", "scale", "sampled")
    rows = [
        (
            kind.name,
            kind.kl.text,
            kind.cosine.text,
            kind.error.text,
            kind.scale.text,
            f"{kind.sampled:.3f} +- {kind.stderr:.3f}",
        )
        for kind in report.kinds
    ]
    lines = [
        f"{report.loss}: {report.described}",
        f"Its expected gradient against that of J = {gain}, in float64, at pi = pi_old (ratio 1),",
        f"placement={report.placement}; from the smallest to the largest of {report.seeds} random "
        "problems of each kind:",
        text_table([heads, *rows], indent=2),
        "scale: what the loss multiplies the gradient with; the error is taken without it.",
        "sampled: gradients of randomly drawn batches along the true one, mean +- standard error;",
        "1 is unbiased.",
        "",
    ]
    if report.ok:
        return "\n".join([*lines, "RIGHT: the gradient of J on every problem"])
    of_kinds: dict[Fault, list[str]] = {}
    for kind in report.kinds:
        for fault in kind.faults:
            of_kinds.setdefault(fault, []).append(kind.name)
    lines += [f"WRONG ({', '.join(names)}): {fault.words}" for fault, names in of_kinds.items()]
    return "\n".join(lines)
