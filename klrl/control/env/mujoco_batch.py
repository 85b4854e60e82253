"""Step all copies of a MuJoCo task in one call; results equal Gymnasium's to the bit.

Gymnasium steps one simulation at a time; its Python code for observation, reward and end takes half
as long as the simulation itself. MuJoCo's Batch steps N simulations in one call; this module
then computes observations, rewards and flags for all copies at once. The first batch of each
environment in a process is checked: 128 steps of two copies are compared with Gymnasium's. Ant and
Humanoid have no batch, since they read contact forces that a Batch does not compute.
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
from klrl.control.env.contract import wrappers_of

Array = np.ndarray
#: How many copies of a batch, and how many steps of each, are compared with Gymnasium's.
_COPIES, _STEPS = 2, 128
#: Specs of environments whose batch has passed the comparison in this process.
_compared: set[str] = set()


def batch_of(
    make: Callable[[], gymnasium.Env], env: gymnasium.Env, count: int
) -> MujocoBatch | str:
    """Return a batch of ``count`` simulations of ``env``, or the reason why there is none.

    The batch is compared with Gymnasium's steps of environments that ``make`` makes.
    """
    kind = TASKS.get(env.unwrapped.spec.entry_point)
    if kind is None:
        return f"{env.unwrapped.spec.id} has no batch"
    why = "" if env.render_mode is None else f"no batch with render_mode={env.render_mode}"
    limit = np.inf
    for wrapper in wrappers_of(env):
        if type(wrapper) is TimeLimit:
            limit = min(limit, wrapper.spec.max_episode_steps)
        elif type(wrapper) not in (OrderEnforcing, PassiveEnvChecker):
            why = f"no batch with {type(wrapper).__name__}"
    try:
        if not why:
            batch = kind(env.unwrapped, count, limit)
            if (known := repr(env.spec)) not in _compared:
                why = _difference(batch, env, [make() for _ in range(_COPIES)])
    except Exception as error:  # MuJoCo may be too old, or a Batch may refuse the model
        why = f"a batch raises an error: {first_line(error)}"
    if why:
        return f"{why}; a batch would take about 2/3 of the time"
    _compared.add(known)
    return batch


def _difference(batch: MujocoBatch, env: gymnasium.Env, own: Sequence[gymnasium.Env]) -> str:
    """Describe where the batch's steps first differ from those of ``own``; empty if they do not."""
    count, space = batch.count, env.action_space
    results = np.zeros((count, *env.observation_space.shape)), *np.zeros((3, count))
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
        actions = np.resize([space.sample() for _ in own], (count, *space.shape))
        batch.step(actions, mask, results)
        for i, each in enumerate(own):
            expected = each.step(actions[i])[:4]
            ended[i] = expected[2] or expected[3]
            for mine, theirs in zip(results, expected, strict=True):
                if mine[i].tobytes() != np.asarray(theirs, mine.dtype).tobytes():
                    return f"a batch differs from Gymnasium in step {step}"
    return ""


class MujocoBatch:
    """Simulations of one task; this base class itself serves HalfCheetah and Swimmer.

    The reward is w_forward dx/dt - w_ctrl |a|^2 for position x and action a; no episode terminates.
    To begin an episode, the caller resets ``task``; :meth:`begin` then copies its state.
    """

    def __init__(self, task: Any, count: int, limit: float) -> None:
        from mujoco.batch import Batch  # requires MuJoCo 4

        self.count, self._limit = count, limit
        # The results are equal for any number of threads.
        batch = Batch(task.model, count, nthread=torch.get_num_threads())
        self._task, self._batch, self._dt = task, batch, task.dt
        self._qpos, self._qvel, self._ctrl = map(batch.bind, ("qpos", "qvel", "ctrl"))
        self._never, self._steps = np.zeros(count, bool), np.zeros(count, np.int64)
        self._find()

    def _find(self) -> None:
        """Set the views and constants that :meth:`step` needs for this task."""
        self._shown = self._qpos[:, self._task.observation_structure["skipped_qpos"] :]

    def begin(self, copy: int) -> None:
        """Begin an episode of a copy in the current state of ``task``, which was just reset."""
        row, everything = self._batch.state[copy], mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_getState(self._task.model, self._task.data, row, everything)
        self._steps[copy] = 0

    def step(self, actions: Array, mask: Array | None, results: Sequence[Array]) -> None:
        """Step all copies, or those in ``mask`` [N], with actions [N, A].

        Overwrites ``results``: observation [N, D], reward, terminated, truncated [N].
        """
        stepped = slice(None) if mask is None else mask
        before = self._qpos[:, 0].copy()
        self._ctrl[:] = actions
        self._batch.step(mask, nstep=self._task.frame_skip)
        self._steps[stepped] += 1
        observations, *others = results
        end = 0
        for part in self._observed():
            start, end = end, end + part.shape[1]
            observations[stepped, start:end] = part[stepped]
        found = *self._reward_and_end(before, actions), self._steps >= self._limit
        for result, value in zip(others, found, strict=True):
            result[stepped] = value[stepped]

    def _observed(self) -> Sequence[Array]:
        """Return the parts [N, ...] of the observation."""
        return self._shown, self._qvel

    def _reward_and_end(self, before: Array, actions: Array) -> tuple[Array, Array]:
        """Compute reward and terminated, rounded as in Gymnasium; ``before``: x before the step."""
        return self._progress(before) - self._effort(actions), self._never

    def _progress(self, before: Array) -> Array:
        return self._task._forward_reward_weight * ((self._qpos[:, 0] - before) / self._dt)

    def _effort(self, actions: Array) -> Array:
        return self._task._ctrl_cost_weight * np.square(actions).sum(1)


class WalkerBatch(MujocoBatch):
    """Hopper and Walker2d: the reward includes w_healthy while the walker is healthy.

    It is healthy if all state variables are in their ranges. An episode ends when it is not, unless
    the task disables this. Observed velocities are clipped to +-10.
    """

    def _find(self) -> None:
        """Set the healthy ranges of qpos (without x) and qvel."""
        super()._find()
        task = self._task
        size = task.model.nq + task.model.nv - 3
        rest = getattr(task, "_healthy_state_range", (-np.inf, np.inf))  # only Hopper has it
        z, angle = task._healthy_z_range, task._healthy_angle_range
        both = max(angle[0], rest[0]), min(angle[1], rest[1])
        self._low, self._high = np.array([z, both, *[rest] * size]).T

    def _observed(self) -> Sequence[Array]:
        return self._shown, np.minimum(np.maximum(self._qvel, -10), 10)

    def _reward_and_end(self, before: Array, actions: Array) -> tuple[Array, Array]:
        state = np.concatenate((self._qpos[:, 1:], self._qvel), 1)
        healthy = ((self._low < state) & (state < self._high)).all(1)
        reward = self._progress(before) + healthy * self._task._healthy_reward
        ends = ~healthy if self._task._terminate_when_unhealthy else self._never
        return reward - self._effort(actions), ends


class ReacherBatch(MujocoBatch):
    """Reacher: the reward is -w_dist |fingertip - target| - w_control |a|^2 for action a."""

    def _find(self) -> None:
        """View the positions of fingertip and target; as in Gymnasium, they lag by a substep."""
        places, model = self._batch.bind("xpos"), self._task.model
        self._tip, self._target = (places[:, model.body(x).id] for x in ("fingertip", "target"))

    def _observed(self) -> Sequence[Array]:
        angles, apart = self._qpos[:, :2], self._tip - self._target
        return np.cos(angles), np.sin(angles), self._qpos[:, 2:], self._qvel[:, :2], apart[:, :2]

    def _reward_and_end(self, before: Array, actions: Array) -> tuple[Array, Array]:
        apart, task = self._tip - self._target, self._task
        reward = -np.sqrt(np.vecdot(apart, apart)) * task._reward_dist_weight
        return reward - np.square(actions).sum(1) * task._reward_control_weight, self._never


_PACKAGE = "gymnasium.envs.mujoco"
#: Entry point of a task -> its batch.
TASKS = {
    f"{_PACKAGE}.half_cheetah_v5:HalfCheetahEnv": MujocoBatch,
    f"{_PACKAGE}.hopper_v5:HopperEnv": WalkerBatch,
    f"{_PACKAGE}.reacher_v5:ReacherEnv": ReacherBatch,
    f"{_PACKAGE}.swimmer_v5:SwimmerEnv": MujocoBatch,
    f"{_PACKAGE}.walker2d_v5:Walker2dEnv": WalkerBatch,
}
