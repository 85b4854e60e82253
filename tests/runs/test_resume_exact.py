"""Saved in mid-run, loaded in a new process: the next iteration on the same rollout is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from klrl.config import JobConfig
from klrl.runs.folder import RunFolder
from klrl.runs.metrics import TIMES
from klrl.train.loop import Training
from tests.runs.saves import assert_same

pytestmark = pytest.mark.integration

SECOND_PROCESS = """
import json, sys
import torch
from tensordict import TensorDict
from pathlib import Path
from klrl.train.loop import Training
from klrl.runs.resume import stored_config
from klrl.runs.folder import RunFolder
from tests.runs.test_resume_exact import next_row

torch.set_num_threads(1)
experiment = Training(stored_config(Path("run")), RunFolder(Path("run")).manifest)
experiment.load(experiment.checkpoints(RunFolder(Path("run"))))
print(json.dumps(next_row(experiment, TensorDict.load("batch"))))
"""


def next_row(experiment: Training, batch: TensorDict) -> dict[str, float]:
    """What the loop does with a rollout, twice over; the row of the second iteration."""
    for _ in range(2):
        copied = batch.clone()
        measured = experiment.parts.charge_kl(copied)
        experiment.parts.estimate_advantage(copied)
        learned = experiment.learn(copied)
        experiment.parts.move_normalizer(copied)
        experiment.counters.iteration += 1
        experiment.counters.frames += copied.numel()
        row = experiment.make_row(copied, measured, learned, 1.0)
        experiment.move_anchor(copied, measured)
    return {key: value for key, value in row.items() if key not in TIMES}


def assert_loaded_as_saved(config: JobConfig) -> None:
    """Every component of a trained run, in a fresh one that loads its checkpoint, bit for bit."""

    def states(run: Training) -> dict[str, Any]:
        parts = {**run.parts.components(), "counters": run.counters}
        parts |= {"controller": run.controller, "beta": run.parts.learner.beta_rule}
        return {name: part.state_dict() for name, part in parts.items()}

    saved, fresh = Training(config), Training(config)
    saved.train(RunFolder(Path("run")))
    generator = torch.random.get_rng_state()
    torch.manual_seed(99)
    fresh.load(fresh.checkpoints(RunFolder(Path("run"))))
    assert_same(states(fresh), states(saved))
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert saved.counters.iteration > 1


@pytest.mark.parametrize(
    "words",
    [
        ["kl=none", "loss=clip", "optim=adamw"],
        ["reference=ema", "controller=dual", "loss=klpen_held", "eval.every=1", "eval.episodes=1"],
        ["controller=held", "controller.target=1e-4", "controller.unit=step"],
        ["env=cartpole", "env.normalize_observation=true", "actor.share_trunk=true"],
    ],
    ids=lambda words: words[0],
)
def test_what_is_loaded_is_what_was_saved_bit_for_bit(words, settings) -> None:
    assert_loaded_as_saved(settings(*words))


@pytest.mark.parametrize(
    "words",
    [
        ["reference=ema", "controller=adaptive", "kl=legacy"],
        ["reference=periodic", "controller=held", "controller.target=1e-3", "loss=klpen_held"],
        ["controller=dual", "kl.placement=split", "kl.estimator=exact", "kl.divergence=js"],
    ],
    ids=lambda words: words[0],
)
def test_the_next_iteration_is_the_same_in_a_new_process(words, settings, tmp_path) -> None:
    config = settings(*words, "frames=192", "optim.lr=0.01", "kl.coef=0.5")
    experiment = Training(config)
    experiment.train(RunFolder(Path("run")))
    rollout = experiment.parts.rollout(0)
    batch = rollout.collect().detach().clone()
    rollout.close()
    batch.save("batch")
    # The checkpoint was written before that rollout drew from the generator: go back to it.
    experiment.load(experiment.checkpoints(RunFolder(Path("run"))))
    here = next_row(experiment, batch)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout.splitlines()[-1])
    assert there == here
    assert here["kl/ref/exact"] > 0
    assert here["kl/ref/coef"] != 0.5
    assert torch.isfinite(torch.tensor(list(here.values()))).all()
