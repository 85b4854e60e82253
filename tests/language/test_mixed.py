"""Float32 weights with bfloat16 arithmetic: what learns, what is scored, what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from klrl.train.loop import Training

BFLOAT16 = "actor.dtype=bfloat16"
#: At which a bfloat16 weight above 2.6e-4 would stay where it is.
SMALL = ("optim.lr=1e-6", "optim.lr_floor=1e-6")


def iterate(training: Training) -> None:
    """Rollout, KL, advantage and update, once."""
    batch = training.parts.rollout(0).collect()
    training.parts.charge_kl(batch)
    training.parts.estimate_advantage(batch)
    training.learn(batch)


def test_a_first_step_moves_the_weights(job) -> None:
    """Adam's first step is lr wherever there is a gradient (Kingma and Ba 2015, section 2.1)."""
    training = Training(job(BFLOAT16, *SMALL, "kl=none", "learner.minibatches=1"))
    parameters = training.parts.policy.parameters
    before = [p.detach().clone() for p in parameters]
    iterate(training)
    moments = training.parts.learner.steps.optimizer.state_dict()
    due = [moments[f"{index}.exp_avg"] != 0 for index in range(len(parameters))]
    moved = sum(int(((p != b) & d).sum()) for p, b, d in zip(parameters, before, due, strict=True))
    due = sum(int(each.sum()) for each in due)
    assert due > 1000
    assert moved / due > 0.99
