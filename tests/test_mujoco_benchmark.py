"""``benchmarks/mujoco``: the published figures, Stable-Baselines3's run, cells and the page."""

import json
import os
import sys
import time
from dataclasses import replace
from itertools import pairwise
from math import erf
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from benchmarks.mujoco import sb3
from benchmarks.mujoco.cells import Cell, Lines, job_identity, run_cells
from benchmarks.mujoco.curves import training_cpu, x_of
from benchmarks.mujoco.losses import default_told, loss_beside_loss, over_tasks
from benchmarks.mujoco.peers import against_published, aim_told, chance_interval
from benchmarks.mujoco.published import FRAMES, NAMES, SOURCES, V5, best
from benchmarks.mujoco.runs import CLIP, HELD, KLPEN, MAIN, known
from benchmarks.mujoco.sb3 import Row
from benchmarks.results import ROOT
from klrl.report.statistics import chance_of_more
from klrl.runs.rows import read_rows
from tests.conftest import marked
from tests.runs.commands import exits

ENVS = Path(__file__).parents[1] / "conf/env"
WHOLE = 488 * 2048  # what CleanRL makes of a million


def test_the_best_by_hand():
    assert (best("half_cheetah")[0], best("ant")[0], best("reacher")[0]) == (5819.099, 3258.4, -4.1)
    assert best("hopper")[1].name == "XuanCe"
    many = [source for source in SOURCES if (source.seeds or 0) >= 10]
    assert [best("hopper", many)[0], best("walker2d", many)[0]] == [2609.3, 3588.5]
    assert best("walker2d", method="TRPO")[0] == 4933.148
    with pytest.raises(ValueError, match="reacher"):
        best("reacher", SOURCES[:1])


@pytest.mark.parametrize("task", NAMES)
def test_every_task_has_its_preset(task):
    preset = yaml.safe_load((ENVS / f"{task}.yaml").read_text("utf-8"))
    assert preset["env"]["id"] == sb3.env_id(task)
    assert preset["frames"] == FRAMES


def test_the_sources_are_whole():
    assert len({source.name for source in SOURCES}) == len(SOURCES)
    assert V5.keys() <= NAMES.keys()
    for source in SOURCES:
        assert source.returns.keys() <= NAMES.keys()
        assert 0.999e6 <= source.frames <= 1e6
        spreads = {spread is not None for _, spread in source.returns.values()}
        assert spreads == {bool(source.spread)}, source.name
        assert not (source.approximate and source.spread)


def test_the_learning_rate_is_that_of_cleanrl():
    """frac = 1 - (iteration - 1) / num_iterations, iterations from 1; SB3 tells what is left."""
    for iteration in (1, 2, 488):
        left = 1 - iteration * 2048 / WHOLE
        by_cleanrl = 3e-4 * (1 - (iteration - 1) / 488)
        assert sb3.learning_rate(left, WHOLE) == pytest.approx(by_cleanrl, rel=1e-9)


def test_whole_rollouts_only():
    assert sb3.whole_frames(FRAMES) == WHOLE
    with pytest.raises(ValueError, match="frames=2047"):
        sb3.whole_frames(2047)


def test_the_identity_is_of_all_settings_and_versions():
    versions = {"stable-baselines3": "2.9.2"}
    first = sb3.identity(sb3.settings("hopper", 0, WHOLE), versions)
    assert first == sb3.identity(sb3.settings("hopper", 0, WHOLE), versions)
    others = [
        sb3.identity(sb3.settings("walker2d", 0, WHOLE), versions),
        sb3.identity(sb3.settings("hopper", 1, WHOLE), versions),
        sb3.identity(sb3.settings("hopper", 0, 2048), versions),
        sb3.identity(sb3.settings("hopper", 0, WHOLE), {"stable-baselines3": "2.9.3"}),
    ]
    assert len({first, *others}) == 5


def test_training_tells_the_episodes_of_each_iteration():
    """Episodes of 1 and 3, then none, then 5: no episode counts twice."""
    iterations = [[1.0, 3.0], [], [5.0]]

    class Model:
        num_timesteps, ep_info_buffer = 0, []

        def train(self):
            pass

        def learn(self, frames):
            for returns in iterations:
                self.num_timesteps += frames // len(iterations)
                self.ep_info_buffer.extend({"r": each} for each in returns)
                self.train()

    rows = sb3.train(Model(), 30)
    assert [row[:2] for row in rows] == [(10, 2.0), (20, None), (30, 5.0)]
    assert all(a.seconds <= b.seconds for a, b in pairwise(rows))


def test_the_curve_has_few_points_and_loses_no_iteration():
    rows = [Row(10 * i, float(i), i / 10) for i in range(1, 101)]
    points = sb3.curve(rows)
    assert points["frames"] == list(range(20, 1001, 20))
    assert points["return"][:2] == [1.5, 3.5]
    assert points["seconds"][-1] == 10.0
    assert sb3.last_tenth(rows) == pytest.approx(95.5)  # 91 to 100
    few = [Row(10, None, 1.0), Row(20, 2.0, 2.0)]
    assert sb3.curve(few) == {"frames": [10, 20], "return": [None, 2.0], "seconds": [1.0, 2.0]}
    assert (sb3.last_tenth(few), sb3.last_tenth(few[:1])) == (2.0, None)


@pytest.mark.integration
def test_a_line_of_stable_baselines3(monkeypatch):
    """One rollout of the shortest task, two episodes from klrl's closing start states."""
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(sb3, "EPISODES", 2)
    line = json.loads(json.dumps(sb3.run("inverted_pendulum", 3, 2048)))
    assert line["name"] == "inverted_pendulum sb3 3"
    assert {"seed=3", "frames=2048", "gamma=0.99", "env=InvertedPendulum-v5"} <= set(line["words"])
    assert line["curve"]["frames"] == [2048]
    assert line["training"] == pytest.approx(line["curve"]["return"][0], rel=1e-4)
    assert line["return"] >= 1
    assert line["cpu"] > 0


def test_evaluation_starts_where_klrl_closes(monkeypatch):
    """A policy that does nothing: its returns are those of plain Gymnasium from these seeds."""
    gym = pytest.importorskip("gymnasium")
    monkeypatch.setattr(sb3, "EPISODES", 3)
    normalize = SimpleNamespace(normalize_obs=lambda observation: observation)
    model = SimpleNamespace(
        predict=lambda observation, deterministic: ([0.0], None),
        get_vec_normalize_env=lambda: normalize,
    )
    from klrl.train.evaluate import CLOSING

    steps = []
    for seed in CLOSING.seeds(3):
        env = gym.make("InvertedPendulum-v5")
        env.reset(seed=seed)
        count = 1
        while not env.step([0.0])[2]:
            count += 1
        steps.append(count - 1.0)  # 1 for each step but the one that ends it
    assert sb3.evaluate(model, "inverted_pendulum") == steps


CELL = Cell("hopper", "klpen_held", 3, ("kl=none", "loss=klpen_held"))


def line(cell: Cell, **values: object) -> dict:
    return {"name": cell.name, "identity": job_identity(cell), "return": 1.0, "se": 0.1, **values}


def test_a_fresh_clone_knows_a_finished_cell_while_its_settings_are_the_same(tmp_path) -> None:
    path = tmp_path / "cells" / "klpen_held.jsonl"
    Lines(path).add(line(CELL, cpu=7.0))
    known = Lines(path).get(CELL)
    assert known is not None
    assert known["cpu"] == 7.0
    for other in (
        replace(CELL, seed=4),
        replace(CELL, words=("kl=none", "loss=clip")),
        replace(CELL, task="walker2d"),
    ):
        assert Lines(path).get(other) is None


@pytest.mark.integration
def test_what_failed_is_told_after_the_others_are_done(tmp_path, monkeypatch, capsys) -> None:
    cells = [replace(CELL, seed=seed) for seed in range(3)]
    began: list[int] = []

    def begin(cell: Cell) -> int:
        began.append(cell.seed)
        code = f"raise SystemExit({cell.seed == 1})"
        return os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)

    def read(cell: Cell, code: int, cpu: float) -> dict:
        if code:
            raise RuntimeError(f"exit {code}")
        return line(cell, cpu=cpu)

    monkeypatch.setattr("benchmarks.mujoco.cells.start", begin)
    monkeypatch.setattr("benchmarks.mujoco.cells.read_cell", read)
    path = tmp_path / "held.jsonl"
    failed = [f"hopper klpen_held 1: exit 1; see {cells[1].log}"]
    assert run_cells(cells, Lines(path), 2) == failed
    assert sorted(began) == [0, 1, 2]
    assert [Lines(path).get(cell) is not None for cell in cells] == [True, False, True]
    began.clear()
    assert run_cells(cells, Lines(path), 2) == failed
    assert began == [1]


@pytest.mark.integration
def test_an_interrupt_stops_what_runs_and_starts_nothing(tmp_path, monkeypatch) -> None:
    cells = [replace(CELL, seed=seed) for seed in range(6)]
    pids: list[int] = []

    def begin(cell: Cell) -> int:
        code = "import os, signal, time; time.sleep(1); os.kill(os.getppid(), signal.SIGTERM)"
        starts = "import os, time; own = os.fork() or os.getpid(); open('own', 'w').write(f'{own}')"
        wait = "; time.sleep(60)"
        words = [sys.executable, "-c", (code if pids else starts) + wait]
        pids.append(os.posix_spawn(sys.executable, words, os.environ, setpgroup=0))
        return pids[-1]

    monkeypatch.setattr("benchmarks.mujoco.cells.start", begin)
    with pytest.raises(SystemExit, match="interrupted; 6 of 6 runs are missing"):
        run_cells(cells, Lines(tmp_path / "held.jsonl"), 2)
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    # What the first one had started is gone too, or waits for init to collect it.
    status = Path(f"/proc/{Path('own').read_text()}/stat")
    until = time.monotonic() + 10
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_torn_line_is_dropped(tmp_path) -> None:
    path = tmp_path / "held.jsonl"
    Lines(path).add(line(CELL, cpu=7.0))
    whole = path.read_text()
    path.write_text(whole + '{"name": "hopper')
    known = Lines(path)
    assert known.get(CELL) is not None
    other = replace(CELL, seed=4)
    known.add(line(other, cpu=8.0))
    assert path.read_text() == whole + json.dumps(line(other, cpu=8.0)) + "\n"


def test_the_interval_of_the_chance_of_more_covers_it_with_few_seeds() -> None:
    """Normal samples of 10 and 3, whose P(A > B) is Phi(shift / sqrt(2))."""
    rng = np.random.default_rng(1)
    for shift in (0.0, 1.0, 2.0):
        truth = 0.5 * (1 + erf(shift / 2))
        held = []
        for _ in range(2000):
            a, b = rng.normal(shift, 1, 10), rng.normal(0, 1, 3)
            low, high = chance_interval(chance_of_more(a, b), 10, 3)
            held.append(low <= truth <= high)
        assert 0.92 < np.mean(held) < 0.995, shift


def test_the_interval_of_the_chance_of_more_solves_newcombes_equation() -> None:
    for chance, m, n in ((0.85, 10, 2), (0.5, 5, 5), (0.02, 7, 9)):
        for p in chance_interval(chance, m, n):
            k = (m + n) / 2 - 1
            variance = p * (1 - p) / (m * n) * (1 + k * (1 - p) / (2 - p) + k * p / (1 + p))
            assert abs(chance - p) == pytest.approx(1.96 * np.sqrt(variance), rel=1e-4)
    low, high = chance_interval(1.0, 10, 3)
    assert high == 1.0
    assert 0 < low < 0.8  # all of ten above all of three is no certainty
    low, high = chance_interval(0.0, 3, 10)
    assert low == 0.0
    assert high == pytest.approx(1 - chance_interval(1.0, 3, 10)[0])


@pytest.mark.parametrize(
    ("held", "excluded"),
    [((98, 99, 100, 101, 102), "yes"), ((93, 94, 95, 96, 97), "no"), ((70, 90, 110, 130), "no")],
)
def test_a_loss_of_five_percent_is_excluded_by_welchs_interval(held, excluded) -> None:
    clip = (98, 99, 100, 101, 102)
    cells = {
        setting: {"hopper": [{"return": value} for value in values]}
        for setting, values in ((HELD, held), (CLIP, clip))
    }
    line = loss_beside_loss(cells, HELD, CLIP, "hopper")
    if len(held) < 5:
        assert "not run yet" in line
    else:
        # Variances of 2.5, five each: a standard error of 1, eight degrees of freedom.
        gap = np.mean(held) - 100
        assert f"[{gap - 2.306:+,.0f}, {gap + 2.306:+,.0f}]" in line
    assert line.endswith(f"| {excluded} |")


def test_the_mean_over_tasks_has_the_same_verdict_from_both_sides() -> None:
    held, clip = [98, 99, 100, 101, 102], [95, 96, 97, 98, 99]
    scaled = {"hopper": 1.0, "ant": 30.0}  # the unit of a task's reward does not matter
    cells = {
        setting: {task: [{"return": unit * v} for v in values] for task, unit in scaled.items()}
        for setting, values in ((HELD, held), (CLIP, clip))
    }
    # log(100 / 97); variances of 2.5 / 5, over the squared means, of two tasks: 16 degrees of
    # freedom, whose quantile is 2.120.
    gap = np.log(100 / 97)
    reach = 2.120 * np.sqrt(0.5 * (1 / 100**2 + 1 / 97**2) / 2)
    for first, second, sign in ((HELD, CLIP, 1), (CLIP, HELD, -1)):
        line = over_tasks(cells, first, second, list(scaled))
        low, high = (100 * np.expm1(sign * gap + each) for each in (-reach, reach))
        assert f"{100 * np.expm1(sign * gap):+.0f} [{low:+.0f}, {high:+.0f}]" in line
        assert line.endswith("| yes |")  # -5 is excluded from both sides


def test_the_aim_is_the_interquartile_mean_of_the_ratios() -> None:
    cells = {HELD: {task: [{"return": 10.0 * i} for i in range(10)] for task in MAIN}}
    # Of 0 to 9, five times each: the middle half of 50 numbers, 12 cut at either end.
    ordered = np.sort(np.tile(np.arange(10.0), 5))
    assert against_published(cells, HELD, dict.fromkeys(MAIN, 10.0)) == ordered[12:-12].mean()


def test_the_aim_is_told_as_missed_or_reached() -> None:
    def cells(**factors: float) -> dict:
        ratios = {task: factors.get(task, 1.2) for task in MAIN}
        return {
            setting: {task: [{"return": r * best(task)[0]}] * 10 for task, r in ratios.items()}
            for setting in (HELD, CLIP, KLPEN)
        }

    assert "It is reached: 1.20.**" in aim_told(cells())
    assert "It is missed: 1.20, Swimmer 0.80.**" in aim_told(cells(swimmer=0.8))
    assert "It is missed: 1.05.**" in aim_told(cells(**dict.fromkeys(MAIN, 1.05)))


def test_the_default_changes_only_where_every_task_says_yes() -> None:
    near = [98, 99, 100, 101, 102]

    def cells(**held: list[int]) -> dict:
        by_task = {task: [{"return": v} for v in near] for task in MAIN}
        taken = {task: [{"return": v} for v in held.get(task, near)] for task in MAIN}
        wide = {task: [{"return": v} for v in (50, 150, 100, 80, 120)] for task in MAIN}
        return {HELD: taken, CLIP: wide, KLPEN: by_task}

    assert default_told(cells()).startswith("**klpen_held takes klpen's place.**")
    assert default_told(cells(ant=[93, 94, 95, 96, 97])).startswith("**klpen stays the default.**")


def test_cpu_seconds_are_spread_as_the_clocks() -> None:
    """A process of 60 CPU seconds: 90 seconds of training and 30 of evaluation by the clock."""
    curve = {"frames": [1000, 2000], "seconds": [45.0, 90.0]}
    line = {"cpu": 60.0, "seconds": 90.0, "evaluation_seconds": 30.0, "curve": curve}
    assert training_cpu(line) == pytest.approx(45.0)
    assert x_of(line, "seconds") == pytest.approx([22.5, 45.0])
    assert x_of(line, "frames") == pytest.approx([1.0, 2.0])


def ant_told(cells: dict) -> str:
    def mean(setting: str, key: str) -> float:
        return float(np.mean([line[key] for line in cells[setting]["ant"]]))

    clip, klpen = (mean(setting, "training") for setting in (CLIP, KLPEN))
    times = mean(CLIP, "kl_old") / mean(KLPEN, "kl_old")
    return f"on Ant ({clip:,.0f} against {klpen:,.0f}, at {times:.1f} times the KL(old || new))"


@pytest.mark.integration
def test_readmes_numbers_are_those_of_the_committed_cells() -> None:
    cells = {setting: known(setting) for setting in (HELD, CLIP, KLPEN)}
    told = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert ant_told(cells) in told
    for key, tasks in (("training", set(MAIN) - {"ant"}), ("return", MAIN)):
        gaps = [loss_beside_loss(cells, CLIP, KLPEN, task, key) for task in tasks]
        assert all("[-" in gap.split(" | ")[2] and ", +" in gap.split(" | ")[2] for gap in gaps)
    bands = {
        setting: [line["band"] for lines in cells[setting].values() for line in lines]
        for setting in (HELD, KLPEN)
    }
    assert f"in {min(bands[HELD]):.0%} of the iterations of every run" in told
    low, high = (100 * edge(bands[KLPEN]) for edge in (min, max))
    assert f"(`klpen` in {low:.0f} to {high:.0f}%)" in told
    minutes = [
        line["cpu"] / 60 for tasks in cells.values() for lines in tasks.values() for line in lines
    ]
    assert f"{min(minutes):.0f} to {max(minutes):.0f} minutes of CPU a run" in told


def run(cell: Cell, path: Path) -> list[dict]:
    assert run_cells([cell], Lines(path), 1) == []
    return [json.loads(text) for text in path.read_text().splitlines()]


#: A run of a second: sixteen iterations, no compiler.
TINY = (
    *("kl=none", "env.num_envs=2", "collector.steps=64", "learner.minibatches=2", "frames=2048"),
    *("learner.epochs=1", "eval.final=3", "checkpoint.every=1", "learner.compile=false"),
)


@pytest.mark.slow
def test_a_cell_runs_and_a_stopped_one_begins_anew(tmp_path) -> None:
    cell = Cell("inverted_pendulum", "tiny", 0, ("loss=klpen_held", *TINY))
    (whole,) = run(cell, tmp_path / "a.jsonl")
    assert whole["curve"]["frames"] == list(range(128, 2049, 128))
    assert 0 <= whole["band"] <= 1
    (cell.folder / "manifest.json").write_text("a stopped run's")
    (again,) = run(cell, tmp_path / "b.jsonl")
    same = ("identity", "return", "se", "training", "band", "kl_old")
    assert {key: again[key] for key in same} == {key: whole[key] for key in same}


@pytest.mark.slow
def test_a_diverged_run_counts_as_it_was_at_its_last_checkpoint(tmp_path) -> None:
    cell = Cell("inverted_pendulum", "infinite", 0, ("loss=clip", "optim.lr=1e30", *TINY))
    (found,) = run(cell, tmp_path / "a.jsonl")
    assert found["failed"].startswith("NonFiniteError")
    assert 0 < found["return"] < 1000
    assert found["se"] > 0


@pytest.mark.integration
@pytest.mark.parametrize(
    "task", marked("slow", NAMES.keys() - {"half_cheetah", "hopper"}, "ant", "swimmer")
)
def test_a_preset_trains_and_is_evaluated(task: str) -> None:
    words = ("collector.steps=8", "learner.minibatches=2", "learner.epochs=1", "frames=64")
    evals = ("eval.evaluations=1", "eval.final=2", "learner.compile=false", "logger=none")
    assert exits(f"env={task}", *words, *evals, "hydra.run.dir=run") == 0
    (row,) = read_rows(Path("run/metrics.jsonl"))
    assert np.isfinite([row["reward/raw"], row["eval/return"], row["kl/old/exact"]]).all()
