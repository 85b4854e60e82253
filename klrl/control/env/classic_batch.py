"""Gymnasium's classic control in batches: its equations, for all copies at once.

Equal bits need equal functions. Of a numpy scalar, ``x**2`` is C's ``pow``, but of an array it is
``x * x``; MountainCar calls :mod:`math`. ``np.clip`` of an array takes three times as long as
``np.minimum`` and ``np.maximum``, whose results are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from klrl.control.env.batch import Array, Batch

Parts = tuple[Sequence[Array], Array, Array]


def _squares(x: Array) -> Array:
    """Compute ``x**2`` as for scalars of its dtype."""
    numbers = x.ravel()
    squares = [each**2 for each in (numbers.tolist() if x.dtype == float else numbers)]
    return np.array(squares).reshape(x.shape)


class ClassicBatch(Batch):
    """Tasks whose state is ``task.state``: here [S, N], for all copies."""

    compared = 8
    _size = 2  # S

    def __init__(
        self, task: Any, count: int, limit: float | Array, threads: int | None = None
    ) -> None:
        super().__init__(task, count, limit, threads)
        self._state = np.zeros((self._size, count))

    def begin(self, copy: int) -> None:
        """Begin an episode of a copy in the current state of ``task``, which was just reset."""
        super().begin(copy)
        self._state[:, copy] = self._task.state

    def _set(self, mask: Array | None, *state: Array) -> None:
        """Set the state of all copies, or of those in ``mask``."""
        if mask is None:
            self._state = np.array(state)
        else:
            np.copyto(self._state, state, where=mask)


class PendulumBatch(ClassicBatch):
    """Pendulum: angle th, velocity v, torque u, which is within its bounds."""

    def _advance(self, actions: Array, mask: Array | None) -> Parts:
        task, (th, v), u = self._task, self._state, actions[:, 0]
        angle = (th + np.pi) % (2 * np.pi) - np.pi
        effort = [float(0.001 * each**2) for each in u]  # in float32, as a scalar's
        terms = zip(angle.tolist(), v.tolist(), effort, strict=True)
        cost = np.array([a**2 + 0.1 * w**2 + e for a, w, e in terms])
        gravity, torque = 3 * task.g / (2 * task.l), 3.0 / (task.m * task.l**2)
        v = v + (gravity * np.sin(th) + torque * u) * task.dt
        v = np.minimum(np.maximum(v, -task.max_speed), task.max_speed)
        th = th + v * task.dt
        self._set(mask, th, v)
        return (np.array([np.cos(th), np.sin(th), v]).T,), -cost, self._never


class CartPoleBatch(ClassicBatch):
    """CartPole (Barto, Sutton and Anderson 1983) by Euler's method: position x, angle th."""

    _size = 4

    def _advance(self, actions: Array, mask: Array | None) -> Parts:
        task, (x, v, th, w) = self._task, self._state
        force = np.where(actions == 1, task.force_mag, -task.force_mag)
        cos, sin = np.cos(th), np.sin(th)
        temp = (force + task.polemass_length * np.square(w) * sin) / task.total_mass
        inertia = task.length * (4.0 / 3.0 - task.masspole * np.square(cos) / task.total_mass)
        w_dot = (task.gravity * sin - cos * temp) / inertia
        v_dot = temp - task.polemass_length * w_dot * cos / task.total_mass
        x, th = x + task.tau * v, th + task.tau * w
        self._set(mask, x, v + task.tau * v_dot, th, w + task.tau * w_dot)
        fell = (np.abs(x) > task.x_threshold) | (np.abs(th) > task.theta_threshold_radians)
        reward = 0.0 - fell if task._sutton_barto_reward else np.ones(self.count)
        return (self._state.T,), reward, fell


class MountainCarBatch(ClassicBatch):
    """MountainCar (Moore 1990): position x, velocity v."""

    def _advance(self, actions: Array, mask: Array | None) -> Parts:
        task, (x, v) = self._task, self._state
        slope = np.array([math.cos(each) for each in (3 * x).tolist()])
        v = v + ((actions - 1) * task.force + slope * -task.gravity)
        v = np.minimum(np.maximum(v, -task.max_speed), task.max_speed)
        x = np.minimum(np.maximum(x + v, task.min_position), task.max_position)
        v[(x == task.min_position) & (v < 0)] = 0
        self._set(mask, x, v)
        arrived = (x >= task.goal_position) & (v >= task.goal_velocity)
        return (self._state.T,), np.full(self.count, -1.0), arrived


class AcrobotBatch(ClassicBatch):
    """Acrobot (Sutton 1996) by a Runge-Kutta step of fourth order; angles a, b, velocities v, w."""

    _size = 4

    def _advance(self, actions: Array, mask: Array | None) -> Parts:
        task, y, dt = self._task, self._state, self._task.dt
        torque = np.array(task.AVAIL_TORQUE)[actions]
        k1 = self._slope(y, torque)
        k2 = self._slope(y + dt / 2.0 * k1, torque)
        k3 = self._slope(y + dt / 2.0 * k2, torque)
        k4 = self._slope(y + dt * k3, torque)
        a, b, v, w = y + dt / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        a, b = _wrapped(a), _wrapped(b)
        v = np.minimum(np.maximum(v, -task.MAX_VEL_1), task.MAX_VEL_1)
        w = np.minimum(np.maximum(w, -task.MAX_VEL_2), task.MAX_VEL_2)
        self._set(mask, a, b, v, w)
        high = -np.cos(a) - np.cos(b + a) > 1.0
        seen = np.array([np.cos(a), np.sin(a), np.cos(b), np.sin(b), v, w])
        return (seen.T,), high - 1.0, high

    def _slope(self, state: Array, torque: Array) -> Array:
        """Compute the time derivative of a state [4, N], in Gymnasium's names and order."""
        task, (th1, th2, v1, v2), g = self._task, state, 9.8
        m1, m2, l1 = task.LINK_MASS_1, task.LINK_MASS_2, task.LINK_LENGTH_1
        lc1, lc2, moment = task.LINK_COM_POS_1, task.LINK_COM_POS_2, task.LINK_MOI
        cos, sin, (v1_2, v2_2) = np.cos(th2), np.sin(th2), _squares(state[2:])
        d1 = m1 * lc1**2 + m2 * (l1**2 + lc2**2 + 2 * l1 * lc2 * cos) + moment + moment
        d2 = m2 * (lc2**2 + l1 * lc2 * cos) + moment
        phi2 = m2 * lc2 * g * np.cos(th1 + th2 - np.pi / 2)
        phi1 = -m2 * l1 * lc2 * v2_2 * sin - 2 * m2 * l1 * lc2 * v2 * v1 * sin
        phi1 = phi1 + (m1 * lc1 + m2 * l1) * g * np.cos(th1 - np.pi / 2) + phi2
        pull = torque + d2 / d1 * phi1 - m2 * l1 * lc2 * v1_2 * sin - phi2
        dv2 = pull / (m2 * lc2**2 + moment - _squares(d2) / d1)
        return np.array([v1, v2, -(d2 * dv2 + phi1) / d1, dv2])


def _wrapped(angle: Array) -> Array:
    """Bring angles to [-pi, pi], turn by turn, which rounds unlike a remainder."""
    while (high := angle > np.pi).any():
        angle = np.where(high, angle - 2 * np.pi, angle)
    while (low := angle < -np.pi).any():
        angle = np.where(low, angle + 2 * np.pi, angle)
    return angle


_PACKAGE = "gymnasium.envs.classic_control"
#: Entry point of a task -> its batch.
TASKS = {
    f"{_PACKAGE}.acrobot:AcrobotEnv": AcrobotBatch,
    f"{_PACKAGE}.cartpole:CartPoleEnv": CartPoleBatch,
    f"{_PACKAGE}.mountain_car:MountainCarEnv": MountainCarBatch,
    f"{_PACKAGE}.pendulum:PendulumEnv": PendulumBatch,
}
