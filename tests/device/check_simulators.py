"""Simulators on a device: klrl's loop stays there, and the rows are the CPU's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Binary, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

import klrl
from klrl.__main__ import main
from klrl.control.env.pendulum import Pendulum
from klrl.control.run.parts import ControlParts
from tests.conftest import QUICK
from tests.device import standin
from tests.device.check_runs import EAGER, runs, words_of
from tests.device.rows import assert_same

HERE = "tests.device.check_simulators"
BATCH = ("env=pendulum_batch",)
JOBS = {
    "pendulum": BATCH,
    "tanh": (*BATCH, "actor=tanh_normal", "env.normalize_observation=true"),
    "rewards": (*BATCH, "env.normalize_reward=true", "env.num_envs=20", "frames=960"),
    "short": ("env=custom", f"env.target={HERE}:Short", "env.observation_keys=[observation]"),
    "nan": ("env=custom", f"env.target={HERE}:NaNLast", "env.observation_keys=[observation]"),
    "masked": ("env=custom", f"env.target={HERE}:Masked"),
}


class Short(Pendulum):
    """Episodes of 5 steps."""

    max_episode_steps = 5


class NaNLast(Short):
    """Last observations are NaN."""

    @classmethod
    def _step(cls, tensordict: TensorDict) -> TensorDict:
        after = super()._step(tensordict)
        over = after["truncated"]
        return after.set("observation", after["observation"].where(~over, torch.nan))


class Masked(EnvBase):
    """Shows a number of 1 to 3, and allows the actions below it; 6 steps."""

    def __init__(self, num_envs: int, device: str) -> None:
        super().__init__(device=device, batch_size=[num_envs])
        n = num_envs
        at, mask = Categorical(4, (n,)), Binary(3, (n, 3), dtype=torch.bool)
        self.observation_spec = Composite(at=at, action_mask=mask, shape=(n,)).to(device)
        self.action_spec = Categorical(3, (n,), device=device)
        self.reward_spec = Unbounded((n, 1), device=device)
        self._set_seed(0)

    def _set_seed(self, seed: int | None) -> None:
        self.rng = torch.Generator(self.device).manual_seed(seed or 0)

    def _result(self) -> dict[str, torch.Tensor]:
        at = torch.randint(1, 4, self.batch_size, generator=self.rng, device=self.device)
        return {"at": at, "action_mask": torch.arange(3, device=self.device) < at[:, None]}

    def _reset(self, tensordict: TensorDict | None = None, **_: object) -> TensorDict:
        self.steps = 0
        return TensorDict(self._result(), self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDict) -> TensorDict:
        self.steps += 1
        reward = tensordict["action"][:, None].float()
        done = torch.full_like(reward, self.steps == 6, dtype=torch.bool)
        result = {**self._result(), "reward": reward, "done": done, "terminated": done}
        return TensorDict(result, self.batch_size, device=self.device)


@pytest.fixture(autouse=True)
def _one_stream() -> Iterator[None]:
    """The devices' numbers are drawn from the CPU's generator: then they can be compared."""
    standin.one_stream(True)
    yield
    standin.one_stream(False)


@cache
def per_step(copies: int, actor: str) -> dict[str, float]:
    """What a step of the loop asks of a device, from rollouts of 4 and of 14 steps."""
    found: list[dict[str, int]] = []
    for steps in (4, 14):
        words = (f"env.num_envs={copies}", f"collector.steps={steps}", f"actor={actor}")
        more = ("learner.minibatches=1", "device=cuda:1", "logger=none")
        config = klrl.compose(*BATCH, *words, *more)
        rollout: Any = ControlParts(config).rollout(0)
        rollout.collect()
        standin.clear()
        with torch.no_grad():
            rollout._play()
        found.append(standin.counts())
    names = found[1].keys() - {"memory:live", "memory:peak"}
    return {name: (found[1][name] - found[0].get(name, 0)) / 10 for name in names}


@pytest.mark.parametrize("actor", ["normal", "tanh_normal"])
@pytest.mark.parametrize("copies", [8, 256])
def test_a_step_of_simulators_on_a_device_waits_once(copies: int, actor: str) -> None:
    """Only to know whether an episode ends; the policy's forward is one graph."""
    found = per_step(copies, actor)
    print(copies, found)
    assert found["replay"] == 1
    assert found["wait"] <= 1
    assert not any(found.get(f"copy:{way}", 0) for way in ("h2d", "d2h"))
    assert found["launch"] == per_step(8, actor)["launch"] <= 90


@pytest.mark.parametrize("job", JOBS)
def test_the_rows_of_simulators_on_a_device_are_the_cpus(job: str) -> None:
    """Three iterations, and an evaluation in the same simulators."""
    steps = ("collector.steps=16", "frames=192", "eval.every=1", "eval.episodes=2")
    cpu, (cuda,) = runs(job, *QUICK, EAGER, *steps, *JOBS[job])
    assert_same(cuda.rows, cpu.rows)
    assert cuda.rows[-1]["iteration"] >= 3
    exact = "anew" if job == "masked" else "exact"  # it counts steps in an attribute
    assert cuda.manifest["resume"] == cpu.manifest["resume"] == exact


@pytest.mark.parametrize("word", ["collector=torchrl", "kl.apply=step"])
def test_what_steps_on_the_cpu_is_refused_for_simulators_on_a_device(word: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words_of(*QUICK, *BATCH, word, "device=cuda:1"))
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"{word}: env.target=klrl.control.env.pendulum:Pendulum computes on cuda:1, " in said
    assert not [*Path().glob("outputs/**/*.yaml")]
