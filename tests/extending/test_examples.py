"""docs/extending.md: every example trains."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from klrl.api import load_run
from klrl.config.own import own_parts
from tests.extending.page import SHORT, commands, files
from tests.runs.commands import exits, rows_of


def test_the_page_has_an_example_of_each_part() -> None:
    text = " ".join(commands())
    for group in ("env", "actor", "reference", "loss", "controller", "advantage", "logger"):
        assert f"{group}=custom {group}.target=" in text
    parts = ("loss.own_beta_rule", "kl.own_estimator", "kl.own_divergence", "actor.own_critic")
    for inner in parts:
        assert f"{inner}.target=" in text
    assert "env.wrappers=[" in text
    assert len(commands()) == len(files()) + 1, "each file has a command, the estimators two"


@pytest.mark.integration
@pytest.mark.parametrize("command", commands(), ids=lambda c: c.split("target=")[-1][:40])
def test_every_example_trains(command: str, mine: Path) -> None:
    words = shlex.split(command)[1:]
    quiet = () if "logger=custom" in words else ("logger=none",)
    assert exits(*words, *SHORT, *quiet, f"hydra.run.dir={mine / 'run'}") == 0
    rows = rows_of(mine / "run")
    assert [row["frames"] for row in rows] == [64, 128]
    assert all(row["kl/ref/exact"] >= 0 for row in rows)
    own = [part for _, part in own_parts(load_run(mine / "run").config)]
    told = " ".join(words) + (mine / "conf/env/maze.yaml").read_text("utf-8")
    assert all(part.target in told for part in own)
    local = [part for part in own if not part.target.startswith("gymnasium")]
    assert local
    assert all(re.fullmatch(r"[0-9a-f]{12}", str(part.source)) for part in local)
    if "logger=custom" in words:
        lines = (mine / "run" / "lines.txt").read_text("utf-8").split()
        assert [int(line) for line in lines[::2]] == [64, 128]
