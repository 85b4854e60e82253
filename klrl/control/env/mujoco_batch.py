"""MuJoCo's tasks in batches: its ``Batch`` steps N simulations in one call.

Of Gymnasium's time for a step, its Python code for observation, reward and end takes a third. Ant
and Humanoid have no batch, since they read contact forces that a ``Batch`` does not compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
import torch

from klrl.control.env.batch import Array, Batch


class MujocoBatch(Batch):
    """Simulations of one task; this base class itself serves HalfCheetah and Swimmer.

    The reward is w_forward dx/dt - w_ctrl |a|^2 for position x and action a; no episode terminates.
    """

    def __init__(
        self, task: Any, count: int, limit: float | Array, threads: int | None = None
    ) -> None:
        from mujoco.batch import Batch as Simulations  # requires MuJoCo 4

        super().__init__(task, count, limit)
        # The results are equal for any number of threads. An evaluation may have few copies.
        threads = min(threads or torch.get_num_threads(), count)
        batch = Simulations(task.model, count, nthread=threads)
        self._batch, self._dt = batch, task.dt
        self._qpos, self._qvel, self._ctrl = map(batch.bind, ("qpos", "qvel", "ctrl"))
        self._find()

    def _find(self) -> None:
        """Set the views and constants that a step needs for this task."""
        self._shown = self._qpos[:, self._task.observation_structure["skipped_qpos"] :]

    def begin(self, copy: int) -> None:
        """Begin an episode of a copy in the current state of ``task``, which was just reset."""
        super().begin(copy)
        row, everything = self._batch.state[copy], mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_getState(self._task.model, self._task.data, row, everything)

    def _advance(self, actions: Array, mask: Array | None) -> tuple[Sequence[Array], Array, Array]:
        before = self._qpos[:, 0].copy()
        self._ctrl[:] = actions
        self._batch.step(mask, nstep=self._task.frame_skip)
        return self._observed(), *self._reward_and_end(before, actions)

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
