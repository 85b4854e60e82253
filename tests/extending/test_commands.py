"""A sweep, resume, evaluation, report and other processes find parts of one's own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from klrl.api import load_run
from tests.extending.page import PAGE, SHORT, files
from tests.runs.commands import exits, manifest_of, rows_of


@pytest.fixture
def klrl(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """The command line as in a new process in a folder: the user's modules are imported anew."""
    path = sys.path[:]

    def run(*words: str, cwd: Path) -> tuple[int, str, str]:
        for name in files():
            sys.modules.pop(name.removesuffix(".py"), None)
        importlib.invalidate_caches()
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "path", path[:])
        code = exits(*words)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def console_script(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``klrl`` as it is installed: unlike ``python -m`` it does not search the current folder."""
    script = "import sys; sys.path.pop(0); from klrl.cli.main import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(PAGE.parents[1])}
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment,
    )


OWN = (
    *("env=custom", "env.target=maze:Maze", "loss=custom", "loss.target=losses:SPO"),
    *("actor=custom", "actor.target=nets:Residual", "actor.own_critic.target=nets:Residual"),
    *("controller=custom", "controller.target=controllers:Halving"),
    *("controller.args.target=0.05", "logger=none", *SHORT),
)


@pytest.mark.integration
@pytest.mark.usefixtures("without_charts")
@pytest.mark.timeout(300)
def test_own_parts_in_a_sweep_resume_evaluation_and_report(mine, klrl, tmp_path_factory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    code, out, err = klrl("-m", "sweep=s", *OWN, "loss.args.epsilon=0.1,0.2", cwd=mine)
    assert code == 0, err
    assert "2 jobs: 2 finished" in out
    run = mine / "outputs" / "s" / "loss.args.epsilon=0.1"
    one, two = (manifest_of(run.parent / f"loss.args.epsilon=0.{i}") for i in (1, 2))
    assert one["config_hash"] != two["config_hash"]
    first, second = (load_run(run.parent / f"loss.args.epsilon=0.{i}").config for i in (1, 2))
    assert first.env == second.env
    assert first.env.target == "maze:Maze"

    code, out, err = klrl(f"resume={run}", "frames=192", cwd=elsewhere)
    assert code == 0, err
    assert [row["frames"] for row in rows_of(run)] == [64, 128, 192]
    evaluated = ("evaluate", str(run), "--episodes", "2", "--json")
    code, out, err = klrl(*evaluated, cwd=elsewhere)
    assert (code, err) == (0, "")
    assert json.loads(out)["episodes"] == 2
    assert klrl(*evaluated, "env.args.slip=0", cwd=elsewhere)[0] == 0
    code, out, err = klrl(*evaluated, "env.args.slpi=0", cwd=elsewhere)
    assert (code, out) == (2, "")
    assert "did you mean slip?" in err

    source = (mine / "losses.py").read_text("utf-8")
    (mine / "losses.py").write_text(source.replace("(2 * self", "(3 * self"), encoding="utf-8")
    code, out, err = klrl("-m", "sweep=s", *OWN, "loss.args.epsilon=0.1,0.2", cwd=mine)
    assert code == 0, err
    assert "2 jobs, 2 to start" in out, "a patched loss is another job"
    hashes = {
        manifest_of(path.parent)["config_hash"] for path in run.parent.glob("*/manifest.json")
    }
    assert len(hashes) == 4
    code, out, err = klrl("-m", "sweep=s", *OWN, "loss.args.epsilon=0.1,0.2", cwd=mine)
    assert "2 jobs, 2 finished before" in out
    code, out, err = klrl(f"resume={run}", "frames=256", cwd=elsewhere)
    assert code == 2
    assert "loss.target=losses:SPO: has changed since this run began" in err
    assert klrl(*evaluated, cwd=elsewhere)[2] == "", "an evaluation has no loss"
    (mine / "maze.py").write_text("\n" + (mine / "maze.py").read_text("utf-8"), encoding="utf-8")
    assert "env.target=maze:Maze: has changed" in klrl(*evaluated, cwd=elsewhere)[2]

    for name in files():
        (mine / name).unlink()
    code, out, err = klrl("report", "outputs/s", cwd=mine)
    assert code == 0, err
    assert "4 runs in 4 settings" in out, "what was recorded is enough for a report"
    code, out, err = klrl("evaluate", str(run), cwd=elsewhere)
    assert code == 2
    assert "importing maze fails (ModuleNotFoundError" in err


@pytest.mark.services
@pytest.mark.timeout(300)
def test_other_processes_find_own_parts(mine: Path) -> None:
    """joblib's, from the console script, which does not search the current folder."""
    done = console_script("-m", "sweep=s", "launcher=joblib", "launcher.n_jobs=1", *OWN, cwd=mine)
    assert done.returncode == 0, done.stderr
    assert "1 job: 1 finished" in done.stdout
    assert len(rows_of(mine / "outputs/s/job")) == 2
