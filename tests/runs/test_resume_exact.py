"""Saved in mid-run, loaded in a new process: the next iteration on the same rollout is the same."""

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
rows = {}
for run in sys.argv[1:]:
    experiment = Training(stored_config(Path(run)), RunFolder(Path(run)).manifest)
    experiment.checkpoints(RunFolder(Path(run))).load_last(experiment.parts.device)
    rows[run] = next_row(experiment, TensorDict.load(f"{run}-batch"))
print(json.dumps(rows))
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
        experiment.parts.phase.take()  # as the loop does before an iteration
        row = experiment.make_row(copied, measured, learned, 1.0)
        experiment.move_anchor(copied, measured)
    return {key: value for key, value in row.items() if key not in TIMES}


def assert_loaded_as_saved(config: JobConfig) -> None:
    """Every component of a trained run, in a fresh one that loads its checkpoint, bit for bit."""

    def states(run: Training) -> dict[str, Any]:
        parts = {**run.parts.components(), "counters": run.counters}
        parts.pop("rollout", None)  # its environments are closed
        parts |= {"controller": run.controller, "beta": run.parts.learner.beta_rule}
        parts |= {"rate": run.parts.learner.rate} if run.parts.learner.rate else {}
        return {name: part.state_dict() for name, part in parts.items()}

    saved, fresh = Training(config), Training(config)
    saved.train(RunFolder(Path("run")))
    generator = torch.random.get_rng_state()
    torch.manual_seed(99)
    fresh.checkpoints(RunFolder(Path("run"))).load_last(fresh.parts.device)
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
        ["kl=none", "loss=clip", "optim.rate=kl_adaptive"],
        ["loss=trpo", "kl=none"],
    ],
    ids=lambda words: words[0],
)
def test_what_is_loaded_is_what_was_saved_bit_for_bit(words, settings) -> None:
    assert_loaded_as_saved(settings(*words))


@pytest.mark.slow
def test_the_next_iteration_is_the_same_in_a_new_process(settings) -> None:
    jobs = {
        "ema": ["reference=ema", "controller=adaptive", "kl=legacy"],
        "held": ["reference=periodic", "controller=held", "controller.target=1e-3"],
        "js": ["kl.placement=split", "kl.estimator=exact", "kl.divergence=js", "controller=dual"],
    }
    here = {name: _trained_on(name, settings(*words, *LONGER)) for name, words in jobs.items()}
    done = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS, *jobs],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == here
    for row in here.values():
        assert row["kl/ref/exact"] > 0
        assert row["kl/ref/coef"] != 0.5
        assert torch.isfinite(torch.tensor(list(row.values()))).all()


LONGER = ("frames=192", "optim.lr=0.01", "kl.coef=0.5", "loss=klpen_held")


def _trained_on(run: str, config: JobConfig) -> dict[str, float]:
    """Train, keep a rollout beside the run, and learn from it: the row of that iteration."""
    experiment = Training(config)
    experiment.train(RunFolder(Path(run)))
    rollout = experiment.parts.rollout(0)
    batch = rollout.collect().detach().clone()
    rollout.close()
    batch.save(f"{run}-batch")
    # The checkpoint was written before that rollout drew from the generator: go back to it.
    experiment.checkpoints(RunFolder(Path(run))).load_last(experiment.parts.device)
    return next_row(experiment, batch)
