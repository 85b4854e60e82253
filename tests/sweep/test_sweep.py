"""Sweeps: their folders, what a second start does, how they fail and stop."""

import json
import os
import shutil
import signal
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from klrl.config.compose import job_config
from klrl.config.given import Given, quoted
from klrl.config.identity import NUMERICS, settings_hash
from klrl.config.overrides import expand, job_name, parse, parse_args
from klrl.runs.folder import RunFolder
from klrl.runs.owner import owning
from klrl.runs.resume import stored_config
from klrl.runs.rows import read_rows
from klrl.sweep.jobs import make_jobs
from klrl.sweep.run import command_of
from klrl.sweep.sweep_file import JobEntry, SweepFile
from klrl.sweep.worker import run_job
from klrl.train.loop import Training
from tests.conftest import QUICK
from tests.runs.commands import child, live_elsewhere, rows_of, timeless
from tests.sweep.commands import changed, jobs_of, sweep, told, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_the_command_of_sweep_json_is_the_one_that_was_given(tmp_path) -> None:
    given = parse_args(["-m", "--config-dir", str(tmp_path), "seed=0,1", "kl.coef=0.1"])
    again = parse_args(command_of(given))
    assert again.config_dir == str(tmp_path)
    assert (again.multirun, again.overrides) == (True, ["seed=0,1", "kl.coef=0.1"])


def test_the_command_of_each_job_has_the_sweeps_config_dir(tmp_path) -> None:
    mine = tmp_path / "own" / "optim" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("defaults: [adam@_here_, _self_]\nlr: 1e-3\n")
    flags = ["--config-dir", str(tmp_path / "own")]
    assert sweep(*flags, "seed=0,1", "optim=mine") == 0
    manifest = RunFolder(Path("outputs/a/seed=1")).manifest
    assert manifest["argv"][:5] == ["python", "-m", "klrl", *flags]
    again = parse_args(manifest["argv"][3:])
    config = job_config(again.overrides, again.config_dir)
    assert settings_hash(config) == manifest["config_hash"]


def test_jobs_are_those_of_hydras_own_sweeper() -> None:
    words = ["kl=legacy,retrieve", "kl.coef=0.1,1", "seed=range(0,3)", "frames=128"]
    parsed = OverridesParser.create().parse_overrides(words)
    assert expand(parse(words)) == BasicSweeper.split_arguments(parsed, None)[0]
    assert len(expand(parse(words))) == 12


@pytest.mark.parametrize(
    ("words", "swept", "name"),
    [
        (["kl=legacy", "kl.coef=0.1", "seed=1"], ["kl", "kl.coef", "seed"], None),
        (["frames=10", "seed=1"], ["seed"], "seed=1"),
        (["frames=10"], [], "job"),
        (["++env.kwargs.g=9"], ["env.kwargs.g"], "env.kwargs.g=9"),
        (["actor.init='outputs/a b'"], ["actor.init"], "actor.init=_outputs_a_b_"),
    ],
)
def test_a_jobs_folder_says_what_was_swept(words, swept, name) -> None:
    assert job_name(parse(words), swept) == (name or "kl=legacy,kl.coef=0.1,seed=1")


def test_a_name_too_long_for_a_file_system_keeps_its_difference() -> None:
    names = {job_name([Given(f"seed={'9' * 300}{end}")], ["seed"]) for end in "12"}
    assert len(names) == 2
    assert all(len(name) <= 200 for name in names)


def test_paths_of_job_folders_need_no_quotes() -> None:
    Path("outputs/base/kl=legacy,seed=0").mkdir(parents=True)
    here = "outputs/base/kl=legacy,seed="
    assert quoted(f"actor.init={here}0") == f"actor.init='{here}0'"
    assert quoted(f"actor.init={here}${{seed}}") == f"actor.init='{here}${{seed}}'"
    Path("run (copy)").mkdir()
    assert quoted("actor.init=run (copy)") == "actor.init='run (copy)'"
    for name in ("josé", "日本/run", "a{b}", "a]", "a)", "R&D", "run#2", "a~b"):
        Path(name).mkdir(parents=True)
        assert Given(quoted(f"actor.init={name}")).parsed.value() == name
    Path("jim's run").mkdir()
    assert Given(quoted("actor.init=jim's run")).parsed.value() == "jim's run"
    untouched = ["kl=legacy,retrieve", "actor.hidden=[8,8]", f"actor.init={here}7", "seed=0"]
    assert list(map(quoted, untouched)) == untouched


def test_a_job_in_a_renamed_folder_is_listed_once(tmp_path: Path) -> None:
    """The other entry would be a finished job without a run folder, in ls and in the report."""
    job, other = JobEntry("seed=1", [], "ab12", 5), JobEntry("a", [], "cd34", 5)
    SweepFile(tmp_path).write("first", [job, other])
    SweepFile.read(tmp_path).write("again", [replace(job, name="best")])
    assert [each.name for each in SweepFile.read(tmp_path).entries] == ["best", "a"]


def test_a_finished_jobs_networks_are_gone_when_the_next_one_begins(monkeypatch) -> None:
    """Jobs of one process: models of a gigabyte each would not fit beside each other."""
    networks: list[weakref.ref] = []
    left: list[int] = []
    make = Training.__init__

    def watched(self, *args, **kwargs) -> None:
        left.append(sum(each() is not None for each in networks))
        make(self, *args, **kwargs)
        networks.append(weakref.ref(self.parts.actor))

    monkeypatch.setattr(Training, "__init__", watched)
    assert sweep("seed=0,1,2") == 0
    assert left == [0, 0, 0]


def test_a_killed_sweep_started_again_runs_exactly_the_unfinished_jobs(capfd) -> None:
    swept = ("kl.coef=0,0.1,1", "seed=0,1,2,3", "frames=256")
    names = [f"kl.coef={c},seed={s}" for c in ("0", "0.1", "1") for s in range(4)]
    process = child("-m", "sweep=a", *QUICK, *swept, "checkpoint.every=1", COLUMNS="200")
    sixth = RunFolder(Path("outputs/a") / names[5])
    wait_for(lambda: sixth.metrics.exists() and len(sixth.metrics.read_bytes().splitlines()) >= 2)
    process.kill()
    process.communicate()
    before = jobs_of()
    assert sorted(before) == sorted(names[:6])
    written = {
        name: (run.path / "manifest.json").stat().st_mtime_ns for name, run in before.items()
    }
    assert sixth.status == "interrupted"

    assert sweep(*swept, "checkpoint.every=1") == 0
    out = capfd.readouterr().out
    assert "12 jobs, 5 finished before, 1 to resume, 6 to start" in out
    after = jobs_of()
    assert sorted(after) == sorted(names)
    for name in names[:5]:
        assert changed(after[name]) == written[name], name
    assert len(sixth.manifest["resumed"]) == 1
    assert all(run.manifest["resumed"] == [] for name, run in after.items() if name != names[5])
    assert [row["frames"] for row in read_rows(sixth.metrics)] == [64, 128, 192, 256]
    assert set(told().values()) == {"finished"}
    assert f"[1/7] {names[5]}" in out

    assert sweep(*swept, "checkpoint.every=1") == 0
    assert "12 jobs, 12 finished before" in capfd.readouterr().out


def test_an_identity_is_found_under_another_name(capfd) -> None:
    assert sweep("kl=legacy", "seed=0,1") == 0
    assert sorted(jobs_of()) == ["seed=0", "seed=1"]
    capfd.readouterr()
    assert sweep("seed=0,1", "kl=legacy,retrieve") == 0
    assert "4 jobs, 2 finished before, 2 to start" in capfd.readouterr().out
    expected = ["seed=0", "seed=0,kl=retrieve", "seed=1", "seed=1,kl=retrieve"]
    assert sorted(jobs_of()) == expected


@pytest.mark.parametrize("change", ["kl.coef=0.7", "frames=192"])
def test_other_settings_under_the_same_name_are_another_job(capfd, change: str) -> None:
    assert sweep("seed=0,1") == 0
    before = {name: changed(run) for name, run in jobs_of().items()}
    capfd.readouterr()
    for expected in ("2 to start", "2 finished before"):
        assert sweep("seed=0,1", change) == 0
        told_now = capfd.readouterr().out
        assert f"2 jobs, {expected}" in told_now
        line = "outputs/a/seed=0 has a job with other settings; this job goes into seed=0-"
        assert (line in told_now) == (expected == "2 to start")
    after = jobs_of()
    new = {name.partition("-")[0]: run for name, run in after.items() if name not in before}
    assert sorted(new) == sorted(before)
    assert len(after) == 4
    assert {name: changed(after[name]) for name in before} == before
    assert stored_config(Path("outputs/a/seed=0")).frames == 128
    if change == "frames=192":
        assert new["seed=0"].manifest["frames"] == 192
        assert len(read_rows(new["seed=0"].metrics)) == 3, "nothing was resumed"


def test_sweep_json_keeps_every_job_and_every_command() -> None:
    """Those that never began too, and their names: a queue may still begin them."""
    assert sweep("seed=0,1") == 0
    first = json.loads(Path("outputs/a/sweep.json").read_text())
    left = {**first["jobs"][1], "identity": "0" * 12, "name": "seed=2"}
    left |= {"status": "waiting", "queue": "7_1", "overrides": ["seed=2"]}
    first["jobs"].append(left)
    Path("outputs/a/sweep.json").write_text(json.dumps(first))
    assert sweep("seed=1,2") == 0
    kept = json.loads(Path("outputs/a/sweep.json").read_text())
    jobs = {job["name"]: job for job in kept["jobs"]}
    (own,) = jobs.keys() - {"seed=0", "seed=1", "seed=2"}
    assert own == f"seed=2-{jobs[own]['identity']}"
    assert jobs["seed=2"] == left
    assert jobs["seed=0"] == first["jobs"][0]
    assert jobs["seed=1"]["status"] == jobs[own]["status"] == "finished"
    assert [command.split()[-1] for command in kept["commands"]] == ["seed=0,1", "seed=1,2"]
    for run in jobs_of().values():
        assert jobs[run.path.name]["numerics"] == run.manifest["numerics"]


def test_a_folder_that_another_job_took_meanwhile_is_left_alone(settings) -> None:
    job = make_jobs(Path("outputs/a"), [("job", ["seed=2"], settings("seed=2"))])[0]
    run = RunFolder(job.folder)
    run.open(settings("seed=1"))
    before = (job.folder / "manifest.json").read_bytes()
    assert run_job(job).status == "refused"
    assert (job.folder / "manifest.json").read_bytes() == before


def test_a_job_that_was_finished_meanwhile_is_not_run_again() -> None:
    assert sweep("seed=0") == 0
    run = RunFolder(Path("outputs/a/job"))
    before = changed(run)
    config = stored_config(run.path)
    (job,) = make_jobs(Path("outputs/a"), [("job", [], config)])
    assert run_job(job).status == "finished"
    assert changed(run) == before


def test_a_release_orphans_no_sweep_but_other_numerics_do(capsys) -> None:
    assert sweep("seed=0") == 0
    manifest = Path("outputs/a/job/manifest.json")
    told = json.loads(manifest.read_text()) | {"klrl": "0.0.9"}
    manifest.write_text(json.dumps(told))
    assert sweep("seed=0") == 0
    assert "1 job, 1 finished before" in capsys.readouterr().out
    manifest.write_text(json.dumps(told | {"numerics": 77}))
    assert sweep("seed=0") == 2
    said = capsys.readouterr().err
    assert "has this job as run by klrl 0.0.9; this version computes different numbers" in said
    assert f"(numerics 77, now {NUMERICS})" in said


def test_a_job_that_runs_elsewhere_is_left_alone(capfd) -> None:
    assert sweep("seed=0,1") == 0
    live_elsewhere(Path("outputs/a/seed=1"))
    manifest = Path("outputs/a/seed=1/manifest.json")
    text = manifest.read_text()
    assert sweep("seed=0,1") == 1
    said = capfd.readouterr().out
    assert "1 running in another process" in said
    assert "seed=1: kill 7 on elsewhere ends it" in said
    assert manifest.read_text() == text


def test_a_job_begun_without_a_checkpoint_starts_again_and_keeps_the_users_files() -> None:
    assert sweep("seed=0") == 0
    run = RunFolder(Path("outputs/a/job"))
    expected = timeless(rows_of(run.path))
    shutil.rmtree(run.checkpoints)
    run.metrics.write_text('{"iteration": 0, "frames": 0}\n')  # evaluated, then killed
    run.close("interrupted")
    (run.path / "tensorboard").mkdir()
    for name in (names := ("notes.txt", "tensorboard/mine.txt")):
        (run.path / name).write_text("mine")
    assert sweep("seed=0") == 0
    assert timeless(rows_of(run.path)) == expected
    assert run.manifest["resumed"] == []
    assert [(run.path / name).read_text() for name in names] == ["mine"] * 2


def test_a_job_whose_checkpoints_are_on_a_disk_that_is_not_mounted_is_refused(capsys) -> None:
    assert sweep("seed=0,1") == 0
    run, disk = RunFolder(Path("outputs/a/seed=0")), Path("disk/here")
    disk.parent.mkdir()
    run.checkpoints.rename(disk)
    run.checkpoints.symlink_to(disk.resolve())
    run.close("interrupted")
    (run.path / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    for unmounted in ("gone", "empty"):
        disk.rename("disk/elsewhere")
        if unmounted == "empty":
            disk.mkdir()
        capsys.readouterr()
        assert sweep("seed=0,1,2") == 1
        assert told() == {"seed=0": "refused", "seed=1": "finished", "seed=2": "finished"}
        (line,) = capsys.readouterr().err.splitlines()[:1]
        assert "seed=0: no checkpoint found in checkpoints" in line
        assert (f"(a link to {disk.resolve()}, which does not exist)" in line) == (
            unmounted == "gone"
        )
        assert {path: path.read_bytes() for path in before} == before
        if unmounted == "empty":
            disk.rmdir()
        Path("disk/elsewhere").rename(disk)
    assert sweep("seed=0,1,2") == 0
    assert run.manifest["resumed"] != []


def test_two_processes_never_run_one_sweep(capsys) -> None:
    Path("outputs/a").mkdir(parents=True)
    with owning(Path("outputs/a"), "sweep=a"):
        assert sweep("seed=0,1") == 2
    assert f"sweep=a: process {os.getpid()} (on " in capsys.readouterr().err
    assert sweep("seed=0,1") == 0


def test_a_failed_job_is_told_at_once_in_the_table_and_in_its_manifest(capfd) -> None:
    words = ("optim.lr=1e30,1e-3", "loss.normalize_advantage=false")
    assert sweep(*words) == 1
    caught = capfd.readouterr()
    assert "klrl: failed: NonFiniteError" in caught.err
    table = [line for line in caught.out.splitlines() if line.startswith("  optim.lr=1e+30")]
    assert "failed" in table[-1]
    assert "NonFiniteError" in table[-1]
    assert told() == {"optim.lr=1e+30": "failed", "optim.lr=0.001": "finished"}
    assert jobs_of()["optim.lr=1e+30"].manifest["error"].startswith("NonFiniteError")
    assert sweep(*words) == 1
    assert "2 jobs, 1 finished before, 1 to resume" in capfd.readouterr().out


def test_the_table_has_the_kl_of_the_policy_whose_return_it_has(capfd) -> None:
    assert sweep("seed=0", "eval.every=null", "eval.final=2") == 0
    row = read_rows(Path("outputs/a/job/metrics.jsonl"))[-1]
    assert row["eval/kl_ref"] != row["kl/ref/exact"], "the rollout before the last update"
    head, line = [each.split() for each in capfd.readouterr().out.splitlines()[-3:-1]]
    assert head[-3:] == ["return", "KL", "ref"]
    assert [float(each) for each in line[-2:]] == [
        pytest.approx(row[name], rel=1e-3) for name in ("eval/return", "eval/kl_ref")
    ]


def test_an_unexpected_error_of_one_job_stops_no_other(capfd, monkeypatch) -> None:
    import klrl.train.loop

    real = klrl.train.loop.start

    def broken(config, *args, **kwargs):
        if config.seed == 0:
            raise KeyError("of a library")
        return real(config, *args, **kwargs)

    monkeypatch.setattr(klrl.train.loop, "start", broken)
    assert sweep("seed=0,1") == 1
    caught = capfd.readouterr()
    assert "Traceback" in caught.err, "whoever mends it needs all of it"
    assert told() == {"seed=0": "failed", "seed=1": "finished"}


@pytest.mark.parametrize(
    ("launcher", "signum"),
    [
        ("local", signal.SIGTERM),
        pytest.param("joblib", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_sweep_keeps_what_it_has_and_goes_on_later(capfd, launcher, signum) -> None:
    words = ("seed=0,1,2,3", "frames=20000", f"launcher={launcher}")
    process = child("-m", "sweep=a", *QUICK, *words, COLUMNS="200")
    at_once = 2 if launcher == "joblib" else 1
    wait_for(lambda: sum(run.metrics.exists() for run in jobs_of().values()) >= at_once)
    process.send_signal(signum)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, said
    assert "Traceback" not in said
    stopped = jobs_of()
    assert {run.status for run in stopped.values()} <= {"interrupted", "finished"}, said
    assert len(stopped) < 4
    assert "waiting" in told().values()
    assert not Path("outputs/a/.stop").exists()
    for run in stopped.values():
        frames = run.manifest["frames"]
        assert frames == read_rows(run.metrics)[-1]["frames"], "the checkpoint was written"
