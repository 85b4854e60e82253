"""klrl's mission: every environment, both KL modes, each loss; the rows, and wandb's own file."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sort_digits_base import build
from klrl.config.explain import described
from tests.config.test_yaml import installed
from tests.conftest import QUICK
from tests.language.conftest import LENGTHS, QUICK_MODEL
from tests.language.conftest import QUICK as LANGUAGE
from tests.runs.commands import exits, manifest_of, rows_of, timeless, wandb_records

PRESETS = list(described("env"))
#: Of the presets that need more than their name.
WORDS = {
    "gym": ("env.id=MountainCarContinuous-v0",),
    "custom": ("env.target=gymnasium.envs.classic_control:CartPoleEnv",),
    "sort_digits": LANGUAGE,
    "text": (*LANGUAGE, "experiment=text", "env.data=data.jsonl", "env.reward=mine:reward"),
    "instructions": (*LANGUAGE, "env.reward=followed_share"),
}
#: A step's least and largest reward, as the tasks' authors have it.
REWARDS = {"cartpole": (1, 1), "custom": (1, 1), "acrobot": (-1, 0), "pendulum": (-16.2737, 0)}
#: Those that wandb logs too: of each domain, and the task of MuJoCo that others are like.
LOGGED = ("pendulum", "half_cheetah", "sort_digits")
COEF = 0.3
#: The KLs of two policies are alike, also at the states of one iteration and the next.
PLAIN = (*QUICK, "env.normalize_observation=false")


def check(rows: list[dict], loss: str, low: float, high: float) -> None:
    """What the numbers of an iteration and the next mean."""
    for row in rows:
        assert all(map(math.isfinite, row.values()))
        assert low <= row["reward/raw"] <= high
        assert row["kl/ref/coef"] == COEF
        assert row["kl/ref/penalty"] == pytest.approx(COEF * row["kl/ref/k1"], rel=1e-4, abs=1e-7)
        shaped = row["reward/raw"] - row["kl/ref/penalty"]
        assert row["reward/shaped"] == pytest.approx(shaped, rel=1e-6, abs=1e-6)
        assert row["kl/old/exact"] > -1e-6
        assert ("kl/old/beta" in row) is (loss != "clip")
    first, last = rows
    assert abs(first["kl/ref/exact"]) < 1e-5, "a policy starts as its reference"
    assert last["kl/ref/exact"] == pytest.approx(first["kl/old/exact"], rel=0.9, abs=1e-4)
    if loss == "klpen":  # Schulman et al. (2017), with dtarg .01
        kl = first["kl/old/exact"]
        factor = 2 if kl > 0.015 else 0.5 if kl < 0.01 / 1.5 else 1
        assert last["kl/old/beta"] == factor * first["kl/old/beta"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which reads instructions too."""
    folder = tmp_path_factory.mktemp("model")
    build(replace(QUICK_MODEL, context=256), folder)
    return folder


@pytest.mark.integration
@pytest.mark.parametrize("preset", [name for name in PRESETS if installed(name)])
def test_both_kl_modes_record_the_same_kl_beta_and_reward(preset: str, model: Path) -> None:
    """Each loss goes with each mode; one mode of each preset is evaluated, some with wandb."""
    Path("mine.py").write_text(LENGTHS)
    Path("data.jsonl").write_text('{"prompt": "3 1 2"}\n{"prompt": "one two"}\n' * 8)
    known, place = WORDS.get(preset, ()), PRESETS.index(preset)
    language = (f"actor.model={model}",) if LANGUAGE[0] in known else PLAIN
    loss = ("klpen", "klpen_held", "clip")[place % 3]
    found = [[], []]
    for i, kl in enumerate(("legacy", "retrieve")):
        given = (f"kl={kl}", f"kl.coef={COEF}", f"loss={loss}", f"hydra.run.dir={kl}")
        words = (*language, *known, f"env={preset}", *given)
        if evaluated := (place + i) % 2:
            words = (*words, "eval.every=2", "eval.episodes=1", "eval.final=1")
        if logged := evaluated and preset in LOGGED:
            words = (*words, "logger=wandb")
        assert exits(*words) == 0
        assert manifest_of(Path(kl))["status"] == "finished"
        found[evaluated] = rows = rows_of(Path(kl))
        check(rows, loss, *REWARDS.get(preset, (-math.inf, math.inf)))
        if logged:
            told = [each["item"] for each in wandb_records(Path(kl))["history"]]
            assert [each | row for each, row in zip(told, rows, strict=True)] == told
        if evaluated:
            assert rows[-1]["eval/episodes"] == 1
    # Differences of rounding grow in a simulator.
    for plain, evaluated, rel in zip(*map(timeless, found), (1e-3, 5e-2), strict=True):
        same = {name: evaluated[name] for name in plain}
        assert same == pytest.approx(plain, rel=rel, abs=rel / 100)
