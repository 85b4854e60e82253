"""``collector=ray`` on this machine with two workers: the simulator's numbers, deaths, the end."""

import copy
import importlib.util
import itertools
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torch.distributions import Independent, Normal

from klrl.base.errors import NonFiniteError, WorkerError
from klrl.base.ray_start import start_ray
from klrl.base.seeds import derived_seed
from klrl.config import RayCollectorConfig
from klrl.control.actor import Agent
from klrl.control.env import make_env
from klrl.control.vector import VectorRollout
from tests.agents import agent_of, gym
from tests.control.test_ray_run import LOOPBACK, listening

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)
from klrl.control.ray_rollout import RayRollout
from klrl.control.rollout import RolloutContext

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]

SEED, COPIES, STEPS = 17, 4, 70
PENDULUM = gym("Pendulum-v1", COPIES)
TWO = RayCollectorConfig(STEPS, workers=2, cpus_per_worker=1, name="ray")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _ray_on_loopback() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    ray = start_ray(num_cpus=4, log_to_driver=False, logging_level="ERROR")
    assert signal.getsignal(signal.SIGTERM) is before, "Ray's would end a run without a checkpoint"
    yield
    ray.shutdown()


def make_policy() -> Agent:
    return agent_of(make_env(PENDULUM, seed=0, num_envs=1), "normal")


def move(agent: Agent, by: float) -> None:
    """Another policy, as an update and the observation statistics would make it."""
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter += by
    agent.normalizer.update(torch.randn(5, 3) * (1 + by))


def pids_of(rollout) -> list[int]:
    calls = [w.__ray_call__.remote(lambda _: os.getpid()) for w in rollout._workers]
    return rollout._ray.get(calls)


@dataclass
class Played:
    """A policy as it was, and a rollout that it made."""

    agent: Agent
    batch: TensorDictBase


@dataclass
class Story:
    """Three rollouts in peace; one with a death in it; a death while idle, and one more."""

    played: list[Played]
    said: list[list[str]]

    @property
    def batches(self) -> list[TensorDictBase]:
        return [each.batch for each in self.played]


@pytest.fixture(scope="module")
def rollout(_ray_on_loopback) -> Iterator[RayRollout]:
    torch.manual_seed(0)
    config = SimpleNamespace(collector=TWO, env=PENDULUM)
    rollout = RayRollout(RolloutContext(config, None, make_policy(), CPU, SEED))
    yield rollout
    rollout.close()


@pytest.fixture(scope="module")
def story(rollout: RayRollout) -> Story:
    story = Story([], [])
    agent, request = rollout._agent, rollout._request
    doomed = []

    def request_and_kill(worker: int, weights: object) -> object:
        pending = request(worker, weights)
        if worker == 1 and doomed:
            os.kill(doomed.pop(), signal.SIGKILL)
        return pending

    rollout._request = request_and_kill
    for number, by in enumerate((0.0, 0.1, -0.3, 0.2, 0.1)):
        move(agent, by)
        said = []
        rollout._say = said.append
        if number == 3:
            doomed.append(pids_of(rollout)[1])
        elif number == 4:
            os.kill(pids_of(rollout)[0], signal.SIGKILL)  # it has answered, and dies idle
        story.played.append(Played(copy.deepcopy(agent), rollout.collect()))
        story.said.append(said)
    return story


# ------------------------------------------------------------------------------------- numbers


def test_the_simulator_alone_gives_the_same_observations_and_rewards(story) -> None:
    """Gymnasium, with the actions of the batches; 210 steps, so every episode ends once."""
    envs = [gymnasium.make("Pendulum-v1") for _ in range(COPIES)]
    seeds = [[derived_seed(SEED + i, "episode", n) for n in range(2)] for i in range(COPIES)]
    seen = np.stack([env.reset(seed=seeds[i][0])[0] for i, env in enumerate(envs)])
    ends = 0
    for batch in story.batches[:3]:
        assert batch.shape == (COPIES, STEPS)
        for t in range(STEPS):
            np.testing.assert_allclose(batch["observation"][:, t], seen, atol=1e-5)
            for i, env in enumerate(envs):
                action = batch["action"][i, t].clamp(-2, 2).numpy()
                after, reward, _, truncated, _ = env.step(action)
                np.testing.assert_allclose(batch["next", "observation"][i, t], after, atol=1e-5)
                assert float(batch["next", "reward"][i, t]) == pytest.approx(reward, abs=1e-5)
                assert bool(batch["next", "truncated"][i, t]) == truncated
                ends += truncated
                seen[i] = env.reset(seed=seeds[i][1])[0] if truncated else after
    assert ends == COPIES


def test_log_probs_and_actions_are_those_of_the_policy_at_that_time(story) -> None:
    noises = []
    for played in story.played:
        batch = played.batch
        loc, scale = (x.detach() for x in played.agent.policy_net(batch["observation"]))
        density = Independent(Normal(loc, scale), 1).log_prob(batch["action"])
        torch.testing.assert_close(batch["action_log_prob"], density, atol=1e-5, rtol=0)
        noises.append((batch["action"] - loc) / scale)
    noise = torch.stack(noises)
    # Five standard errors of a mean, and of a standard deviation.
    assert abs(float(noise.mean())) < 5 / noise.numel() ** 0.5
    assert abs(float(noise.std()) - 1) < 5 / (2 * noise.numel()) ** 0.5
    assert len(noise.unique()) > 0.99 * noise.numel(), "every worker draws for itself"


def test_each_part_is_that_of_a_local_rollout_key_by_key(story) -> None:
    for worker in (0, 1):
        env = make_env(PENDULUM, seed=SEED + 2 * worker, num_envs=2)
        agent = make_policy()
        torch.manual_seed(derived_seed(SEED, f"worker {worker}"))
        local = VectorRollout(env, agent, STEPS, CPU)
        for played in story.played[:3]:
            agent.actor.load_state_dict(played.agent.actor.state_dict())
            part, expected = played.batch[2 * worker : 2 * worker + 2], local.collect()
            assert set(part.keys(True, True)) == set(expected.keys(True, True))
            assert played.batch.names == expected.names
            for key in expected.keys(True, True):
                if key != ("collector", "traj_ids"):
                    assert part[key].dtype == expected[key].dtype
                    torch.testing.assert_close(part[key], expected[key], atol=1e-5, rtol=0)


# -------------------------------------------------------------------------------------- deaths


def test_a_killed_worker_is_replaced_and_nothing_is_counted_twice(story) -> None:
    line = "worker {} is lost: a new one plays its part of this rollout"
    assert story.said == [[], [], [], [line.format(1)], [line.format(0)]]
    counts = [batch["next", "step_count"][:, 0, 0].tolist() for batch in story.batches]
    # An episode has 200 steps, so three rollouts of 70 are one episode and ten steps.
    assert counts == [[1] * 4, [71] * 4, [141] * 4, [11, 11, 1, 1], [1, 1, 71, 71]]
    frames = torch.cat([batch["next", "observation"].flatten(0, 1) for batch in story.batches])
    assert len(np.unique(frames.numpy(), axis=0)) == 5 * COPIES * STEPS
    first = [set(batch["collector", "traj_ids"][:, 0].tolist()) for batch in story.batches]
    assert [len(a) for a in first] == [COPIES] * 5
    shared = [len(a & b) for a, b in itertools.pairwise(first)]
    assert shared == [4, 4, 0, 2], "none survives 200 steps; two survive the last death"
    assert not first[0] & first[4]


def test_a_workers_error_keeps_its_type_and_a_mortal_one_ends_in_one_line(
    story, rollout, monkeypatch
) -> None:
    weight = next(rollout._agent.actor.parameters())
    before = weight.detach().clone()
    weight.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="^observation of Pendulum-v1"):
        rollout.collect()
    weight.data.copy_(before)
    nowhere = gym("Nowhere-v0", COPIES)
    monkeypatch.setattr(rollout, "_env", nowhere)
    monkeypatch.setattr("klrl.control.ray_rollout.ATTEMPTS", 2)
    os.kill(pids_of(rollout)[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="was lost 2 times.*Nowhere") as found:
        rollout.collect()
    assert "\n" not in str(found.value)


# ------------------------------------------------------------------------------------ upstream


def test_what_is_worked_around_is_still_so() -> None:
    """When this fails, klrl/control/ray_rollout.py may use TorchRL's RayCollector."""
    from functools import partial

    import ray
    from torchrl.collectors.distributed import RayCollector

    collector = RayCollector(
        [partial(make_env, PENDULUM, seed=i, num_envs=1) for i in range(2)],
        make_policy().actor,
        frames_per_batch=20,
        total_frames=10**9,
        sync=True,
        remote_configs={"num_cpus": 1, "num_gpus": 0},
        collector_kwargs={"auto_register_policy_transforms": False},
    )
    collector.update_policy_weights_()
    assert listening({os.getpid()}) - LOOPBACK, "the weights' server listens everywhere"
    batches = iter(collector)
    ids = next(batches)["collector", "traj_ids"]
    assert ids[0].unique().tolist() == ids[1].unique().tolist(), "the same ids in two workers"
    worker = collector.remote_collectors[1]
    os.kill(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    collector.shutdown()
