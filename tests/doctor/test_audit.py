"""``make audit``: its cells against sums by formulas, and its verdicts."""

import re
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.audit import rows as audit
from benchmarks.audit.by_hand import COEFFICIENTS, Responses, cells

RIGHT = """
SYSTEM = "one"


def loss(log_probs, old_log_probs, ref_log_probs, mask, coef):
    w, r = (log_probs - old_log_probs).exp(), log_probs - ref_log_probs
    return coef * (w * r * mask).sum(1).mean()


ROWS = {"w k1": loss}
"""
WRONG = """
SYSTEM = "other"


def loss(log_probs, ref_log_probs, rewards, mask, coef):
    r = log_probs - ref_log_probs
    return ((coef * ((-r).exp() - 1 + r) - rewards * log_probs) * mask).sum(1).mean()


ROWS = {"k3": loss}
"""


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch) -> Path:
    """A right one and a wrong one; small problems."""
    (tmp_path / "adapter_a.py").write_text(RIGHT)
    (tmp_path / "adapter_b.py").write_text(WRONG)
    (tmp_path / "_helper.py").write_text("1 / 0")
    monkeypatch.setattr(audit, "LENGTHS", (1, 4))
    monkeypatch.setattr(audit, "STALE", (0, 4))
    return tmp_path


def test_cells_are_sums_by_hand_and_verdicts_the_doctors(adapters: Path) -> None:
    rows = [asdict(row) for row in audit.audit(str(adapters))]
    assert [(row["system"], row["stale"], row["length"]) for row in rows] == [
        (system, stale, length)
        for system in ("one", "other")
        for stale in (0, 4)
        for length in (1, 4)
    ]
    for row in rows:
        e = Responses(row["length"], row["stale"])
        c = np.exp(e.u) * (e.r + 1) if row["system"] == "one" else 1 - np.exp(-e.r)
        found, ((whole,), own) = e.gradient(c), e.truths("")
        error = np.linalg.norm(found - whole) / np.linalg.norm(whole)
        of = max(own, key=lambda x: found @ x / np.linalg.norm(x))  # sampled states, or pi's
        nearest = np.linalg.norm(found - of) / np.linalg.norm(of)
        cosine = found @ whole / np.linalg.norm(found) / np.linalg.norm(whole)
        # E|g|^2 - |E g|^2 of one response; a table has two logits per state.
        square = len(c) * np.square(c * e.score / len(c)).sum() - found @ found
        assert row["error"] == pytest.approx(error, abs=1e-9)
        assert row["token_error"] == pytest.approx(nearest, abs=1e-9)
        assert row["cosine"] == pytest.approx(cosine, abs=1e-9)
        assert row["variance"] == pytest.approx(square / (whole @ whole), rel=1e-9)
    told = {(row["system"], row["stale"], row["length"]): row["fault"] for row in rows}
    assert told["one", 0, 1] == told["one", 4, 1] == ""
    assert told["one", 0, 4] == "own_step"
    assert told["one", 4, 4] == "own_step, kl_weight_token"
    assert told["other", 0, 4] == "forward_kl"
    assert told["other", 4, 1] == "forward_kl, kl_weight_none"
    assert {row["token_fault"] for row in rows if row["system"] == "one"} == {""}


def test_another_factor_than_coef_is_told(tmp_path: Path, monkeypatch) -> None:
    """A penalty's factor is a learning rate for --loss, and an error here."""
    (tmp_path / "adapter_c.py").write_text(RIGHT.replace("coef *", "2 * coef *"))
    monkeypatch.setattr(audit, "LENGTHS", (1,))
    monkeypatch.setattr(audit, "STALE", (1,))
    last = audit.audit_text([*audit.audit(str(tmp_path))]).splitlines()[-1].split()
    _, error, _, *told = last[-6:]
    assert (error, told) == ("1.000", ["factor", "1.000", "factor"])


def test_the_committed_table_is_what_the_formulas_sum() -> None:
    """Of all systems, without them; ``make audit`` compares 16 tokens too."""
    table = Path(__file__).parents[2] / "docs" / "audit" / "table.txt"
    lines = [re.split("  +", line) for line in table.read_text().splitlines()[1:]]
    rows = [line for line in lines if line[1] in COEFFICIENTS and int(line[3]) < 16]
    assert {line[1] for line in rows} == set(COEFFICIENTS)
    for _, option, stale, length, cosine, error, _, verdict, token, token_verdict in rows:
        found = [float(x) for x in (cosine, error, token)]
        by_hand = cells(option, int(length), int(stale))
        assert found == pytest.approx(by_hand, abs=6e-4), option
        assert (verdict == "RIGHT") == (by_hand[1] < 1e-4)
        assert (token_verdict == "RIGHT") == (by_hand[2] < 1e-4)


@pytest.mark.integration
def test_stale_systems_are_printed(tmp_path: Path) -> None:
    """By a pip that knows two systems, and not the registry."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\ncase "$*" in *trl) echo "trl (99.0.1)" ;; *) exit 1 ;; esac\n')
    python.chmod(0o755)
    (tmp_path / ".klrl").touch()
    command = ["make", "--no-print-directory", "audit-stale", f"VENV={tmp_path}"]
    root = Path(__file__).parents[2]
    made = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    said = made.stdout.splitlines()
    assert [line.split()[0] for line in said] == ["torchrl", "trl", "verl", "openrlhf", "skyrl"]
    assert said[1].endswith("the newest is 99.0.1")
    assert said[2].endswith("the newest is unknown")
