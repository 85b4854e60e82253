"""The contract of N simulators that step together, and klrl's copies of a Gymnasium environment.

:func:`simulators_of` chooses how klrl steps its copies: as a batch, if
:func:`klrl.control.env.batch.batch_of` has one, else one by one. Simulators of other libraries
implement the same contract (:mod:`klrl.control.env.library`).

Imports no torch.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.wrappers import TimeLimit

from klrl.base.errors import ConfigError
from klrl.base.seeds import derived_seed
from klrl.control.env.batch import Batch, batch_of
from klrl.control.env.contract import (
    FLAGS,
    NUMBERS,
    REAL,
    conversion,
    require_flag,
    require_number,
    require_observation,
    wrappers_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from klrl.control.env.episodes import Episodes

Array = np.ndarray
#: An array of numpy on the CPU, where its calls cost less than torch's; a tensor on a device.
Native = Any
#: Observation [N, D], reward [N], terminated [N], truncated [N].
Results = tuple[Native, Native, Native, Native]


def native(values: Tensor) -> Native:
    """View a tensor's memory as an array if it is on the CPU, else return the tensor."""
    return values.numpy() if values.device.type == "cpu" else values


def functions(values: Native) -> Any:
    """Return the module with the functions of an array or a tensor: numpy or torch."""
    return np if isinstance(values, np.ndarray) else sys.modules["torch"]


def on_host(values: Native) -> Array:
    """Return an array, or a copy of a device's tensor as one."""
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


class Simulators(ABC):
    """N simulators that step together.

    Observations are flat, or packed by a layout; actions are the policy's, within their bounds.
    All are arrays, or tensors on the simulators' device if it is not the CPU. The next call may
    overwrite what a call returns.

    Attributes:
        count: N.
        device: where the simulators compute; klrl's are on the CPU.
        final: whether the observation of a step that ends an episode is the result of that step.
            Otherwise it is unknown, and a truncation bootstraps from V of the observation before.
        masks: whether ``step`` can step some of the simulators only.
        intact: whether the running episodes are those that this object began.
        stepped: how the simulators are stepped, in words.
        observation_space, action_space: the spaces of one simulator; observations are flat.
        longest_episode: steps after which a time limit ends an episode; None if none is declared.
        pictures_per_second: the frame rate for a film.
    """

    count: int
    observation_space: Space
    action_space: Space
    longest_episode: int | None = None
    pictures_per_second = 30.0
    device = "cpu"
    final = True
    masks = False
    intact = True
    stepped: str

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed all future episodes."""

    @abstractmethod
    def reset(self, mask: Native | None, seeds: Sequence[int] | None = None) -> Native:
        """Begin episodes of all simulators, or of those in ``mask`` [N]; return observations.

        The others keep their observation. ``seeds`` [N], if given, are the seeds of the episodes;
        a library with one generator for all simulators is seeded with the first.
        """

    @abstractmethod
    def step(self, action: Native, mask: Native | None = None) -> Results:
        """Step all simulators with actions [N, A] or [N]; those in ``mask`` if ``masks``."""

    def state(self) -> dict[str, Any] | None:
        """Return the state of the running episodes, to continue them; None if it is not saved."""
        return None

    def render(self) -> object:
        """Render the first simulator; None if it has no pictures."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Free the simulators."""

    def place(self) -> str:
        """Name the simulator that is being stepped or reset, for errors; empty if unknown."""
        return ""


def simulators_of(
    setting: str,
    make: Callable[[], gymnasium.Env],
    first: gymnasium.Env,
    count: int,
    flat: Callable[[gymnasium.Env], gymnasium.Env],
    *,
    batch: bool,
    threads: int | None = None,
) -> Copies:
    """Make ``count`` copies of ``first``, which ``make`` made; a batch of them if possible.

    ``setting`` names the environment in errors. ``flat`` makes an environment's observations flat.
    ``batch``: whether a batch may step them, which requires equal copies; on so many ``threads``.
    """
    stepped = f"{count} copies one by one" if count > 1 else "one copy"
    made = batch_of(make, first, count, threads) if batch and count > 1 else ""
    if not isinstance(made, str):
        # A batch needs only one environment, which is reset in turn for each copy.
        return BatchedCopies([flat(first)] * count, f"{count} copies in one batch", made)
    stepped += f" ({made})" if made else ""
    copies = [first, *(make() for _ in range(count - 1))]
    if len({id(copy.unwrapped) for copy in copies}) < count:
        raise ConfigError(
            f"{setting}: gives two copies the same environment; make a new one per call"
        )
    return Copies([flat(copy) for copy in copies], stepped)


class Copies(Simulators):
    """Copies of a Gymnasium environment with flat observations, stepped one by one."""

    masks = True

    def __init__(self, envs: Sequence[gymnasium.Env], stepped: str) -> None:
        self.envs, self.count, self.stepped = envs, len(envs), stepped
        self.observation_space, self.action_space = envs[0].observation_space, envs[0].action_space
        limits = (each for each in wrappers_of(envs[0]) if isinstance(each, TimeLimit))
        self.longest_episode = min((int(each._max_episode_steps) for each in limits), default=None)
        self.pictures_per_second = float(envs[0].metadata.get("render_fps", 30))
        seen = ("seen", self.observation_space.dtype, self.observation_space.shape)
        kept = [seen, ("reward", "f8"), ("ends", bool, 2)]
        #: The last results of each copy, a row each.
        self.rows = np.zeros(self.count, np.dtype(kept, align=True))
        ends = self.rows["ends"]
        self._results = self.rows["seen"], self.rows["reward"], ends[:, 0], ends[:, 1]
        self._converted = conversion(self.action_space)
        self._at = 0
        #: The seed of all episodes, and for each copy the number of the next.
        self.begun = (0, [0] * self.count)
        self.episodes: Episodes | None = None

    def seed(self, seed: int) -> None:
        """Derive an episode's seed from ``seed`` + copy index, and the episode's number."""
        self.begun = (seed, [0] * self.count)

    def reset(self, mask: Array | None, seeds: Sequence[int] | None = None) -> Array:
        """Begin episodes; ``seeds`` also has entries for copies that are not reset."""
        (first, numbers), observations = self.begun, self._results[0]
        shape, dtype = observations.shape[1:], observations.dtype
        for i in range(self.count) if mask is None else np.flatnonzero(mask).tolist():
            self._at = i
            if seeds is None:
                seed = derived_seed(first + i, "episode", numbers[i])
                numbers[i] += 1
            else:
                seed = seeds[i]
            observation, _info = self.envs[i].reset(seed=seed)
            require_observation(observation, shape, dtype=dtype)
            observations[i] = observation
            self._begin(i)
            if self.episodes is not None:
                self.episodes.begin(i, observations[i])
        return observations

    def _begin(self, copy: int) -> None:
        """For a batch: begin an episode of ``copy`` in the state of the environment."""

    def step(self, action: Array, mask: Array | None = None) -> Results:
        """Step the copies."""
        if (episodes := self.episodes) is not None:
            episodes.act(action)
        self._step(action if self._converted is None else self._converted(action), mask)
        if episodes is not None:
            for i in range(self.count) if mask is None else np.flatnonzero(mask):
                episodes.digests[i] = crc32(episodes.rows[i], episodes.digests[i])
        return self._results

    def _step(self, action: Any, mask: Array | None) -> None:
        observations, rewards, terminated, truncated = self._results
        shape, dtype = observations.shape[1:], observations.dtype
        kinds = REAL if dtype.kind == "f" else ""
        for i, (env, chosen) in enumerate(zip(self.envs, action, strict=True)):
            if mask is not None and not mask[i]:
                continue
            self._at = i
            observation, reward, terminal, timeout, _info = env.step(chosen)
            # This check costs 0.1 us. Without a check, numpy would accept nearly anything.
            if not (
                type(observation) is np.ndarray
                and observation.shape == shape
                and (observation.dtype == dtype or observation.dtype.kind in kinds)
                and type(reward) in NUMBERS
                and type(terminal) in FLAGS
                and type(timeout) in FLAGS
            ):
                require_observation(observation, shape, dtype=dtype)
                reward = require_number(reward)
                terminal = require_flag("terminated", terminal)
                timeout = require_flag("truncated", timeout)
            observations[i], rewards[i] = observation, reward
            terminated[i], truncated[i] = terminal, timeout

    def state(self) -> dict[str, Any] | None:
        """Return the running episodes; None if not recorded, or if one is too long to save."""
        state = None if self.episodes is None else self.episodes.state()
        if state is None:
            return None
        seed, numbers = self.begun
        return {**state, "seed": seed, "numbers": [number - 1 for number in numbers]}

    def render(self) -> object:
        """Render the first copy; requires render_mode=rgb_array."""
        self._at = 0
        return self.envs[0].render()

    def close(self) -> None:
        """Close the environments."""
        for env in self.envs:
            env.close()

    def place(self) -> str:
        """Name the copy that is being stepped or reset."""
        return f" of copy {self._at}"


class BatchedCopies(Copies):
    """Copies of a task that step as one batch; all ``envs`` are one environment, for resets."""

    def __init__(self, envs: Sequence[gymnasium.Env], stepped: str, batch: Batch) -> None:
        super().__init__(envs, stepped)
        self._batch = batch

    def _begin(self, copy: int) -> None:
        self._batch.begin(copy)

    def _step(self, action: Any, mask: Array | None) -> None:
        self._batch.step(action, mask, self._results)
