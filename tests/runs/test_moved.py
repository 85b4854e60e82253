"""A run whose folder is moved, or whose code changes the current folder, is never divided."""

import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

import klrl
from klrl.runs import checkpoint, entry, folder, record
from klrl.runs.owner import OWNER_FILE
from klrl.runs.record import Recorder
from klrl.runs.rows import RowFile
from klrl.train import loop
from tests.conftest import QUICK, marked
from tests.runs.commands import exits, manifest_of, rows_of, said, timeless

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

RUN, MOVED = Path("run"), Path("moved")
WORDS = (*QUICK, "hydra.run.dir=run", "frames=256", "checkpoint.every=1", "eval.every=2")


def move() -> None:
    RUN.rename(MOVED)


def occupy() -> None:
    """Move the run, and put another folder in its place."""
    move()
    RUN.mkdir()
    (RUN / "notes").touch()


def copy_there() -> None:
    """Move the run, and put a copy in its place."""
    move()
    shutil.copytree(MOVED, RUN)


def take_name() -> None:
    (RUN / OWNER_FILE).unlink()


#: Moment -> the function before whose call with this number the folder is moved.
MOMENTS: dict[str, tuple[object, str, int]] = {
    "start": (loop, "Training", 1),
    "row": (Recorder, "record", 3),
    "written_row": (RowFile, "log_all", 3),
    "checkpoint": (Recorder, "marks", 3),
    "first_file": (checkpoint, "write_entry", 3),
    "a_file": (entry, "_write", 8),
    "last": (checkpoint, "make_folder", 3),
    "removal": (checkpoint.Checkpoints, "_remove", 1),
    "summary": (record, "summary", 1),
    "end": (folder, "replace_file", 5),
}


def before_call(monkeypatch, moment: str, act: Callable[[], None]) -> None:
    """Do ``act`` at a moment, once."""
    owner, name, number = MOMENTS[moment]
    function = getattr(owner, name)
    left: Iterator[int] = iter(range(number - 1, -1, -1))

    def called(*args, **options):
        if next(left, 1) == 0:
            act()
        return function(*args, **options)

    monkeypatch.setattr(owner, name, called)


def moved_run(monkeypatch, capsys, moment: str, act: Callable[[], None], *words: str) -> Path:
    """Move a run at a moment; check that it failed in a line, and return where it is now."""
    with monkeypatch.context() as patch:
        before_call(patch, moment, act)
        code, _, err = said(capsys, *WORDS, *words)
    assert code == 1, err
    (line,) = err.splitlines()
    assert "was moved or deleted during the run" in line
    if act is take_name:
        return RUN
    if act is copy_there:
        return MOVED
    assert [path.name for path in RUN.rglob("*")] == ["notes"] * (act is occupy)
    return MOVED


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The rows of the run that is not moved."""
    run = klrl.run(*WORDS[:-4], *WORDS[-3:], folder=tmp_path_factory.mktemp("whole") / "run")
    return timeless(run.rows)


@pytest.mark.parametrize(
    ("moment", "act"),
    marked(
        "slow",
        [
            *((moment, move) for moment in MOMENTS),
            *product(("row", "a_file", "summary"), (occupy, take_name, copy_there)),
        ],
        *(("start", move), ("row", move), ("last", move), ("end", move)),
        *(("row", take_name), ("a_file", occupy), ("summary", copy_there)),
    ),
)
def test_a_run_that_is_moved_fails_and_is_resumed_as_one(
    moment: str, act: Callable[[], None], whole: list[dict], monkeypatch, capsys
) -> None:
    run = moved_run(monkeypatch, capsys, moment, act)
    if moment == "start":
        assert {path.name for path in run.iterdir()} <= {OWNER_FILE}
        return
    assert manifest_of(run)["status"] == "running"
    assert exits(f"resume={run}") == 0
    assert timeless(rows_of(run)) == whole
    assert manifest_of(run)["status"] == "finished"
    assert not (run / OWNER_FILE).exists()
    assert not list(run.glob("checkpoints/.staging*"))


@pytest.mark.parametrize(
    "logger",
    [
        "tensorboard",
        pytest.param("wandb", marks=pytest.mark.services),
    ],
)
@pytest.mark.parametrize("moment", marked("slow", ("row", "a_file", "summary"), "row"))
def test_a_logger_makes_no_second_folder(moment: str, logger: str, monkeypatch, capsys) -> None:
    run = moved_run(monkeypatch, capsys, moment, move, f"logger={logger}")
    assert (run / logger).is_dir()
    assert exits(f"resume={run}") == 0
    assert not RUN.exists()


def test_a_sweep_that_is_moved_begins_no_job_where_it_was(monkeypatch, capsys) -> None:
    old, new = Path("outputs/s"), Path("outputs/t")
    starts, training = [], loop.Training

    def make(*given):
        starts.append(given)
        if len(starts) == 2:
            old.rename(new)
        return training(*given)

    monkeypatch.setattr(loop, "Training", make)
    code, _, err = said(capsys, "-m", *QUICK, "seed=0,1,2", "sweep=s")
    assert code == 1
    assert len(err.splitlines()) == 1
    assert "outputs/s: was moved or deleted during the sweep" in err
    assert not old.exists()
    assert manifest_of(new / "seed=0")["status"] == "finished"
    assert exits("-m", *QUICK, "seed=0,1,2", "sweep=t") == 0
    found = {path.parent.name for path in new.glob("*/manifest.json")}
    assert found == {"seed=0", "seed=1", "seed=2"}


WANDERER = """
import os, gymnasium, numpy as np
class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, where):
        self.where, self.steps = where, 0
    def go(self, name):
        if name == self.where:
            os.chdir(os.path.join(os.path.dirname(__file__), "elsewhere"))
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.go("reset")
        self.steps = 0
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.go("step")
        self.steps += 1
        return np.zeros(1, np.float32), float(action), self.steps == 8, False, {}
"""
OWN = ("env=custom", "env.target=wanderer:Env", "frames=128", "eval.every=1", "eval.final=2")


@pytest.mark.parametrize("where", marked("slow", ("reset", "step"), "step"))
def test_an_environment_may_change_the_current_folder(where: str, capsys) -> None:
    Path("wanderer.py").write_text(WANDERER)
    Path("elsewhere").mkdir()
    here, words = Path.cwd(), [*QUICK, *OWN, f"env.args.where={where}"]
    assert exits(*words, "hydra.run.dir=run", "logger=tensorboard") == 0
    assert exits("-m", *words, "seed=0,1", "sweep=s") == 0
    assert exits("resume=run", "frames=192") == 0
    assert exits("evaluate", "run", "--episodes=2", "env.args.where=none") == 0
    assert exits("evaluate", "run", "--episodes=2") == 0
    assert exits("record", "run", "--episodes=2", "-o", "demo") == 0
    assert exits("kl", "run", "--to", "outputs/s/seed=0", "--episodes=2") == 0
    assert Path.cwd() == here
    assert not list(Path("elsewhere").iterdir())
    assert [row["frames"] for row in rows_of(RUN)] == [64, 128, 192]
    for run in (RUN, Path("outputs/s/seed=0"), Path("outputs/s/seed=1")):
        assert manifest_of(run)["status"] == "finished"
        assert (run / "curves.png").exists()
    assert {path.name for path in Path().iterdir()} >= {"demo", "run", "outputs"}
    assert exits("verify", "run") == 0


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        *(("metrics.jsonl", "row"), ("checkpoints", "a_file")),
        *((".hydra/config.yaml", "row"), ("manifest.json", "row")),
    ],
)
def test_a_run_that_loses_a_file_fails_and_is_resumed(
    name: str, moment: str, whole: list[dict], monkeypatch, capsys
) -> None:
    away = Path("away")
    with monkeypatch.context() as patch:
        before_call(patch, moment, lambda: (RUN / name).rename(away))
        code, _, err = said(capsys, *WORDS)
    assert code == 1
    (line,) = err.splitlines()
    assert f"{name}: was removed" in line
    assert "then resume the run" in line
    assert manifest_of(RUN)["status"] == "failed"
    if name != "manifest.json":  # klrl writes it again
        away.rename(RUN / name)
    assert exits("resume=run") == 0
    assert timeless(rows_of(RUN)) == whole
