"""Step all copies of a MuJoCo task in one call, equal to the bit to Gymnasium's own steps.

Gymnasium steps one simulation at a time and computes its observation, reward and end in Python,
which takes half as long as the simulation. MuJoCo's Batch steps N simulations in one call, and the
rest is computed here for all of them at once. The first steps of every batch are compared with
Gymnasium's. Ant, Humanoid and HumanoidStandup read contact forces that a Batch does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from klrl.base.errors import first_line

Array = np.ndarray
#: Copies and steps that are compared with Gymnasium's.
_COPIES, _STEPS = 2, 128


class Unbatched(Exception):
    """Why the copies are stepped one by one."""


def batch_of(make: Callable[[], gymnasium.Env], env: gymnasium.Env, count: int) -> MujocoBatch:
    """``count`` simulations of a MuJoCo environment, as ``make`` made it; they are compared first.

    Raises:
        Unbatched: the steps would not be, or are not, those of Gymnasium.
    """
    if count == 1:
        raise Unbatched("a single copy gains nothing")
    kind = _TASKS.get(env.unwrapped.spec.entry_point)
    if kind is None:
        raise Unbatched(f"{env.unwrapped.spec.id} has no batch")
    why = "" if env.render_mode is None else f"render_mode={env.render_mode}"
    inner = env
    while isinstance(inner, gymnasium.Wrapper):
        if type(inner) not in (TimeLimit, OrderEnforcing, PassiveEnvChecker):
            why = f"{type(inner).__name__} wraps them"
        inner = inner.env
    try:
        if not why:
            batch = kind(env, count)
            why = _difference(batch, env, [make() for _ in range(_COPIES)])
    except Exception as error:  # of an older MuJoCo, or of a model that a Batch refuses
        why = f"a batch fails: {first_line(error)}"
    if why:
        raise Unbatched(f"{why}; a batch takes about two thirds of the time")
    return batch


def _difference(batch: MujocoBatch, env: gymnasium.Env, own: Sequence[gymnasium.Env]) -> str:
    """Where the first copies of a batch differ from Gymnasium's; empty if they do not."""
    count, space = batch.count, env.action_space
    answers = np.zeros((count, *env.observation_space.shape)), *np.zeros((3, count))
    mask, seeds = np.arange(count) < len(own), iter(range(len(own) * (_STEPS + 1)))
    space.seed(0)
    ended = [True] * len(own)
    for step in range(1, _STEPS + 1):
        for i, each in enumerate(own):
            if ended[i]:
                seed = next(seeds)
                each.reset(seed=seed)
                env.reset(seed=seed)
                batch.begin(i)
        actions = np.stack([space.sample() for _ in range(count)])
        batch.step(actions, mask, answers)
        for i, each in enumerate(own):
            told = each.step(actions[i])[:4]
            ended[i] = told[2] or told[3]
            for mine, theirs in zip(answers, told, strict=True):
                if mine[i].tobytes() != np.asarray(theirs, mine.dtype).tobytes():
                    return f"a batch differs from Gymnasium in step {step}"
    return ""


class MujocoBatch:
    """Simulations of a task. The environment resets them, one at a time."""

    def __init__(self, env: gymnasium.Env, count: int) -> None:
        from mujoco.batch import Batch  # since MuJoCo 4

        self.count = count
        self._task: Any = env.unwrapped
        # The results are equal for any number of threads.
        batch = self._batch = Batch(self._task.model, count, nthread=torch.get_num_threads())
        self._qpos, self._qvel, self._ctrl = map(batch.bind, ("qpos", "qvel", "ctrl"))
        self._dt, self._never = self._task.dt, np.zeros(count, bool)
        self._steps, self._limit = np.zeros(count, np.int64), np.inf
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, TimeLimit):
                self._limit = env._max_episode_steps
            env = env.env

    def begin(self, copy: int) -> None:
        """Begin an episode of a copy in the environment's state, which was just reset."""
        row, everything = self._batch.state[copy], mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_getState(self._task.model, self._task.data, row, everything)
        self._steps[copy] = 0

    def step(self, actions: Array, mask: Array | None, answers: Sequence[Array]) -> None:
        """Step all copies, or those of a mask [N], with actions [N, A].

        ``answers``: observation [N, D], reward, terminated, truncated [N]; the results go there.
        """
        stepped = slice(None) if mask is None else mask
        before = self._qpos[:, 0].copy()
        self._ctrl[:] = actions
        self._batch.step(mask, nstep=self._task.frame_skip)
        self._steps[stepped] += 1
        observations, *others = answers
        position, velocity = self._observed()
        size = position.shape[1]
        observations[stepped, :size] = position[stepped]
        observations[stepped, size:] = velocity[stepped]
        results = *self._judged(before, actions), self._steps >= self._limit
        for answer, result in zip(others, results, strict=True):
            answer[stepped] = result[stepped]

    def _observed(self) -> tuple[Array, Array]:
        """The two parts of the observation, [N, .]."""
        return self._qpos, self._qvel

    def _judged(self, before: Array, actions: Array) -> tuple[Array, Array]:
        """Reward and terminated [N]; ``before`` is the first coordinate [N] before the step."""
        raise NotImplementedError


class PendulumBatch(MujocoBatch):
    """InvertedPendulum-v5: 1 for each step after which it stands."""

    def _judged(self, before: Array, actions: Array) -> tuple[Array, Array]:
        finite = np.isfinite(self._qpos).all(1) & np.isfinite(self._qvel).all(1)
        stands = finite & ~(np.abs(self._qpos[:, 1]) > 0.2)
        return stands.astype(np.float64), ~stands


class RunnerBatch(MujocoBatch):
    """HalfCheetah-v5, Swimmer-v5: w_forward dx/dt - w_ctrl |a|^2."""

    def __init__(self, env: gymnasium.Env, count: int) -> None:
        super().__init__(env, count)
        self._shown = self._qpos[:, self._task.observation_structure["skipped_qpos"] :]

    def _observed(self) -> tuple[Array, Array]:
        return self._shown, self._qvel

    def _judged(self, before: Array, actions: Array) -> tuple[Array, Array]:
        return self._forward(before) - self._cost(actions), self._never

    def _forward(self, before: Array) -> Array:
        return self._task._forward_reward_weight * ((self._qpos[:, 0] - before) / self._dt)

    def _cost(self, actions: Array) -> Array:
        return self._task._ctrl_cost_weight * np.square(actions).sum(1)  # in float32


class WalkerBatch(RunnerBatch):
    """Walker2d-v5: w_healthy more while height and angle are in their ranges."""

    def __init__(self, env: gymnasium.Env, count: int) -> None:
        super().__init__(env, count)
        task = self._task
        self._low, self._high = np.transpose([task._healthy_z_range, task._healthy_angle_range])

    def _observed(self) -> tuple[Array, Array]:
        return self._shown, np.minimum(np.maximum(self._qvel, -10), 10)

    def _judged(self, before: Array, actions: Array) -> tuple[Array, Array]:
        state = self._ranged()
        healthy = ((self._low < state) & (state < self._high)).all(1)
        reward = self._forward(before) + healthy * self._task._healthy_reward - self._cost(actions)
        return reward, ~healthy if self._task._terminate_when_unhealthy else self._never

    def _ranged(self) -> Array:
        """What has a range, [N, .]."""
        return self._qpos[:, 1:3]


class HopperBatch(WalkerBatch):
    """Hopper-v5: all of its state but x and height is in one more range."""

    def __init__(self, env: gymnasium.Env, count: int) -> None:
        super().__init__(env, count)
        low, high = self._task._healthy_state_range
        more = self._qpos.shape[1] + self._qvel.shape[1] - 3
        self._low = np.append(np.maximum(self._low, [-np.inf, low]), [low] * more)
        self._high = np.append(np.minimum(self._high, [np.inf, high]), [high] * more)

    def _ranged(self) -> Array:
        return np.concatenate((self._qpos[:, 1:], self._qvel), 1)


_TASKS = {
    "gymnasium.envs.mujoco.half_cheetah_v5:HalfCheetahEnv": RunnerBatch,
    "gymnasium.envs.mujoco.hopper_v5:HopperEnv": HopperBatch,
    "gymnasium.envs.mujoco.inverted_pendulum_v5:InvertedPendulumEnv": PendulumBatch,
    "gymnasium.envs.mujoco.swimmer_v5:SwimmerEnv": RunnerBatch,
    "gymnasium.envs.mujoco.walker2d_v5:Walker2dEnv": WalkerBatch,
}
