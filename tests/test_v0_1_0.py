"""Run folders and sweeps of klrl 0.1.0 are read, resumed and restarted: ``fixtures/v0_1_0``.

The numbers are those of 0.1.0 itself. A version that changes results on purpose drops them.
"""

from __future__ import annotations

import csv
import json
import runpy
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import klrl.config
from klrl.base.seeds import derived_seed
from klrl.runs.resume import stored_config
from klrl.runs.rows import read_rows
from klrl.train.evaluate import Starts

pytestmark = pytest.mark.integration

FIXTURES = Path(__file__).parent / "fixtures" / "v0_1_0"
CHOICES: dict[str, dict[str, Any]] = yaml.safe_load((FIXTURES / "choices.yaml").read_text())
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text())
SWEEP = Path("outputs/sweep")

#: Where 0.1.0 stored the name of a choice.
NAMES = ("name", "kind", "mode", "task", "distribution")
CLASSES = {
    **dict.fromkeys(
        [f"env={name}" for name in ("acrobot", "cartpole", "gym", "half_cheetah", "hopper")],
        "EnvConfig",
    ),
    "env=pendulum": "EnvConfig",
    "env=sort_digits": "SortDigitsConfig",
    "env=text": "TextConfig",
    "actor=categorical": "ActorConfig",
    "actor=causal_lm": "CausalLMConfig",
    "actor=mlp": "GaussianActorConfig",
    "actor=normal": "GaussianActorConfig",
    "actor=tanh_normal": "GaussianActorConfig",
    "reference=adapter_off": "ReferenceConfig",
    "reference=checkpoint": "CheckpointReferenceConfig",
    "reference=ema": "EMAReferenceConfig",
    "reference=initial": "ReferenceConfig",
    "reference=periodic": "PeriodicReferenceConfig",
    "kl=legacy": "LegacyKLConfig",
    "kl=none": "KLConfig",
    "kl=retrieve": "RetrieveKLConfig",
    "controller=adaptive": "AdaptiveControllerConfig",
    "controller=dual": "DualControllerConfig",
    "controller=fixed": "ControllerConfig",
    "controller=schedule": "ScheduleControllerConfig",
    "advantage=gae": "AdvantageConfig",
    "advantage=group": "GroupConfig",
    "loss=clip": "ClipConfig",
    "loss=klpen": "KLPENConfig",
    "loss=klpen_held": "KLPENConfig",
    "learner=ppo": "LearnerConfig",
    "optim=adam": "OptimConfig",
    "optim=adamw": "AdamWConfig",
    "collector=ray": "RayCollectorConfig",
    "collector=sampler": "SamplerConfig",
    "collector=torchrl": "CollectorConfig",
    "collector=vector": "CollectorConfig",
    "logger=none": "LoggerConfig",
    "logger=wandb": "WandbConfig",
}


@pytest.fixture(autouse=True)
def _copies(_own_folder) -> None:
    """Copies of all of them in the test's own folder, which is the working directory."""
    shutil.copytree(FIXTURES, ".", dirs_exist_ok=True)
    shutil.move("sweep", SWEEP)


@pytest.fixture
def call(monkeypatch, capfd) -> Callable[..., str]:
    """``python -m MODULE WORDS`` in this process; what it printed, or the error that ended it."""

    def run(module: str, *words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["python", *words])
        capfd.readouterr()
        ended = 0
        with warnings.catch_warnings():
            # runpy says so of a module that another test imported; none of them keeps state.
            warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as stop:
                ended = int(stop.code or 0)
        said = capfd.readouterr()
        assert ended == code, said.err
        assert code or not said.err
        return said.err if code else said.out

    return run


def manifest(run: str | Path) -> dict[str, Any]:
    return json.loads(Path(run, "manifest.json").read_text(encoding="utf-8"))


def lines(run: str | Path) -> list[str]:
    return Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()


def name_of(group: Any) -> str:
    return next(str(getattr(group, key)) for key in NAMES if hasattr(group, key))


def assert_last_row(run: str | Path, expected: dict[str, float]) -> None:
    # Its evaluations had other start states: see test_a_run_is_evaluated.
    expected = {key: v for key, v in expected.items() if not key.startswith("eval/")}
    row = {
        key: v for key, v in read_rows(Path(run, "metrics.jsonl"))[-1].items() if key in expected
    }
    # Another processor adds in another order, and the last of ten updates shows it.
    assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)


# ------------------------------------------------------------------------------------- settings


def test_every_choice_of_0_1_0_is_asked_for() -> None:
    assert set(CLASSES) == set(CHOICES)


@pytest.mark.parametrize("word", CLASSES)
def test_a_stored_choice_comes_back_as_itself(word) -> None:
    group, _, choice = word.partition("=")
    stored = CHOICES[word]["stored"]
    run = Path("language/run" if CHOICES[word]["domain"] == "language" else "run")
    path = run / ".hydra" / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    # Of the two runs, adapter_off alone needs another group, the actor's adapters.
    settings |= {"reference": {"kind": "initial"}, group: stored}
    path.write_text(yaml.safe_dump(settings))
    read = getattr(stored_config(run), group)
    assert type(read) is getattr(klrl.config, CLASSES[word])
    if set(NAMES) & set(stored) and word != "actor=mlp":
        assert name_of(read) == choice
    for key, value in stored.items():
        if isinstance(value, dict):
            assert {k: getattr(getattr(read, key), k, None) for k in value} == value
        elif key not in NAMES:
            assert str(getattr(read, key)).lower() == str(value).lower(), key


def test_the_settings_of_a_stored_run_come_back() -> None:
    config = stored_config(Path("run"))
    assert type(config) is klrl.config.Config
    assert (name_of(config.loss), config.loss.target_kl) == ("clip", 0.05)
    assert (name_of(config.reference), config.reference.decay) == ("ema", 0.9)
    assert (name_of(config.controller), config.controller.target) == ("adaptive", 0.1)
    assert (name_of(config.kl), config.kl.coef) == ("retrieve", 0.2)
    assert (config.env.id, config.frames, config.actor.hidden) == ("Pendulum-v1", 384, [4, 4])


def test_a_loss_whose_fields_another_choice_has_too_keeps_its_name() -> None:
    config = stored_config(Path("klpen_held"))
    assert type(config.loss) is klrl.config.KLPENConfig
    assert name_of(config.loss) == "klpen_held"
    assert (config.loss.beta_rule, config.loss.line_search) == ("proportional", "both")
    assert name_of(config.actor) == "tanh_normal"
    assert (name_of(config.kl), config.kl.coef) == ("legacy", 0.3)


def test_the_settings_of_a_stored_language_run_come_back() -> None:
    config = stored_config(Path("language/run"))
    assert type(config) is klrl.config.LanguageConfig
    assert (config.env.name, config.env.longest, config.env.reward) == ("sort_digits", 2, "proxy")
    assert (config.actor.model, config.actor.lora.r) == ("language/model", 2)
    assert name_of(config.reference) == "adapter_off"
    assert type(config.advantage) is klrl.config.GroupConfig


def test_the_jobs_of_a_stored_sweep_come_back() -> None:
    jobs = {path.parent.name: stored_config(path.parent) for path in SWEEP.glob("*/manifest.json")}
    told = {name: f"seed={c.seed},loss={name_of(c.loss)}" for name, c in jobs.items()}
    assert len(told) == 4
    assert all(name == said for name, said in told.items())


# ---------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("run", EXPECTED["evaluated"])
def test_a_run_is_evaluated(run, call, monkeypatch) -> None:
    """From the start states and prompts that 0.1.0 had, which were others."""

    def seeds(starts: Starts, count: int) -> list[int]:
        first = derived_seed(starts.seed, "evaluate")
        return list(range(first, first + count))

    monkeypatch.setattr(Starts, "seeds", seeds)
    monkeypatch.setattr("klrl.language.evaluate.places", lambda starts, count, *_: range(count))
    how = ["--episodes", "32", "--sampled"] if run == "language/run" else ["--episodes", "4"]
    told = json.loads(call("klrl.evaluate", run, *how, "--json"))
    expected = EXPECTED["evaluated"][run]
    assert {name: told[name] for name in expected} == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("run", "frames"), [("run", 512), ("klpen_held", 512), ("language/run", 128)]
)
def test_a_run_is_resumed(run, frames, call) -> None:
    before = lines(run)
    call("klrl", f"resume={run}", f"frames={frames}")
    after = lines(run)
    assert after[:6] == before
    assert [json.loads(line)["iteration"] for line in after] == list(range(1, 9))
    assert_last_row(run, EXPECTED["resumed"][run])
    told = manifest(run)
    assert (told["status"], len(told["resumed"])) == ("finished", 1)
    assert stored_config(Path(run)).frames == frames


def test_a_resumed_run_is_resumed_again(call) -> None:
    """Its settings are stored anew by the version that resumed it."""
    told = call("klrl", "resume=klpen_held", "frames=448")
    assert "frames; numerics 1 until then, 2 from there on\n" in told
    call("klrl", "resume=klpen_held", "frames=512")
    assert [json.loads(line)["iteration"] for line in lines("klpen_held")] == list(range(1, 9))
    assert name_of(stored_config(Path("klpen_held")).loss) == "klpen_held"
    told = manifest("klpen_held")
    assert (len(told["resumed"]), told["numerics"]) == (2, 1), "its first rows are of 0.1.0"


def test_a_run_is_the_reference_and_the_start_of_a_new_one(call) -> None:
    call(
        "klrl",
        *("env=pendulum", "env.normalize_observation=true", "env.num_envs=2", "actor.hidden=[4,4]"),
        *("collector.steps=32", "learner.minibatches=2", "learner.epochs=1", "frames=128"),
        *("eval.every=0", "logger=none", "learner.compile=false", "hydra.run.dir=near"),
        *("reference=checkpoint", "reference.path=run", "actor.init=run"),
    )
    first, second = read_rows(Path("near/metrics.jsonl"))
    assert first["kl/ref/exact"] == pytest.approx(0, abs=1e-9)
    assert second["kl/ref/exact"] > 1e-6


def test_two_runs_are_compared(call) -> None:
    told = call("klrl.diff", "run", "klpen_held")
    assert "loss.target_kl" in told
    assert "0.1.0" in told or "klrl" not in told


@pytest.mark.slow
def test_runs_and_a_sweep_are_reported(call) -> None:
    told = call("klrl.report", "run", "klpen_held", "language", "outputs", "-o", "report")
    assert "6 runs" in told
    assert "1 interrupted, 2 waiting" in told
    with Path("report/summary.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    tasks = [row["task"] for row in rows]
    assert sorted(tasks) == ["CartPole-v1"] * 2 + ["Pendulum-v1"] * 2 + ["sort_digits"]
    returns = [float(row["eval_return"]) for row in rows if row["task"] == "Pendulum-v1"]
    last = [read_rows(Path(r, "metrics.jsonl"))[-1]["eval/return"] for r in ("run", "klpen_held")]
    assert sorted(returns) == pytest.approx(sorted(last))
    assert sorted(int(row["seeds"]) for row in rows if row["task"] == "CartPole-v1") == [1, 2]
    assert "Pendulum-v1" in Path("report/report.html").read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------- sweeps


def _sweep_words() -> list[str]:
    words = shlex.split(json.loads((SWEEP / "sweep.json").read_text())["command"])
    assert words[:3] == ["python", "-m", "klrl"]
    return words[3:]


def test_a_sweep_is_not_mixed_with_other_numbers(call) -> None:
    """0.1.0 is numerics 1; its jobs stay as they are, and the remedy is said."""
    before = {path: path.read_bytes() for path in SWEEP.rglob("*") if path.is_file()}
    told = call("klrl", *_sweep_words(), code=2)
    assert "as klrl 0.1.0 ran it, and this version computes other numbers" in told
    assert "(numerics 1, now 2); give another sweep=NAME" in told
    assert {path: path.read_bytes() for path in SWEEP.rglob("*") if path.is_file()} == before


def test_a_sweep_is_restarted_where_the_numbers_are_the_same(call, monkeypatch) -> None:
    """What 0.1.0 stored is understood: with its numerics the sweep goes on where it stopped."""
    monkeypatch.setattr("klrl.config.identity.NUMERICS", 1)
    jobs = json.loads((SWEEP / "sweep.json").read_text(encoding="utf-8"))["jobs"]
    finished = [job["name"] for job in jobs if job["status"] == "finished"]
    written = {name: (SWEEP / name / "manifest.json").read_bytes() for name in finished}
    told = call("klrl", *_sweep_words())
    assert "6 jobs, 3 finished before, 1 to resume, 2 to start" in told
    ran = [line.split()[1] for line in told.splitlines() if line.startswith("[")]
    assert ran == ["seed=1,loss=clip", "seed=2,loss=klpen", "seed=2,loss=clip"]
    assert [name for name in finished if name in ran] == []
    for name, content in written.items():
        assert (SWEEP / name / "manifest.json").read_bytes() == content
        assert not (SWEEP / name / "checkpoints").exists()
    assert len(manifest(SWEEP / ran[0])["resumed"]) == 1
    for name in ran:
        frames = [row["frames"] for row in read_rows(SWEEP / name / "metrics.jsonl")]
        assert frames == list(range(64, 641, 64))
        assert_last_row(SWEEP / name, EXPECTED["sweep"][name])
    jobs = json.loads((SWEEP / "sweep.json").read_text(encoding="utf-8"))["jobs"]
    assert [job["status"] for job in jobs] == ["finished"] * 6
    again = call("klrl", *_sweep_words())
    assert "6 jobs, 6 finished before" in again


def test_a_changed_setting_is_another_job_than_the_stored_one(call) -> None:
    words = _sweep_words()
    words[words.index("optim.lr=0.01")] = "optim.lr=0.02"
    before = {path: path.read_bytes() for path in SWEEP.glob("*/manifest.json")}
    told = call("klrl", *words)
    assert "holds a job with optim.lr=0.01 (not 0.02); this one is another, in seed=0,loss=" in told
    assert {path: path.read_bytes() for path in before} == before
