"""Whole runs: what they record, how they end, how they go on."""

from __future__ import annotations

import json
import subprocess
import time
from itertools import accumulate
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

import klrl
from klrl.base.errors import ConfigError
from klrl.cli.evaluate import main as evaluate_main
from klrl.domains import CONTROL
from klrl.runs.curves import draw_curves
from klrl.runs.folder import _git_commit
from klrl.runs.metrics import METRICS
from klrl.runs.resume import stored_config
from klrl.runs.rows import read_rows
from klrl.train.loop import Training
from tests.conftest import QUICK
from tests.runs.commands import exits, manifest_of, only_run, rows_of, timeless

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "words",
    [
        ["kl=legacy", "kl.apply=step", "kl.coef=0.5"],
        ["kl=retrieve", "kl.coef=0.5", "actor=tanh_normal", "loss.entropy_coeff=0.01"],
        ["kl=none", "loss=clip", "optim=adamw"],
        ["kl.coef=0", "actor.share_trunk=true", "loss.kl_old=sampled", "loss.clip_value=0.2"],
    ],
    ids=lambda words: words[0],
)
def test_a_run_leaves_its_record(words, capsys) -> None:
    assert exits(*QUICK, "eval.every=1", "eval.episodes=2", "frames=192", *words) == 0
    folder, told = only_run(), capsys.readouterr().out
    assert str(folder) in told
    manifest, rows = manifest_of(folder), rows_of(folder)
    assert manifest["status"] == "finished"
    assert manifest["versions"]["torch"] == torch.__version__
    assert [row["frames"] for row in rows] == [64, 128, 192]
    for row in rows:
        assert set(row) <= set(METRICS)
        assert all(np.isfinite(list(row.values())))
        expected = row["reward/raw"] - row["kl/ref/penalty"]
        assert row["reward/shaped"] == pytest.approx(expected, abs=1e-6)
    coef = 0.5 if "kl.coef=0.5" in words else 0.0
    assert {row["kl/ref/coef"] for row in rows} == {coef}
    if words[0] != "kl=none":
        assert rows[0]["kl/ref/exact"] < 1e-6, "KL(pi_0||ref) with normalisation on"
        assert rows[2]["kl/ref/exact"] > 1e-6
        assert rows[2]["kl/ref/penalty"] == pytest.approx(coef * rows[2]["kl/ref/k1"], abs=1e-6)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"last", "best"}
    assert not list(folder.rglob("*.pkl"))
    assert stored_config(folder).kl.name == words[0].removeprefix("kl=").split(".")[0] or coef == 0


def test_the_same_seed_gives_the_same_numbers_and_another_others() -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        exits(*QUICK, "eval.every=2", f"seed={seed}", f"hydra.run.dir={name}")
    a, b, c = (timeless(rows_of(Path(name))) for name in "abc")
    assert a == b
    assert all(x["reward/raw"] != y["reward/raw"] for x, y in zip(a, c, strict=True))


def test_the_learning_rate_is_annealed_over_the_run() -> None:
    exits(*QUICK, "frames=256", "optim.lr=0.004", "hydra.run.dir=run")
    rates = [row["learner/lr"] for row in rows_of(Path("run"))]
    assert rates == pytest.approx([0.004, 0.003, 0.002, 0.001])


def test_best_is_the_checkpoint_of_the_best_evaluation(settings, monkeypatch) -> None:
    import klrl.control.parts
    from klrl.domains import CONTROL
    from klrl.runs.folder import RunFolder
    from klrl.train.evaluate import Evaluation

    returns = iter([-5.0, -3.0, -4.0])
    monkeypatch.setattr(
        klrl.control.parts,
        "evaluate_policy",
        lambda *a, **k: Evaluation([next(returns)], CONTROL, "deterministic"),
    )
    words = ("frames=192", "eval.every=1", "eval.final=0")
    Training(settings(*words)).train(RunFolder(Path("run")))
    told = {}
    for which in ("best", "last"):
        entries = sorted(Path("run/checkpoints", which).iterdir())
        told[which] = [json.loads((e / "manifest.json").read_text()) for e in entries]
    about = [each["metadata"] for each in (told["best"][0], *told["last"])]
    assert {each.pop("run") for each in about} == {
        json.loads(Path("run/manifest.json").read_text())["id"]
    }
    marks = [each.pop("rows") for each in about]
    lengths = [{name: mark["bytes"] for name, mark in each.items()} for each in marks]
    ends = accumulate(map(len, Path("run/metrics.jsonl").read_bytes().splitlines(keepends=True)))
    by_row = [{"metrics.jsonl": end, "samples.jsonl": 0} for end in (0, *ends)]
    assert lengths == [
        by_row[each["metadata"]["iteration"]] for each in (told["best"][0], *told["last"])
    ]
    assert [told["best"][0][key] for key in ("frames", "metadata")] == [
        128,
        {"iteration": 2, "best_return": -3.0},
    ]
    assert len(told["best"]) == 1
    assert [entry["frames"] for entry in told["last"]] == [0, 192]


def test_two_runs_never_share_a_folder(capsys, settings) -> None:
    exits(*QUICK, "hydra.run.dir=run")
    assert exits(*QUICK, "hydra.run.dir=run") == 2
    assert "holds a run already" in capsys.readouterr().err
    exits("-m", *QUICK, "hydra.sweep.dir=sweep")
    capsys.readouterr()
    assert exits("-m", *QUICK, "hydra.sweep.dir=sweep", "seed=7") == 2
    assert "holds a run already" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="holds a run already"):
        klrl.run(settings("seed=7"), folder="run")


def test_a_sweep_checks_every_jobs_reference_first(capsys) -> None:
    exits(*QUICK, "hydra.run.dir=ref", "actor=tanh_normal")
    capsys.readouterr()
    words = ("reference=checkpoint", "reference.path=ref")
    assert exits("-m", *QUICK, *words, "actor=tanh_normal,normal") == 2
    assert "choose actor=tanh_normal" in capsys.readouterr().err
    both = (*words, "actor=tanh_normal", "reference.which=last,best")
    assert exits("-m", *QUICK, *both) == 2
    assert "has no checkpoint 'best'" in capsys.readouterr().err
    assert not any(Path("outputs").glob("*"))


def test_errors_from_python_are_the_same(settings) -> None:
    with pytest.raises(ConfigError, match="Nope"):
        klrl.run(settings("env=gym", "env.id=Nope-v0", "collector.steps=32"))
    with pytest.raises(ConfigError, match="device=cuda:9"):
        klrl.run(settings("device=cuda:9"))
    klrl.run(settings(), folder="run")
    with pytest.raises(ConfigError, match="device=cuda:9"):
        klrl.load_policy("run", device="cuda:9")


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_cuda_on_a_machine_without_is_refused(device, settings, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=f"^device={device}: this machine has no CUDA device; "):
        klrl.run(settings(f"device={device}"))


def test_only_the_first_device_is_taken_and_the_driver_is_not_asked(settings, monkeypatch) -> None:
    monkeypatch.delattr("torch.cuda.device_count")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=1 and device=cuda"):
        settings("device=cuda:1")
    assert settings("device=cuda:0").device == "cuda:0"


def test_an_environment_of_a_users_module_trains_and_is_evaluated(monkeypatch, capsys) -> None:
    Path("lab_envs.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import PendulumEnv\n"
        "gymnasium.register('lab/Pole-v0', PendulumEnv, max_episode_steps=20)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    words = ("env=gym", "env.id=lab_envs:lab/Pole-v0")
    assert exits(*QUICK, *words, "hydra.run.dir=run") == 0
    evaluate_main(["run", "--episodes", "2", "--json"])
    gymnasium.registry.pop("lab/Pole-v0")


def test_a_reference_of_another_kind_is_refused_and_nothing_left(capsys) -> None:
    exits(*QUICK, "hydra.run.dir=ref", "actor=tanh_normal")
    capsys.readouterr()
    words = ("reference=checkpoint", "reference.path=ref")
    assert exits(*QUICK, *words) == 2
    assert "choose actor=tanh_normal" in capsys.readouterr().err
    assert exits(*QUICK, *words, "env=cartpole") == 2
    assert not any(Path("outputs").glob("*"))


def test_evaluate_prints_one_json_object(capsys) -> None:
    exits(*QUICK, "hydra.run.dir=run")
    capsys.readouterr()
    evaluate_main(["run", "--episodes", "30", "--json"])
    first = json.loads(capsys.readouterr().out)
    of_return = {"eval/return", "eval/return_std", "eval/return_se"}
    assert set(first) == {*of_return, "eval/episodes", "episodes"}
    assert first["episodes"] == first["eval/episodes"] == 30
    evaluate_main(["run", "--episodes", "30", "--json"])
    assert json.loads(capsys.readouterr().out) == first


def test_from_python_without_hydra(settings) -> None:
    run = klrl.run(settings("kl=legacy"))
    assert run.folder.parent == Path("outputs")
    policy = klrl.load_policy(run)
    from tensordict import TensorDict

    out = policy(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
    assert out["action"].shape == (5, 1)
    assert out["action_log_prob"].shape == (5,)


def test_a_broken_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"frames": 1}\n{"frames": 2}\n{"fra', encoding="utf-8")
    assert read_rows(path) == [{"frames": 1}, {"frames": 2}]


def test_curves_draw_what_rows_hold(tmp_path: Path) -> None:
    rows = [{"frames": 10, "reward/episode": 1.0, "kl/old/exact": 0.0}]
    draw_curves(rows, tmp_path / "c.png", "t", CONTROL)
    assert (tmp_path / "c.png").stat().st_size > 5000


def test_plain_lines_come_in_time_and_a_terminal_gets_one_live_line() -> None:
    import io

    from klrl.runs.progress import Progress, duration

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, live = io.StringIO(), Terminal()
    assert Progress(1, CONTROL).__dict__["_every"] == 10.0
    with Progress(1000, CONTROL, stream=plain, every=0.05) as progress:
        time.sleep(0.3)  # as where the update is compiled
        assert len(plain.getvalue().splitlines()) == 1
        for frames in (125, 250):
            progress.show({"frames": frames, "reward/episode": -3.0, "kl/old/beta": 2.0})
            time.sleep(0.2)
    shown = [line.split(" frames")[0] for line in plain.getvalue().splitlines()]
    assert shown == ["0/1,000", "125/1,000", "250/1,000"]
    assert "return -3 | beta 2" in plain.getvalue()
    with Progress(1000, CONTROL, stream=live) as progress:
        for frames in (250, 500):
            progress.show({"frames": frames})
    assert live.getvalue().count("\r") == 2
    assert live.getvalue().count("\n") == 1
    assert [duration(x) for x in (73.2, 4000, 0)] == ["1:13", "1:06:40", "0:00"]


def test_the_commit_is_told_without_running_what_the_repository_names() -> None:
    """``core.fsmonitor`` of a repository from elsewhere ran by ``git status``."""
    hook = Path("hook.sh").resolve()
    hook.write_text("#!/bin/sh\ntouch ran\n")
    hook.chmod(0o700)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), (*who, "commit", "-qm", "x", "--allow-empty")):
        subprocess.run(["git", *words], check=True)
    subprocess.run(["git", "config", "core.fsmonitor", str(hook)], check=True)
    commit = _git_commit()
    assert commit is not None
    assert len(commit) == 40
    assert not Path("ran").exists()
