"""Whole runs: what they record, how they end, how they go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

import klrl
from klrl.__main__ import main
from klrl.base.errors import Interrupted, NonFiniteError
from klrl.cli.evaluate import main as evaluate_main
from klrl.control.evaluate import evaluate_policy
from klrl.domains import CONTROL
from klrl.runs.curves import draw_curves
from klrl.runs.loggers import read_rows, wandb_mode
from klrl.runs.metrics import METRICS, TIMES, metrics_of
from klrl.runs.resume import stored_config
from klrl.train.loop import Training
from tests.conftest import QUICK
from tests.runs.test_checkpoint import DAMAGES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def rows_of(folder: Path) -> list[dict]:
    return read_rows(folder / "metrics.jsonl")


def timeless(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


def only_run() -> Path:
    (folder,) = Path("outputs").iterdir()
    return folder


def exits(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(words)
    return int(stop.value.code or 0)


def child(*words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "klrl", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "WANDB_MODE": "offline"},
    )


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
    from klrl.control.evaluate import Evaluation
    from klrl.runs.folder import RunFolder

    returns = iter([-5.0, -3.0, -4.0])
    monkeypatch.setattr(
        klrl.control.parts, "evaluate_policy", lambda *a, **k: Evaluation([next(returns)])
    )
    Training(settings("frames=192", "eval.every=1")).train(RunFolder(Path("run")))
    told = {}
    for which in ("best", "last"):
        entries = sorted(Path("run/checkpoints", which).iterdir())
        told[which] = [json.loads((e / "manifest.json").read_text()) for e in entries]
    assert [told["best"][0][key] for key in ("frames", "metadata")] == [
        128,
        {"iteration": 2, "best_return": -3.0},
    ]
    assert len(told["best"]) == 1
    assert [entry["frames"] for entry in told["last"]] == [0, 192]


def test_rows_after_the_checkpoint_are_made_again_after_a_kill() -> None:
    """As after kill -9: the manifest says running, rows are there that no checkpoint covers."""
    exits(*QUICK, "frames=256", "hydra.run.dir=run", "checkpoint.every=2")
    rows = rows_of(Path("run"))
    with Path("run/metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**rows[-1], "frames": 320, "iteration": 5, "reward/raw": 99.0}))
        file.write('\n{"frames": 38')
    manifest = manifest_of(Path("run")) | {"status": "running", "pid": 1, "pid_started": "0"}
    Path("run/manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert exits("resume=run", "frames=384") == 0
    after = rows_of(Path("run"))
    assert [row["frames"] for row in after] == [64, 128, 192, 256, 320, 384]
    assert after[:4] == rows
    assert all(row["reward/raw"] < 0 for row in after)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_cost_one_checkpoint_and_no_row(damage, capsys) -> None:
    exits(*QUICK, "frames=192", "hydra.run.dir=run", "checkpoint.every=1")
    before = rows_of(Path("run"))
    newest = max(Path("run/checkpoints/last").iterdir())
    files = [path for path in newest.rglob("*") if "agent" in str(path) and path.is_file()]
    weights = max(files, key=lambda path: (path.suffix != ".json", path.stat().st_size))
    weights.write_bytes(damage(weights.read_bytes()))
    capsys.readouterr()
    evaluate_main(["run", "--episodes", "1"])
    (line,) = capsys.readouterr().err.splitlines()
    assert weights.name in line
    assert "000128 is taken" in line
    assert exits("resume=run", "frames=256") == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [line]
    assert "resumed at 128 frames" in said.out
    assert rows_of(Path("run"))[:2] == before[:2]
    assert [row["frames"] for row in rows_of(Path("run"))] == [64, 128, 192, 256]


def test_with_no_whole_checkpoint_a_run_is_neither_resumed_nor_evaluated(capsys) -> None:
    exits(*QUICK, "checkpoint.every=1", "hydra.run.dir=run")
    for file in Path("run").rglob("*.safetensors"):
        file.write_bytes(b"")
    before, _ = rows_of(Path("run")), capsys.readouterr()
    assert exits("resume=run", "frames=256") == 2
    with pytest.raises(SystemExit, match="2"):
        evaluate_main(["run", "--episodes", "1"])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("no whole checkpoint (frames-000000000128/agent" in line for line in lines)
    assert rows_of(Path("run")) == before


def test_a_live_run_is_not_resumed_twice(capsys) -> None:
    from klrl.runs.folder import process_start

    exits(*QUICK, "hydra.run.dir=run")
    parent = os.getppid()
    live = {"status": "running", "pid": parent, "pid_started": process_start(parent)}
    Path("run/manifest.json").write_text(json.dumps(manifest_of(Path("run")) | live))
    assert exits("resume=run") == 2
    assert f"process {parent} is still running it" in capsys.readouterr().err


def test_what_a_resume_changed_holds_for_the_next_one() -> None:
    exits(*QUICK, "hydra.run.dir=run")
    exits("resume=run", "frames=192", "checkpoint.every=3")
    assert stored_config(Path("run")).frames == 192
    assert exits("resume=run", "frames=256") == 0
    assert stored_config(Path("run")).checkpoint.every == 3
    assert rows_of(Path("run"))[-1]["frames"] == 256


def test_a_broken_run_folder_is_refused_in_a_line(capsys) -> None:
    exits(*QUICK, "hydra.run.dir=run")
    capsys.readouterr()
    Path("run/manifest.json").write_text('{"status": "fin', encoding="utf-8")
    assert exits("resume=run") == 2
    assert "manifest.json is broken" in capsys.readouterr().err
    Path("run/.hydra/config.yaml").unlink()
    Path("run/manifest.json").write_text("{}", encoding="utf-8")
    assert exits("resume=run") == 2
    assert "no .hydra/config.yaml" in capsys.readouterr().err


def test_two_runs_never_share_a_folder(capsys, settings) -> None:
    from klrl.base.errors import ConfigError

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
    from klrl.base.errors import ConfigError

    with pytest.raises(ConfigError, match="Nope"):
        klrl.run(settings("env=gym", "env.id=Nope-v0", "collector.steps=32"))
    with pytest.raises(ConfigError, match="device=cuda:9"):
        klrl.run(settings("device=cuda:9"))
    klrl.run(settings(), folder="run")
    with pytest.raises(ConfigError, match="device=cuda:9"):
        klrl.load_policy("run", device="cuda:9")


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


def test_resume_restores_all_and_appends() -> None:
    exits(*QUICK, "frames=256", "hydra.run.dir=run", "kl.coef=0.3", "seed=5", "checkpoint.every=1")
    before, rows = Training(stored_config(Path("run"))), rows_of(Path("run"))
    assert exits("resume=run", "frames=512") == 0
    after = rows_of(Path("run"))
    assert after[:4] == rows
    assert [row["frames"] for row in after] == list(range(64, 513, 64))
    assert after[4]["kl/old/beta"] in (rows[3]["kl/old/beta"] * f for f in (0.5, 1, 2))
    assert after[4]["kl/ref/exact"] > 1e-6, "the reference is that of the start, not of the resume"
    manifest = manifest_of(Path("run"))
    assert manifest["status"] == "finished"
    assert manifest["frames"] == 512
    assert len(manifest["resumed"]) == 1
    assert before.counters.frames == 0


def test_a_checkpoint_holds_parameters_optimiser_normaliser_reference_and_rng(settings) -> None:
    from klrl.runs.folder import RunFolder

    config = settings("frames=256", "kl.coef=0.3")
    first = Training(config)
    first.train(RunFolder(Path("run")))
    state = torch.random.get_rng_state()
    second = Training(config)
    torch.manual_seed(99)
    second.load(second.checkpoints(RunFolder(Path("run"))))
    for mine, theirs in (
        (first.parts.agent.modules, second.parts.agent.modules),
        (first.parts.reference, second.parts.reference),
    ):
        for name, value in mine.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]), name
    assert first.parts.agent.normalizer.count == second.parts.agent.normalizer.count == 256
    assert second.parts.reference.state_dict() is not first.parts.reference.state_dict()
    moments = [e.parts.learner.optimizer.state_dict()["exp_avg"] for e in (first, second)]
    assert torch.equal(*moments)
    assert float(moments[0].abs().max()) > 0
    assert second.parts.learner.beta_rule.beta == first.parts.learner.beta_rule.beta != 1.0
    assert second.parts.kl.coef == 0.3
    assert vars(second.counters) == vars(first.counters)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("mode", ["legacy", "retrieve"])
def test_another_runs_policy_as_reference_and_resume_without_its_folder(mode: str) -> None:
    import shutil

    exits(*QUICK, "hydra.run.dir=ref", "actor.hidden=[12]", "seed=9")
    words = ("reference=checkpoint", "reference.path=ref", "kl.coef=0.2", f"kl={mode}")
    exits(*QUICK, "hydra.run.dir=run", *words)
    rows = rows_of(Path("run"))
    assert rows[0]["kl/ref/exact"] > 1e-5, "another policy is at a distance from the start"
    policy = klrl.load_policy("ref")
    from klrl.train.loop import Training

    reference = Training(stored_config(Path("run"))).parts.reference
    assert all(
        torch.equal(a, b)
        for a, b in zip(policy.state_dict().values(), reference.state_dict().values(), strict=True)
    )
    shutil.rmtree("ref")
    assert exits("resume=run", "frames=256") == 0
    last = rows_of(Path("run"))[-1]
    assert last["kl/ref/exact"] > 1e-5
    assert last["kl/ref/penalty"] == pytest.approx(0.2 * last["kl/ref/k1"], abs=1e-6), (
        "what is charged and what is measured have one reference"
    )
    from klrl.control.load import describe_policy
    from klrl.runs.folder import RunFolder

    resumed = Training(stored_config(Path("run")), RunFolder(Path("run")).manifest)
    resumed.load(resumed.checkpoints(RunFolder(Path("run"))))
    assert describe_policy(stored_config(Path("run")))["normalize"] is True
    for name, value in policy.state_dict().items():
        assert torch.equal(resumed.parts.reference.state_dict()[name], value), name


def test_a_reference_of_another_kind_is_refused_and_nothing_left(capsys) -> None:
    exits(*QUICK, "hydra.run.dir=ref", "actor=tanh_normal")
    capsys.readouterr()
    words = ("reference=checkpoint", "reference.path=ref")
    assert exits(*QUICK, *words) == 2
    assert "choose actor=tanh_normal" in capsys.readouterr().err
    assert exits(*QUICK, *words, "env=cartpole") == 2
    assert not any(Path("outputs").glob("*"))


@pytest.mark.parametrize(
    ("signum", "code", "logger"),
    [
        (signal.SIGINT, 130, "none"),
        (signal.SIGTERM, 143, "wandb"),
        pytest.param(signal.SIGINT, 130, "wandb", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, "none", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_run_in_good_order_and_it_can_go_on(
    signum: int, code: int, logger: str
) -> None:
    words = [w for w in QUICK if not w.startswith("frames")]
    words += [f"logger={logger}", "learner.compile=false"]
    process = child(*words, "frames=10_000_000", "hydra.run.dir=run", "checkpoint.every=100000")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (
        Path("run/metrics.jsonl").exists() and rows_of(Path("run"))
    ):
        time.sleep(0.1)
    process.send_signal(signum)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == code, told
    assert "Traceback" not in told
    assert manifest_of(Path("run"))["status"] == "interrupted"
    done = rows_of(Path("run"))[-1]["frames"]
    if logger == "wandb":
        assert inspect(Path("run"))["exit"][0]["exit_code"] == code
        return
    assert exits("resume=run", f"frames={int(done) + 64}") == 0
    assert rows_of(Path("run"))[-1]["frames"] == done + 64


def test_a_run_that_diverges_stops_with_the_place_and_keeps_its_checkpoint(settings) -> None:
    from klrl.runs.folder import RunFolder

    experiment = Training(settings("frames=1024", "checkpoint.every=1"))
    charge = experiment.parts.charge_kl

    def poisoned(batch):
        if experiment.counters.iteration == 3:
            batch["next", "reward"][0, 0] = float("inf")
        return charge(batch)

    experiment.parts.charge_kl = poisoned
    with pytest.raises(NonFiniteError):
        experiment.train(RunFolder(Path("run")))
    assert manifest_of(Path("run"))["status"] == "failed"
    assert len(rows_of(Path("run"))) == 3
    good = Training(settings("frames=1024"))
    good.checkpoints(RunFolder(Path("run"))).load_last(torch.device("cpu"))
    assert good.counters.iteration == 3
    assert all(p.isfinite().all() for p in good.parts.agent.modules.parameters())


def test_a_sweep_gives_a_folder_and_a_wandb_run_per_job_in_one_group() -> None:
    code = exits("-m", *QUICK[:-1], "kl=legacy,retrieve", "seed=0,1")
    assert code == 0
    folder = only_run()
    jobs = sorted(p for p in folder.iterdir() if p.is_dir())
    assert [job.name for job in jobs] == [
        f"kl={kl},seed={seed}" for kl in ("legacy", "retrieve") for seed in (0, 1)
    ]
    assert len({manifest_of(job)["wandb_id"] for job in jobs}) == 4
    told = [inspect(job) for job in jobs]
    assert {t["run"][0]["run_group"] for t in told} == {folder.name}
    modes = [(stored_config(j).kl.name, stored_config(j).seed) for j in jobs]
    assert modes == [("legacy", 0), ("legacy", 1), ("retrieve", 0), ("retrieve", 1)]


def inspect(job: Path) -> dict[str, list[dict]]:
    """The records of a run's file by type, as wandb's own reader tells them."""
    (path,) = job.glob("wandb/offline-run-*/run-*.wandb")
    done = subprocess.run(
        [Path(sys.executable).with_name("wandb"), "leet", "inspect", "--json", path],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[dict]] = {}
    for line in filter(None, done.stdout.splitlines()):
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record[record["type"]])
    return found


def test_the_offline_wandb_run_holds_reward_kl_and_beta_against_frames() -> None:
    exits(*QUICK[:-1], "hydra.run.dir=run", "frames=256", "kl.coef=0.25")
    rows, told = rows_of(Path("run")), inspect(Path("run"))
    assert len(told["history"]) == len(rows) == 4
    names = ("frames", "reward/raw", "reward/shaped", "kl/ref/exact", "kl/ref/coef", "kl/old/beta")
    for record, row in zip(told["history"], rows, strict=True):
        assert {name: record["item"][name] for name in names} == {name: row[name] for name in names}
    defined = {m.get("name", m.get("glob_name")): m for m in told["metric"]}
    assert {name: each.get("step_metric") for name, each in defined.items()} == {
        **dict.fromkeys(metrics_of(CONTROL), "frames"),
        "frames": None,
        "*": "frames",
    }
    hidden = [name for name, each in defined.items() if each["options"].get("hidden")]
    assert sorted(hidden) == ["frames", "iteration"]
    assert told["run"][0]["config"]["update"]["kl"]["coef"] == 0.25
    assert told["exit"][0]["exit_code"] == 0


def test_a_failed_run_is_marked_failed_in_wandb(settings) -> None:
    from klrl.runs.folder import RunFolder

    experiment = Training(settings("logger=wandb"))

    def fail(batch):
        raise NonFiniteError("reward of nothing")

    experiment.parts.charge_kl = fail
    with pytest.raises(NonFiniteError):
        experiment.train(RunFolder(Path("run")))
    assert inspect(Path("run"))["exit"][0]["exit_code"] == 1


def test_wandb_is_offline_without_a_key(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled"
    assert wandb_mode("online") == "online"


def test_evaluation_is_gymnasiums_return_of_the_same_policy(settings) -> None:
    """A policy that always answers 1 Nm, played by hand with the same seeds."""
    config = settings()
    experiment = Training(config)
    with torch.no_grad():
        experiment.parts.agent.policy_net.head.weight.zero_()
        experiment.parts.agent.policy_net.head.bias.fill_(1.0)
    result = evaluate_policy(
        experiment.parts.agent, config.env, episodes=3, seed=17, device=torch.device("cpu")
    )
    expected = []
    for copy in range(3):
        env = gymnasium.make("Pendulum-v1")
        env.reset(seed=17 + copy)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(np.array([1.0], np.float32))
            total, over = total + reward, terminated or truncated
        expected.append(total)
    assert sorted(result.returns) == pytest.approx(sorted(expected), rel=1e-4)
    assert result.mean == pytest.approx(np.mean(expected), rel=1e-4)
    assert result.std == pytest.approx(np.std(expected), rel=1e-3)


def test_evaluate_prints_one_json_object(capsys) -> None:
    exits(*QUICK, "hydra.run.dir=run")
    capsys.readouterr()
    evaluate_main(["run", "--episodes", "30", "--json"])
    first = json.loads(capsys.readouterr().out)
    assert set(first) == {"eval/return", "eval/return_std", "episodes"}
    assert first["episodes"] == 30
    evaluate_main(["run", "--episodes", "30", "--json"])
    assert json.loads(capsys.readouterr().out) == first
    for wrong in (["nope"], ["run", "--checkpoint", "best"], ["run", "--device", "tpu"]):
        with pytest.raises(SystemExit) as stop:
            evaluate_main(wrong)
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("klrl evaluate: ")
        assert len(said.splitlines()) == 1


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


def test_interrupted_is_no_exception() -> None:
    assert not issubclass(Interrupted, Exception)
    assert (Interrupted(2).exit_code, Interrupted(15).exit_code) == (130, 143)


def test_a_failing_job_lets_the_sweeps_others_run(capfd) -> None:
    code = exits("-m", *QUICK, "optim.lr=1e30,1e-3", "loss.normalize_advantage=false")
    assert code == 1
    told = capfd.readouterr()
    assert "NonFiniteError" in told.err
    jobs = {p.name: manifest_of(p) for p in only_run().iterdir() if p.is_dir()}
    assert jobs["optim.lr=1e+30"]["status"] == "failed"
    assert "optim.lr" in jobs["optim.lr=1e+30"]["error"]
    assert jobs["optim.lr=0.001"]["status"] == "finished"
    assert "2 jobs: 1 failed, 1 finished" in told.out


def test_a_failing_run_says_so_in_a_line_and_exits_with_1(capfd) -> None:
    assert exits(*QUICK, "optim.lr=1e30", "loss.normalize_advantage=false") == 1
    told = capfd.readouterr()
    assert told.err.startswith("klrl: failed: ")
    assert "Traceback" not in told.err
    assert manifest_of(only_run())["status"] == "failed"
    assert list(only_run().glob("checkpoints/last/*/manifest.json")), "there is one from the start"


def test_sigterm_during_start_up_leaves_nothing() -> None:
    process = child(*QUICK)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not any(Path("outputs").glob("*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=60)
    assert process.returncode in (143, 0), told
    if process.returncode == 143:
        assert "Traceback" not in told
        assert not any(Path("outputs").glob("*")) or "interrupted" in told


def test_a_second_signal_stops_at_once() -> None:
    from klrl.base.interrupt import StopRequest

    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.signum == signal.SIGINT
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            stop.obey()
    assert signal.getsignal(signal.SIGINT) == before


def test_plain_lines_come_in_time_and_a_terminal_gets_one_live_line() -> None:
    import io

    from klrl.runs.progress import Progress, duration

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, live = io.StringIO(), Terminal()
    assert Progress(1, CONTROL).__dict__["_every"] == 10.0
    with Progress(1000, CONTROL, stream=plain, every=0.05) as progress:
        progress.show({"frames": 250, "reward/episode": -3.0, "kl/old/beta": 2.0})
        time.sleep(0.3)
    assert len(plain.getvalue().splitlines()) >= 3
    assert "250/1,000 frames" in plain.getvalue()
    assert "return -3 | beta 2" in plain.getvalue()
    with Progress(1000, CONTROL, stream=live) as progress:
        for frames in (250, 500):
            progress.show({"frames": frames})
    assert live.getvalue().count("\r") == 2
    assert live.getvalue().count("\n") == 1
    assert [duration(x) for x in (73.2, 4000, 0)] == ["1:13", "1:06:40", "0:00"]
