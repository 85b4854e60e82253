"""Acting: a small MLP in numpy as on a CPU, from one copy; others on their device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from klrl.control.policy.acting import LARGE, NumpyActing, TorchActing, make_acting
from klrl.control.run.evaluate import evaluate_policy
from klrl.control.run.parts import ControlParts
from klrl.train.scores import EvaluationPlan, Size, Starts
from tests.device import standin

STEPS = 20
SMALL = {
    "normal": ("env=pendulum",),
    "tanh_normal": ("env=pendulum", "actor=tanh_normal"),
    "categorical": ("env=cartpole",),
}


def first_rollout(config: Any) -> tuple[ControlParts, Any]:
    parts = ControlParts(config)
    rollout = parts.rollout(0)
    batch = rollout.collect().cpu()
    rollout.close()
    return parts, batch


@pytest.mark.parametrize("family", SMALL)
def test_a_small_mlp_plays_to_the_bit_as_on_a_cpu(family: str, settings) -> None:
    """The first rollout, and evaluations with and without noise."""
    (cpu, expected), (cuda, found) = (
        first_rollout(settings(*SMALL[family], f"device={device}")) for device in ("cpu", "cuda:1")
    )
    for key in (*{"action", cpu.agent.family.sample_key}, "observation", ("next", "reward")):
        assert torch.equal(found[key], expected[key]), key
    for sampled in (False, True):
        returns, same = (
            evaluate_policy(
                parts.agent,
                parts.config.env,
                EvaluationPlan(Starts("a test"), Size(3), sampled, parts.device),
            ).returns
            for parts in (cpu, cuda)
        )
        assert len(same) == 3
        assert same == returns


@pytest.mark.parametrize("family", SMALL)
def test_a_rollout_reads_the_parameters_in_one_copy_and_its_steps_ask_nothing(
    family: str, settings
) -> None:
    parts = ControlParts(settings(*SMALL[family], "device=cuda:1"))
    acting = make_acting(parts.agent, parts.device)
    assert isinstance(acting, NumpyActing)
    seen = np.zeros((2, parts.agent.policy_net.inputs), np.float32)
    standin.clear()
    acting.begin(STEPS, 2)
    counts = standin.counts()
    assert [counts.get(name, 0) for name in ("copy:d2h", "copy:h2d", "launch")] == [1, 0, 1]
    standin.clear()
    for step in range(STEPS):
        acting.action(acting.sample(step, seen))
    asked = {name: n for name, n in standin.counts().items() if n and "memory" not in name}
    assert asked == {}


def test_a_large_mlp_acts_on_its_device(settings) -> None:
    width = int(LARGE**0.5)
    for device, acts in (("cpu", NumpyActing), ("cuda:1", TorchActing)):
        words = ("env=pendulum", f"actor.hidden=[{width},{width}]", f"device={device}")
        parts = ControlParts(settings(*words))
        assert isinstance(make_acting(parts.agent, parts.device), acts)
