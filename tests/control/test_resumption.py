"""Control runs that are interrupted and go on are, to the bit, those that never were."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import klrl
from klrl.report.diff import compare_bits
from klrl.train.callbacks import Callback
from tests.conftest import QUICK
from tests.runs.commands import exits, manifest_of, rows_of
from tests.runs.saves import flipped

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

#: Six iterations, each with a checkpoint; an evaluation after the third.
WORDS = (
    *(*QUICK, "frames=384", "checkpoint.every=1"),
    *("eval.every=3", "eval.episodes=2", "eval.steps=400", "eval.final=0"),
)
WHOLE, PART = Path("whole"), Path("part")


class EndsAt(Callback):
    """Ends a run in the middle of an iteration: its row and checkpoint are not written."""

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration

    def iterated(self, training: Any, row: Any, batch: Any) -> None:
        if training.counters.iteration == self._iteration:
            raise KeyboardInterrupt


DICE, DRIFTING, UNSEEDED = (
    ("env=custom", f"env.target=tests.control.toys:{name}", "actor=mlp")
    for name in ("Dice", "Drifting", "Unseeded")
)
COUNTED = ("env=custom", "env.target=tests.control.toys:Counted")
BEGINS = "after the same seeded reset, a used copy differs from a new one"


def stir() -> None:
    """Whatever this process drew before: it is another one's."""
    random.seed()
    np.random.seed()
    torch.manual_seed(99)


def interrupted(words: Sequence[str], at: int = 4) -> None:
    """A run that ends in iteration ``at`` and goes on."""
    with pytest.raises(KeyboardInterrupt):
        klrl.run(*WORDS, *words, folder=PART, callbacks=[EndsAt(at)])
    assert len([row for row in rows_of(PART) if row["iteration"]]) == at - 1
    stir()
    assert exits(f"resume={PART}") == 0


@pytest.mark.parametrize(
    "words",
    [
        ["env=cartpole", "kl=legacy", "controller=dual"],
        ["collector.staleness=2", "loss.sampler_weight=mask", "env.normalize_reward=true"],
        DRIFTING,
        ["env.args={many:5000}", *COUNTED],
        ["env.args={many:7,board:true}", *COUNTED, "actor=cnn", "actor.arch=impala"],
        pytest.param(
            ["env=hopper", "kl=legacy", "kl.apply=step", "reference=ema"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["env=half_cheetah", "actor=tanh_normal", "controller=adaptive", "loss=klpen_held"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["reference=periodic", "kl.placement=split", "kl.estimator=exact", "kl.divergence=js"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda words: words[0],
)
def test_a_run_that_was_interrupted_is_the_one_that_was_not(words, capsys) -> None:
    stir()
    klrl.run(*WORDS, *words, folder=WHOLE)
    stir()
    interrupted(words)
    equal, told = compare_bits(WHOLE, PART)
    assert equal, told
    assert told.startswith("equal to the bit: 6 rows; parameters at 384, SHA-256 ")
    assert "new episodes" not in capsys.readouterr().out
    for folder in (WHOLE, PART):
        manifest = manifest_of(folder)
        assert (manifest["repeatable"], manifest["resume"]) == ("yes", "exact")


WRAPPED = "env.wrappers=[{target: tests.control.toys:Warming}]"


TORCHRL = ["collector=torchrl", "env.normalize_reward=true"]
NOT_SAVED = "collector=torchrl saves no episodes; collector=vector does"


@pytest.mark.parametrize(
    ("words", "repeatable", "why"),
    [
        *((words, "no", BEGINS) for words in (UNSEEDED, DICE, [WRAPPED])),
        (TORCHRL, "yes", NOT_SAVED),
        ([*DICE, *TORCHRL], "no", BEGINS),
    ],
    ids=["unseeded", "dice", "wrapper", "torchrl", "dice and torchrl"],
)
def test_a_run_whose_episodes_cannot_go_on_begins_anew_and_says_so(
    words, repeatable, why, capsys
) -> None:
    interrupted(words)
    told = capsys.readouterr().out
    begun, _, resumed = told.partition("resumed at 192 frames")
    assert f"resume: a later resume will begin new episodes: {why}" in begun
    assert f"resume: this run begins new episodes: {why}" in resumed
    assert (manifest_of(PART)["repeatable"], manifest_of(PART)["resume"]) == (repeatable, "anew")
    assert [row["iteration"] for row in rows_of(PART)] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_state_costs_a_checkpoint_and_no_bit(capsys) -> None:
    klrl.run(*WORDS, folder=WHOLE)
    with pytest.raises(KeyboardInterrupt):
        klrl.run(*WORDS, folder=PART, callbacks=[EndsAt(4)])
    newest = max((PART / "checkpoints" / "last").iterdir()) / "state.safetensors"
    newest.write_bytes(flipped(newest.read_bytes()))
    capsys.readouterr()
    assert exits(f"resume={PART}") == 0
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert "state.safetensors: its SHA-256 does not match" in line
    assert "resumed at 128 frames" in said.out
    assert compare_bits(WHOLE, PART)[0]


def test_an_environment_that_is_another_now_begins_anew_and_says_so(monkeypatch, capsys) -> None:
    with pytest.raises(KeyboardInterrupt):
        klrl.run(*WORDS, *DRIFTING, folder=PART, callbacks=[EndsAt(4)])
    monkeypatch.setattr("tests.control.toys.Drifting.drift", 1.1)
    assert exits(f"resume={PART}") == 0
    told = capsys.readouterr().out
    line = "this run begins new episodes: EnvError: env.target=tests.control.toys:Drifting: copy 0 "
    assert f"{line}does not repeat its recorded episode" in told
    assert (manifest_of(PART)["repeatable"], manifest_of(PART)["resume"]) == ("no", "anew")
    assert [row["iteration"] for row in rows_of(PART)] == [1, 2, 3, 4, 5, 6]


def test_more_frames_go_on_with_the_running_episodes(capsys) -> None:
    klrl.run(*QUICK, "frames=128", folder=PART)
    capsys.readouterr()
    assert exits(f"resume={PART}", "frames=512") == 0
    assert "new episodes" not in capsys.readouterr().out
    lengths = [row.get("reward/episode_length") for row in rows_of(PART)]
    # Pendulum's episodes have 200 steps, a rollout 32: the first ones end in the seventh.
    assert [length is not None for length in lengths] == [False] * 6 + [True, False]
    assert lengths[6] == 200


def test_saving_disturbs_nothing() -> None:
    """With a checkpoint after each iteration and with none but the last: the same rows."""
    klrl.run(*WORDS, folder=WHOLE)
    klrl.run(*WORDS, "checkpoint.every=100", folder=PART)
    assert compare_bits(WHOLE, PART)[0]


def test_evaluations_draw_from_no_global_generator_and_repeat_themselves() -> None:
    rewards = []
    for every in (0, 1):
        run = klrl.run(
            *QUICK,
            *DICE,
            f"eval.every={every}",
            *(["eval.episodes=3"] if every else []),
            folder=f"run{every}",
        )
        rewards.append([row["reward/raw"] for row in run.rows if row["iteration"]])
    assert rewards[0] == rewards[1]
    assert run.evaluate(3).returns == run.evaluate(3).returns
