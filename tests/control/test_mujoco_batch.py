"""MuJoCo tasks in one batch, to the byte: against ``gymnasium.make``, copy by copy."""

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit, TransformReward

import klrl
from klrl.base.seeds import derived_seed
from klrl.config import CustomEnvConfig
from klrl.control.env import batch as batches
from klrl.control.env import mujoco_batch
from klrl.control.env.copies import VectorGymEnv, make_copies
from klrl.control.env.simulators import BatchedCopies
from tests.agents import gym
from tests.conftest import QUICK
from tests.control.test_episodes import kept, played

TASKS = ("HalfCheetah-v5", "Hopper-v5", "Swimmer-v5", "Walker2d-v5", "Reacher-v5")
NEVER_FALL = ("HalfCheetah-v5", "Swimmer-v5", "Reacher-v5")
#: Time limits are reached, and every setting that a step reads has another value than its default.
SETTINGS: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5": {"forward_reward_weight": 0.7, "ctrl_cost_weight": 0.3},
    "Hopper-v5": {
        **{"forward_reward_weight": 1.3, "ctrl_cost_weight": 0.1, "healthy_reward": 0.3},
        **{"healthy_state_range": (-2.5, 3.5), "healthy_angle_range": (-0.3, 0.1)},
    },
    "Swimmer-v5": {"frame_skip": 2, "ctrl_cost_weight": 0.2},
    "Reacher-v5": {"reward_dist_weight": 0.7, "reward_control_weight": 0.3},
    "Walker2d-v5": {"terminate_when_unhealthy": False, "healthy_z_range": (1.1, 1.3)},
}
CASES = [(name, {}) for name in TASKS]
CASES += [(name, {"max_episode_steps": 23, **more}) for name, more in SETTINGS.items()]
CASES += [
    (name, {"exclude_current_positions_from_observation": False, "max_episode_steps": 17})
    for name in ("Hopper-v5", "Swimmer-v5")
]


def compare(env_id: str, kwargs: dict[str, Any], copies: int, steps: int) -> tuple[int, int]:
    """Compare every result of a batch with Gymnasium's; how many episodes ended, of each kind."""
    env = VectorGymEnv(env_id, copies, kwargs=kwargs, seed=5)
    assert env.simulators.stepped == f"{copies} copies in one batch"
    own = [gymnasium.make(env_id, **kwargs) for _ in range(copies)]
    begun = [0] * copies

    def reset(i: int) -> np.ndarray:
        begun[i] += 1
        return own[i].reset(seed=derived_seed(5 + i, "episode", begun[i] - 1))[0]

    rng, counts = np.random.default_rng(3), np.zeros(2, int)
    seen = env.reset_native()
    for i in range(copies):
        assert seen[i].tobytes() == reset(i).tobytes()
    for step in range(steps):
        actions, given = drawn(own[0].action_space, seen, step, rng)
        results = env.step_native(actions)
        for i in range(copies):
            observation, *rest = own[i].step(given[i])[:4]
            assert results[0][i].tobytes() == observation.tobytes(), (step, i)
            assert [result[i] for result in results[1:]] == rest, (step, i)
            assert np.signbit(results[1][i]) == np.signbit(rest[0]), (step, i)
        counts += [int(results[2].sum()), int(results[3].sum())]
        ended = results[2] | results[3]
        if ended.any():
            seen = env.reset_native(ended)
            for i in np.flatnonzero(ended):
                assert seen[i].tobytes() == reset(i).tobytes(), (step, i)
    return counts[0], counts[1]


def drawn(
    space: gymnasium.Space, seen: np.ndarray, step: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Draw actions for observations ``seen`` [N, D], and these actions within their bounds."""
    if isinstance(space, gymnasium.spaces.Box):
        scale = 0.3 if step // 40 % 2 else 1.2  # small, and also outside the bounds
        actions = scale * rng.uniform(space.low, space.high, (len(seen), *space.shape))
        actions = actions.astype("f4")
        return actions, np.clip(actions, space.low, space.high)
    chosen, most = rng.integers(0, space.n, len(seen)), int(space.n) - 1
    if step % 500 > 100:  # along the velocity, which swings a car or a pendulum up
        chosen = np.where(rng.random(len(seen)) < 0.95, most * (seen[:, -1] > 0), chosen)
    return chosen, chosen


@pytest.mark.parametrize(("env_id", "kwargs"), CASES)
def test_each_result_is_gymnasiums(env_id: str, kwargs: dict[str, Any]) -> None:
    terminated, truncated = compare(env_id, kwargs, 3, 80)
    falls = env_id not in NEVER_FALL and kwargs.get("terminate_when_unhealthy", True)
    assert (terminated > 0) == falls
    assert truncated > 0 or "max_episode_steps" not in kwargs


@pytest.mark.slow
@pytest.mark.parametrize("env_id", TASKS)
def test_each_of_20_000_results_is_gymnasiums(env_id: str) -> None:
    falls = env_id not in NEVER_FALL
    terminated, truncated = compare(env_id, {"max_episode_steps": 25 if falls else 190}, 8, 2500)
    assert (terminated > 10, truncated > 10) == (falls, True)


def both(env_id: str, copies: int = 3) -> tuple[VectorGymEnv, VectorGymEnv]:
    """A batch, and copies that are stepped one by one."""
    pair = [VectorGymEnv(env_id, copies, seed=2, batch=batch) for batch in (True, False)]
    assert ["batch" in env.simulators.stepped for env in pair] == [True, False]
    return pair[0], pair[1]


@pytest.mark.parametrize("env_id", ["Hopper-v5", "HalfCheetah-v5"])
def test_copies_that_wait_are_left_alone(env_id: str) -> None:
    masked(env_id)


def masked(env_id: str) -> None:
    """Step some copies of a batch, and copies one by one; compare all results."""
    pair, rng = both(env_id), np.random.default_rng(0)
    for env in pair:
        env.reset_native()
    for _ in range(40):
        actions = pair[0].action_spec.rand().numpy()
        mask = rng.random(3) < 0.6
        mask[rng.integers(3)] = True
        results = [env.step_native(actions, mask) for env in pair]
        assert [x.tobytes() for x in results[0]] == [x.tobytes() for x in results[1]]
        if (ended := mask & results[0][2]).any():
            assert pair[0].reset_native(ended).tobytes() == pair[1].reset_native(ended).tobytes()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Gymnasium: NaN
def test_a_simulation_that_diverges_is_gymnasiums_too() -> None:
    pair = both("HalfCheetah-v5")
    for env in pair:
        env.reset_native()
    for value in (np.nan, 1.0, np.nan, 0.2):
        actions = np.full((3, 6), value, "f4")
        results = [[x.tobytes() for x in env.step_native(actions)] for env in pair]
        assert results[0] == results[1]


def test_threads_change_nothing() -> None:
    torch.set_num_threads(2)
    try:
        assert compare("Walker2d-v5", {}, 5, 40)[0] > 0, "some fell, and all results are equal"
    finally:
        torch.set_num_threads(1)


def test_env_threads_are_the_batchs_own_and_change_nothing() -> None:
    config, found = gym("Hopper-v5", 5), []
    for threads, copies, own in ((None, 5, 1), (2, 5, 2), (4, 5, 4), (4, 3, 3)):
        config.threads = threads
        env = make_copies(config, seed=0, num_envs=copies)
        assert isinstance(env.simulators, BatchedCopies)
        assert env.simulators._batch._batch.nthread == own
        env.reset_native()
        if copies == 5:
            found.append(played(env, 60))
    assert found[1:] == found[:1] * 2


def test_running_episodes_go_on_in_a_batch_or_one_by_one() -> None:
    batch, single = kept("Hopper-v5"), kept("Hopper-v5", seed=4, batch=False)
    batch.reset_native()
    played(batch, 45)
    state = batch.episodes()
    assert state is not None
    single.play_again(state)
    assert played(batch, 40) == played(single, 40)


@pytest.mark.parametrize("limits", [(200, 300), (300, 200)])
def test_the_shortest_of_several_time_limits_ends_an_episode(limits: tuple[int, int]) -> None:
    def make() -> gymnasium.Env:
        return TimeLimit(gymnasium.make("Swimmer-v5", max_episode_steps=limits[0]), limits[1])

    for batch in (True, False):
        env = VectorGymEnv("Swimmer-v5", 2, make=make, batch=batch)
        assert ("batch" in env.simulators.stepped) == batch
        env.reset_native()
        ends = [bool(env.step_native(np.zeros((2, 2), np.float32))[3][0]) for _ in range(201)]
        assert ends.index(True) == 199


# ------------------------------------------------------------------------------- stepped one by one


class Once(mujoco_batch.WalkerBatch):
    """A batch with one wrong number: the reward of a step, or an end that is missed."""

    wrong = ""

    def _reward_and_end(self, *given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        reward, ends = super()._reward_and_end(*given)
        if self.wrong == "reward" and self._steps[0] == 7:
            reward[0] = np.nextafter(reward[0], 9)
        if self.wrong == "end":
            ends = ends & (self._steps > 30)
        return reward, ends


@pytest.mark.parametrize("wrong", ["", "reward", "end"])
def test_one_wrong_number_is_found_before_the_batch_is_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Once, "wrong", wrong)
    monkeypatch.setitem(mujoco_batch.TASKS, "gymnasium.envs.mujoco.hopper_v5:HopperEnv", Once)
    monkeypatch.setattr(batches, "_compared", set())
    env = VectorGymEnv("Hopper-v5", 3, seed=2)
    if not wrong:
        assert env.simulators.stepped == "3 copies in one batch"
        other = VectorGymEnv("Hopper-v5", 3, kwargs={"healthy_z_range": (0.9, 2.0)})
        assert "batch" in other.simulators.stepped
        assert len(batches._compared) == 2, "other arguments are compared again"
        return
    assert env.simulators.stepped.startswith(
        "3 copies one by one (a batch differs from Gymnasium in step "
    )
    right = VectorGymEnv("Hopper-v5", 3, seed=2, batch=False)
    assert env.reset_native().tobytes() == right.reset_native().tobytes()
    assert played(env, 30) == played(right, 30)


def hopper(**more: Any) -> gymnasium.Env:
    return gymnasium.make("Hopper-v5", **more)


def test_what_a_batch_cannot_serve_is_stepped_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def stepped(env_id: str = "Hopper-v5", copies: int = 2, **how: Any) -> str:
        return VectorGymEnv(env_id, copies, **how).simulators.stepped

    cost = "; a batch would take about 2/3 of the time)"
    assert stepped("Blackjack-v1") == "2 copies one by one"
    assert stepped("Ant-v5") == "2 copies one by one (Ant-v5 has no batch)"
    assert stepped(copies=1) == "one copy"
    wrapped = stepped(make=lambda: TransformReward(hopper(), lambda r: r))
    assert wrapped == f"2 copies one by one (no batch with TransformReward{cost}"
    drawn = stepped(kwargs={"render_mode": "rgb_array"})
    assert drawn == f"2 copies one by one (no batch with render_mode=rgb_array{cost}"
    own = CustomEnvConfig(name="custom", target=f"{__name__}:hopper", num_envs=2)
    assert make_copies(own, seed=0).simulators.stepped == "2 copies one by one"
    assert "batch" in make_copies(gym("Hopper-v5", 2), seed=0).simulators.stepped
    monkeypatch.setitem(sys.modules, "mujoco.batch", None)  # as with MuJoCo 3
    assert "one by one (a batch raises an error: " in stepped()


WRAPPED = "env.wrappers=[{target: gymnasium.wrappers:ClipReward, args: {max_reward: 1}}]"
HOW = (
    "collector=vector, 2 copies one by one (no batch with ClipReward; a batch would take about 2/3 "
    "of the time), policy in torch"
)


@pytest.mark.integration
def test_a_run_says_what_collected_it(capsys: Any) -> None:
    words = (WRAPPED, "actor.activation=gelu")
    klrl.run(*QUICK, "env=hopper", "eval.final=0", *words, folder=Path("run"))
    assert json.loads(Path("run/manifest.json").read_text())["collector"] == HOW
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    sampling, all_ = (
        sum(row.get(f"time/{name}", 0) for row in rows) for name in ("sampling", "iteration")
    )
    cost = f"{sampling / 128 * 1e6:,.0f} us per frame, {sampling / all_:.0%} of the time"
    said = capsys.readouterr().out.splitlines()
    assert f"rollouts: {HOW}" in said
    assert f"  rollouts: {HOW}: {cost}" in said
