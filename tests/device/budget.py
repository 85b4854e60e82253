"""What an iteration asks of a GPU, counted on the stand-in: ``python -m tests.device.budget``."""

from __future__ import annotations

from tests.device import standin  # isort: skip  before torch

import tempfile
from pathlib import Path
from typing import Any

import torch

import klrl
from benchmarks.sort_digits_base import build
from klrl.base.text import text_table
from klrl.control.policy.acting import make_acting
from klrl.language.run.sampler import Decoding
from klrl.train.learner import Coefficients
from klrl.train.loop import Training
from tests.control.updates import made
from tests.language.conftest import QUICK_MODEL

DEVICE = torch.device("cuda", 1)
CONTROL = (
    *("env.num_envs=4", "collector.steps=32", "learner.minibatches=4", "logger=none"),
    *("eval.every=0", f"device={DEVICE}"),
)
LANGUAGE = (
    *("experiment=sort_digits", "collector.prompts=4", "collector.group_size=4"),
    *("collector.max_new_tokens=20", "logger=none", "eval.every=0", f"device={DEVICE}"),
)
#: Of a gradient step: the main job, and the two losses on a discrete family.
UPDATES = {
    "main job": ("env=pendulum", "kl.coef=0.1"),
    "main job, KL in the loss": ("env=pendulum", "kl.placement=loss", "kl.estimator=k2"),
    "clip, categorical": ("env=cartpole", "loss=clip"),
}


def per_step(mode: str, *words: str) -> dict[str, float]:
    """Launches of a gradient step, and waits between two minibatches."""
    training, batch = made(klrl.compose, *CONTROL, *words, f"learner.compile={mode}")
    steps = training.parts.learner.steps
    minibatches = steps.minibatches(steps.lay_out(batch))
    assert steps.mode == mode
    coefficients = Coefficients(0.003, 0.5, 0.1)
    steps.step(minibatches[0], coefficients)
    standin.clear()
    for minibatch in minibatches[1:]:
        steps.step(minibatch, coefficients)
    counts = standin.counts()
    name = "captured" if mode == "jit" else "eager"
    return {
        f"launches per gradient step, {name}": counts["launch"] / (len(minibatches) - 1),
        f"waits between two minibatches, {name}": counts.get("wait", 0),
    }


def per_environment_step(steps: int = 10) -> dict[str, float]:
    """Copies of a policy that acts on the device: a CNN."""
    training = Training(klrl.compose(*CONTROL, "env=catch", "env.num_envs=4"))
    agent = training.parts.agent
    acting = make_acting(agent, DEVICE)
    acting.begin(steps + 1, 4)
    seen = torch.randint(255, (4, agent.policy_net.inputs), dtype=torch.uint8).numpy()
    acting.action(acting.sample(0, seen))
    standin.clear()
    for step in range(steps):
        acting.action(acting.sample(step + 1, seen))
    counts = standin.counts()
    assert counts["replay"] == steps
    return {
        "copies in per environment step, pixels": counts["copy:h2d"] / steps,
        "copies out per environment step, pixels": counts["copy:d2h"] / steps,
    }


def per_token() -> dict[str, float]:
    """Waits for one more token, where a prompt's responses share its cache."""
    with tempfile.TemporaryDirectory() as folder:
        build(QUICK_MODEL, Path(folder) / "model")
        training = Training(klrl.compose(*LANGUAGE, f"actor.model={folder}/model"))
    rollout: Any = training.parts.rollout(0, print)
    prompts = rollout.prompts.take(4)
    given = prompts.ids.to(DEVICE), prompts.mask.to(DEVICE), 4
    found = []
    for most in (5, 25):
        standin.clear()
        responses = rollout.sampler(*given, Decoding(most))
        found.append((standin.counts()["wait"], responses.tokens.shape[1]))
    (waits, tokens), (more_waits, more_tokens) = found
    assert rollout.sampler.way == "shared"
    assert more_tokens > tokens
    return {"waits per decoded token": (more_waits - waits) / (more_tokens - tokens)}


def budget() -> dict[str, float]:
    """All of it, by name."""
    updates = {
        f"{name}: {count}": number
        for name, words in UPDATES.items()
        for mode in ("false", "jit")
        for count, number in per_step(mode, *words).items()
    }
    return {**updates, **per_environment_step(), **per_token()}


if __name__ == "__main__":
    rows = [[name, f"{number:g}"] for name, number in budget().items()]
    print(text_table([["", "count"], *rows], right=[1]))
