"""Step all copies of a task in one call; results equal Gymnasium's to the bit.

Gymnasium steps one simulation at a time, and its Python code takes most of this time. A batch
computes observations, rewards and ends of all copies at once. The first batch of each environment
in a process is checked: 256 steps of some copies are compared with Gymnasium's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from klrl.base.errors import first_line
from klrl.control.env.contract import wrappers_of

Array = np.ndarray
#: Package of an entry point -> the module with its batches, and their part of the time, in words.
_MODULES = {
    "gymnasium.envs.mujoco": ("klrl.control.env.mujoco_batch", "2/3"),
    "gymnasium.envs.classic_control": ("klrl.control.env.classic_batch", "1/3"),
}
#: The comparison with Gymnasium: so many steps of ``Batch.compared`` copies, with these limits of
#: steps in turn. Copies with the first limit act at random, and most are truncated. The others act
#: along their last observed number, a velocity, which ends MountainCar and Acrobot in 200 steps.
_STEPS, _LIMITS = 256, (16, 200)
#: Specs of environments whose batch has passed the comparison in this process.
_compared: set[str] = set()


def batch_of(
    make: Callable[[], gymnasium.Env], env: gymnasium.Env, count: int, threads: int | None = None
) -> Batch | str:
    """Return a batch of ``count`` simulations of ``env``, or the reason why there is none.

    The reason is empty for environments other than Gymnasium's own. The batch is compared with
    Gymnasium's steps of environments that ``make`` makes.
    """
    entry = str(getattr(env.unwrapped.spec, "entry_point", ""))
    if (package := entry.rpartition(".")[0]) not in _MODULES:
        return ""
    module, part = _MODULES[package]
    why = "" if env.render_mode is None else f"no batch with render_mode={env.render_mode}"
    limit = np.inf
    for wrapper in wrappers_of(env):
        if type(wrapper) is TimeLimit:
            limit = min(limit, wrapper.spec.max_episode_steps)
        elif type(wrapper) not in (OrderEnforcing, PassiveEnvChecker):
            why = f"no batch with {type(wrapper).__name__}"
    try:
        tasks: Mapping[str, type[Batch]] = import_module(module).TASKS
        if (kind := tasks.get(entry)) is None:
            return f"{env.unwrapped.spec.id} has no batch"
        if not why:
            if (known := repr(env.spec)) not in _compared:
                limits = np.minimum(np.resize(_LIMITS, kind.compared), limit)
                own = [TimeLimit(make(), int(each)) for each in limits]
                why = _difference(kind(env.unwrapped, len(own), limits), env, own)
            batch = kind(env.unwrapped, count, limit, threads)
    except Exception as error:  # MuJoCo may be too old, or a Batch may refuse the model
        why = f"a batch raises an error: {first_line(error)}"
    if why:
        return f"{why}; a batch would take about {part} of the time"
    _compared.add(known)
    return batch


def _difference(batch: Batch, env: gymnasium.Env, own: Sequence[gymnasium.Env]) -> str:
    """Describe where the batch's steps first differ from those of ``own``; empty if they do not."""
    results = np.zeros((len(own), *env.observation_space.shape)), *np.zeros((3, len(own)))
    space, seeds = env.action_space, iter(range(len(own) * (_STEPS + 1)))
    box = isinstance(space, gymnasium.spaces.Box)
    low, high = (space.low, space.high) if box else (0, space.n - 1)
    space.seed(0)
    ended = [True] * len(own)
    for step in range(1, _STEPS + 1):
        for i, each in enumerate(own):
            if ended[i]:
                seed = next(seeds)
                each.reset(seed=seed)
                results[0][i] = env.reset(seed=seed)[0]
                batch.begin(i)
        actions = np.array([space.sample() for _ in own])
        actions[1::2] = np.where(results[0][1::2, -1:] > 0, high, low).reshape(actions[1::2].shape)
        batch.step(actions, None, results)
        for i, each in enumerate(own):
            expected = each.step(actions[i])[:4]
            ended[i] = expected[2] or expected[3]
            for mine, theirs in zip(results, map(np.asarray, expected), strict=True):
                if mine[i].astype(theirs.dtype).tobytes() != theirs.tobytes():
                    return f"a batch differs from Gymnasium in step {step}"
    return ""


class Batch(ABC):
    """``count`` simulations of ``task``, an episode of which has at most ``limit`` steps.

    ``threads``: of the simulator, if it has any; None is torch's number. They change no result.

    To begin an episode, the caller resets ``task``; :meth:`begin` then copies its state.
    """

    #: The number of copies in the comparison with Gymnasium.
    compared = 2

    def __init__(
        self, task: Any, count: int, limit: float | Array, threads: int | None = None
    ) -> None:
        self.count, self._task, self._limit = count, task, limit
        self._never, self._steps = np.zeros(count, bool), np.zeros(count, np.int64)

    def begin(self, copy: int) -> None:
        """Begin an episode of a copy in the current state of ``task``, which was just reset."""
        self._steps[copy] = 0

    def step(self, actions: Array, mask: Array | None, results: Sequence[Array]) -> None:
        """Step all copies, or those in ``mask`` [N], with actions [N, A] or [N].

        Overwrites ``results``: observation [N, D], reward, terminated, truncated [N].
        """
        stepped = slice(None) if mask is None else mask
        parts, *found = self._advance(actions, mask)
        self._steps[stepped] += 1
        observations, *others = results
        end = 0
        for part in parts:
            start, end = end, end + part.shape[1]
            observations[stepped, start:end] = part[stepped]
        for result, value in zip(others, (*found, self._steps >= self._limit), strict=True):
            result[stepped] = value[stepped]

    @abstractmethod
    def _advance(self, actions: Array, mask: Array | None) -> tuple[Sequence[Array], Array, Array]:
        """Step; return the parts [N, ...] of the observation, the reward and terminated [N]."""
