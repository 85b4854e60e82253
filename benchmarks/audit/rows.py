"""Judges a folder of losses, for several response lengths and policies; prints rows as JSON.

Each file is an adapter for one library. ``ROWS`` maps the name of each option of the library to a
loss that ``klrl doctor --loss`` accepts; ``SYSTEM`` is the library's name; ``DIVERGENCE`` (default
``reverse``) is a value of ``--divergence``.

    python -m benchmarks.audit.rows benchmarks/audit/names
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from klrl.base.imports import import_named
from klrl.base.text import text_table
from klrl.doctor.aims import Aim, aims
from klrl.doctor.loss import KindResult, examine_loss
from klrl.doctor.problems import DOUBLE, Kind, Problem
from klrl.doctor.terms import TOLERANCE
from klrl.doctor.user_loss import Loss

LENGTHS, STALE = (1, 4, 16), (0, 1, 4)


class Enumerated(Problem):
    """Two tokens, equally likely under pi_old; two prompts, the second with half as many steps."""

    #: Token 1's probability under pi_ref, and log-odds that an update adds; cycled over the states.
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
    """Measurements of an option's gradient: the KL's, or the return's if ``DIVERGENCE`` is none."""

    system: str
    option: str
    stale: int  # number of updates from pi_old, which samples, to pi
    length: int  # tokens of the first prompt's responses
    cosine: float  # between the gradient and the true one (that of the KL of whole responses)
    error: float  # |gradient - true| / |true|
    variance: float  # variance of the gradient of one response / |true|^2
    #: Codes of the faults that ``--loss`` reports; empty if ``error`` is 0; ``factor`` if the
    #: gradient is a multiple of the true one.
    fault: str
    token_error: float  # ``error`` against the gradient of each token's own KL
    token_fault: str


def audit(folder: str) -> Iterator[Row]:
    """Yield the rows of all adapters in a folder, sorted by file name."""
    for path in sorted(path for path in Path(folder).glob("*.py") if path.name[0] != "_"):
        adapter = vars(import_named(folder, str(path)))
        system, divergence = adapter["SYSTEM"], adapter.get("DIVERGENCE", "reverse")
        for option, call in adapter["ROWS"].items():
            loss = Loss(f"{system}, {option}", call, {}, "loss", divergence)
            yield from _rows(system, option, loss)


def _rows(system: str, option: str, loss: Loss) -> Iterator[Row]:
    part, what = "kl", loss.divergence
    if what == "none":
        part = what = "return"
    # The KL of pi and pi_old has no gradient at pi = pi_old, so skip stale = 0.
    for stale in STALE[loss.to == "old" and part == "kl" :]:
        reports = [
            examine_loss(loss, scope=scope, stale=stale, seeds=4) for scope in ("sequence", "token")
        ]
        for length in LENGTHS:
            batch = enumerated(length, stale).batch
            at = len(batch.mask) * loss.parts(batch.problem, at_logits=True)[part]
            gradient = batch.at_table(at)
            (cosine, error, size, fault), (_, token_error, _, token_fault) = (
                _cells(gradient, batch.problem, aims(what, each.scope, loss.to),
                       each.kinds[:1] if length == 1 else each.kinds[1:])
                for each in reports
            )  # fmt: skip
            # No response visits a state twice, so its gradient's squared norm is a sum over steps.
            square = float(at.square().sum()) / len(batch.mask)
            variance = (square - float(gradient @ gradient)) / size**2
            numbers = (cosine, error, variance, fault, token_error, token_fault)
            yield Row(system, option, stale, length, *numbers)


def _cells(
    gradient: Tensor, problem: Problem, rights: Sequence[Aim], kinds: Sequence[KindResult]
) -> tuple[float, float, float, str]:
    """Return cosine, error, |true|, fault; true is the gradient of ``rights`` nearest in angle."""
    trues = [aim.gradient(problem) for aim in rights]
    true = max(trues, key=lambda x: float(gradient @ x / x.norm()))
    size, length = float(true.norm()), float(gradient.norm())
    error = float((gradient - true).norm()) / size
    cosine = float(gradient @ true) / size / length if length > TOLERANCE * size else 0.0
    others = () if rights[0].what == "return" else ("return", "own_reward", "no_return")
    codes = (fault.code for kind in kinds for fault in kind.faults)
    fault = ", ".join(dict.fromkeys(code for code in codes if not code.startswith(others)))
    return cosine, error, size, "" if error < TOLERANCE else fault or "factor"


def audit_text(rows: Sequence[Row]) -> str:
    """Format the rows as a table."""
    heads = ("system", "option", "updates", "tokens", "cosine", "error", "variance", "verdict")
    lines = [(*heads, "token: error", "verdict")]
    for r in rows:
        error, token = ("0" if x < TOLERANCE else f"{x:.3f}" for x in (r.error, r.token_error))
        numbers = (str(r.stale), str(r.length), f"{r.cosine:.3f}", error, f"{r.variance:.2g}")
        told = (r.fault or "RIGHT", token, r.token_fault or "RIGHT")
        lines.append((r.system, r.option, *numbers, *told))
    return text_table(lines, right=(2, 3, 4, 5, 6, 8))


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # what the adapters print
        found = [asdict(row) for row in audit(sys.argv[1])]
    print(json.dumps(found))
