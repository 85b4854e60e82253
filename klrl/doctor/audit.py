"""``klrl doctor --audit``: a folder of losses, each over lengths and distances from pi_old.

A file is an adapter: ``ROWS``, from the name of an option to a function that ``--loss`` could take;
``SYSTEM``, whose they are; and, where they are meant for another one than KL(pi||ref),
``DIVERGENCE``, as ``--divergence`` names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klrl.base.errors import ConfigError
from klrl.base.imports import import_named
from klrl.base.text import text_table
from klrl.doctor.faults import Meant
from klrl.doctor.loss import KindResult, examine_loss, parts_of
from klrl.doctor.problems import DOUBLE, Kind, Problem
from klrl.doctor.terms import TOLERANCE
from klrl.doctor.user_loss import FunctionLoss

LENGTHS, STALE = (1, 4, 16), (0, 1, 4)


class Enumerated(Problem):
    """Two tokens, equally likely under pi_old; two prompts, the second of half the steps."""

    #: Of token 1, in states 0, 1, ... in turn: pi_ref's chance; pi's log-odds, per update.
    REF, UPDATE = (0.2, 0.75, 1 / 3, 0.9), (0.2, -0.1, 0.1)

    def __init__(self, steps: int, stale: int) -> None:
        super().__init__(Kind(str(steps), 2, 2, steps, 2, halves=True), 0, stale=stale)

    def _drawn(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        states = range(self.kind.states)
        ref = torch.tensor([self.REF[s % 4] for s in states], dtype=DOUBLE)
        odds = torch.tensor([self.stale * self.UPDATE[s % 3] for s in states], dtype=DOUBLE)
        log_p = torch.stack([torch.zeros_like(odds), odds], 1).log_softmax(1)
        rewards = torch.tensor([[s % 2, (s + 1) % 2] for s in states], dtype=DOUBLE)
        tickets = torch.ones(log_p.shape, dtype=torch.long)
        return tickets, torch.stack([1 - ref, ref], 1).log(), rewards, log_p


enumerated = cache(Enumerated)


@dataclass(frozen=True)
class Row:
    """One option at one distance from pi_old and one length; its KL term per response."""

    system: str
    option: str
    stale: int  # updates from pi_old, which sampled, to pi
    length: int  # tokens of the first prompt's responses
    cosine: float  # with the gradient of the whole response's KL, which is the objective J
    error: float  # |gradient - true| / |true|
    variance: float  # of one response's gradient, per |true|^2
    #: Codes of klrl/doctor/faults.yaml, found on the problems of --loss; empty: right here. factor:
    #: none of them, the gradient is that of the KL times another number.
    fault: str
    token_error: float  # from the gradient of each token's own KL
    token_fault: str


def audit(folder: str) -> Iterator[Row]:
    """The rows of all adapters of a folder, in the order of their names.

    Raises:
        ConfigError: a folder without adapters, an adapter that does not say what it is.
    """
    setting = f"--audit {folder}"
    files = sorted(path for path in Path(folder).glob("*.py") if path.name[0] != "_")
    if not files:
        raise ConfigError(f"{setting}: holds no adapter; name a folder with NAME.py in it")
    for path in files:
        told = vars(import_named(setting, str(path)))
        if not told.get("ROWS") or not told.get("SYSTEM"):
            raise ConfigError(f"{setting}: {path.name} has no ROWS or no SYSTEM; give both")
        for option, call in told["ROWS"].items():
            divergence = told.get("DIVERGENCE", "reverse")
            loss = FunctionLoss(f"{told['SYSTEM']}, {option}", call, {}, "loss", divergence)
            for cells in _rows(loss, divergence):
                yield Row(told["SYSTEM"], option, *cells)


def _rows(loss: FunctionLoss, divergence: str) -> Iterator[tuple[Any, ...]]:
    # pi_old's distance from itself has no gradient
    for stale in STALE[loss.to == "old" and divergence != "none" :]:
        told = {
            scope: examine_loss(loss, divergence=divergence, scope=scope, stale=stale, seeds=4)
            for scope in ("sequence", "token")
        }
        for length in LENGTHS:
            problem = enumerated(length, stale)
            gradient, square = _gradient(loss, problem, divergence != "none")
            whole, token = (
                _cells(
                    gradient, square, problem, Meant(divergence, scope, loss.to),
                    report.kinds[:1] if length == 1 else report.kinds[1:],
                )
                for scope, report in told.items()
            )  # fmt: skip
            yield stale, length, *whole, token[1], token[3]


def _gradient(loss: FunctionLoss, problem: Problem, of_kl: bool) -> tuple[Tensor, float]:
    """Of the KL's part or of the return's: the mean over responses, and that of its square."""
    batch = problem.batch
    parts = parts_of(loss, of_kl, partial(loss.at_logits, problem))
    at = parts["kl" if of_kl else "return"]
    at = at - batch.logits.detach().exp() * at.sum(-1, keepdim=True)  # softmax sees no constant
    table = torch.zeros(problem.kind.states, problem.kind.actions, dtype=DOUBLE)
    table.index_add_(0, batch.states.flatten(), at.flatten(0, 1))
    # A response passes a state once, so the square of its gradient is a sum over its steps.
    return table.T.flatten(), float(len(at) * at.square().sum())


def _cells(
    gradient: Tensor, square: float, problem: Problem, meant: Meant, kinds: Sequence[KindResult]
) -> tuple[float, float, float, str]:
    """Cosine, error, variance and fault; the aim in the nearest direction counts."""
    trues = [aim.gradient(problem) for aim in meant.kl or meant.returns]
    true = max(trues, key=lambda x: float(gradient @ x / x.norm()))
    size = float(true.norm())
    error, length = float((gradient - true).norm()) / size, float(gradient.norm()) / size
    cosine = float(gradient @ true) / size**2 / length if length > TOLERANCE else 0.0
    others = () if not meant.kl else ("return", "own_reward", "no_return", "unknown_return")
    codes = (fault.code for kind in kinds for fault in kind.faults)
    fault = ", ".join(dict.fromkeys(code for code in codes if not code.startswith(others)))
    fault = "" if error < TOLERANCE else fault or "factor"
    return cosine, error, square / size**2 - length**2, fault


def audit_text(rows: Sequence[Row]) -> str:
    """The table."""
    heads = ("system", "option", "updates", "tokens", "cosine", "error", "variance", "verdict")
    lines = [(*heads, "token: error", "verdict")]
    for r in rows:
        error, token = ("0" if x < TOLERANCE else f"{x:.3f}" for x in (r.error, r.token_error))
        numbers = (str(r.stale), str(r.length), f"{r.cosine:.3f}", error, f"{r.variance:.2g}")
        told = (r.fault or "RIGHT", token, r.token_fault or "RIGHT")
        lines.append((r.system, r.option, *numbers, *told))
    return text_table(lines, right=(2, 3, 4, 5, 6, 8))
