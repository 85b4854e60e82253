"""What acting does on a CUDA device beside the CPU; run by ``test_acting.py`` with the stand-in.

python -m tests.device.acting     prints numbers as JSON
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any

import standin  # before torch
import torch

from klrl.config.checks import to_config
from klrl.config.compose import Composer
from klrl.control.acting import NumpyActing, TorchActing, make_acting
from klrl.control.parts import ControlParts
from klrl.train.evaluate import Starts
from klrl.train.schedule import Size

COPIES = ("env.num_envs=2", "collector.steps=32", "eval.every=0", "learner.compile=false")
STEPS = 20
COUNTED = ("copy:h2d", "copy:d2h", "graph:replay", "launch")
MIRRORED = {
    "normal": ("env=pendulum", "env.normalize_observation=true"),
    "tanh_normal": ("env=pendulum", "actor=tanh_normal"),
    "categorical": ("env=cartpole",),
}


def made(device: str, *words: str) -> ControlParts:
    words = (*words, *COPIES, "logger=none", f"device={device}")
    return ControlParts(to_config(Composer().explained([*words])))


def counted(function) -> dict[str, int]:
    """Copies that a function causes, and launches."""
    standin.clear()
    function()
    counts = standin.counts()
    return {
        name: counts.get(name, 0) for name in ("copy:d2h", "copy:h2d", "graph:replay", "launch")
    }


def first_rollout(device: str, *words: str) -> tuple[ControlParts, Any]:
    parts = made(device, *words)
    rollout = parts.rollout(0)
    batch = rollout.collect().cpu()
    rollout.close()
    return parts, batch


def evaluated(parts: ControlParts, *, sampled: bool) -> dict[str, float]:
    from klrl.control.evaluate import evaluate_policy

    how = {"starts": Starts("a test", 7), "size": Size(3, None), "device": parts.device}
    return evaluate_policy(parts.agent, parts.config.env, sampled=sampled, **how).row


def mirrored(*words: str) -> dict[str, Any]:
    """The first rollout and two evaluations on both devices; the copies of a rollout's acting."""
    (cpu, _), (cuda, _) = both = [first_rollout(device, *words) for device in ("cpu", "cuda")]
    batches = [batch for _, batch in both]
    keys = [*{"action", cpu.agent.family.sample_key}, "observation", ("next", "reward")]
    acting = make_acting(cuda.agent, cuda.device)
    seen = batches[0]["observation"][:, 0].numpy()

    def steps() -> None:
        for step in range(STEPS):
            acting.action(acting.sample(step, seen))

    return {
        "in_numpy": isinstance(acting, NumpyActing),
        "equal": [bool((batches[0][key] == batches[1][key]).all()) for key in keys],
        "evaluations": [
            [evaluated(parts, sampled=sampled) for parts in (cpu, cuda)]
            for sampled in (False, True)
        ],
        "a rollout": counted(lambda: acting.begin(STEPS, 2)),
        "its steps": counted(steps),
    }


def on_the_device(*words: str) -> dict[str, Any]:
    """A policy that acts where it learns: what a step costs, and its captures."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        parts = made("cuda", *words)
        rollout = parts.rollout(0)
        rollout.collect()
        acting = rollout._acting
        seen = torch.zeros(2, parts.agent.policy_net.inputs).numpy()
        if parts.agent.layout is not None:
            seen = torch.zeros(2, parts.agent.layout.size, dtype=torch.uint8).numpy()
        step = counted(lambda: acting.sample(0, seen))
        evaluated(parts, sampled=False)
        before = dict(parts.agent.forwards)
        evaluated(parts, sampled=False)
        rollout.close()
    return {
        "in_torch": isinstance(acting, TorchActing),
        "forwards": len(before),
        "forwards_kept": before == parts.agent.forwards,
        "a step": step,
        "said": said.getvalue(),
    }


class Waiting(torch.nn.Module):
    """A network that asks the device for a number at each forward."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(inputs, outputs)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        out = self.layer(observation)
        return out * 2 if out.abs().max().item() > 1e6 else out


OWN = ("actor=custom", "actor.target=tests.device.acting:Waiting")
LEARNERS = {
    "cnn": ("env=catch", "actor=cnn"),
    "large": ("env=pendulum", "actor.hidden=[400,400]"),
    "own": ("env=pendulum", *OWN),
}
KINDS = {"mirrored": (mirrored, MIRRORED), "on_the_device": (on_the_device, LEARNERS)}

if __name__ == "__main__":
    function, jobs = KINDS[sys.argv[1]]
    print(json.dumps({name: function(*words) for name, words in jobs.items()}))
