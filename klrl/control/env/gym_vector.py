"""Environments of ``gymnasium.vector``, and others with its interface, as simulators.

A library resets a copy in the step that ends its episode (SAME_STEP), in the next step (NEXT_STEP),
or when it is told to (DISABLED). klrl needs the last observation of the old episode, the first of
the new one, and no step in between: the first mode gives both, and DISABLED by ``reset_mask``.
NEXT_STEP spends a step on the reset, unless ``reset`` takes the ids of copies, as EnvPool's does.

Imports no torch.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from klrl.base.errors import ConfigError
from klrl.control.env.contract import Misfit, batch_conversion
from klrl.control.env.library import Library
from klrl.control.env.simulators import Array, Results


class GymVector(Library):
    """A ``gymnasium.vector.VectorEnv``."""

    def __init__(self, setting: str, env: VectorEnv) -> None:
        spaces = env.single_observation_space, env.single_action_space
        super().__init__(setting, env, env.num_envs, spaces, env.unwrapped)
        mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        if not isinstance(mode, AutoresetMode):
            raise ConfigError(
                f"{setting}: its metadata has autoreset_mode={mode!r}; give a member of "
                "gymnasium.vector.AutoresetMode"
            )
        self._ids = "env_id" in inspect.signature(env.reset).parameters
        self._same_step = mode is AutoresetMode.SAME_STEP
        if mode is AutoresetMode.NEXT_STEP and not self._ids:
            raise ConfigError(
                f"{setting}: returned a {type(env).__name__} that spends a step on each reset "
                "(AutoresetMode.NEXT_STEP); build it with autoreset_mode=SAME_STEP"
            )
        self._converted = batch_conversion(env.single_action_space)
        self.stepped = f"{self.count} copies in a {type(env).__name__}"
        self.longest_episode = getattr(env.spec, "max_episode_steps", None)
        self.pictures_per_second = float(env.metadata.get("render_fps", 30))
        self._seen: Array = np.empty(0)  # the running episodes' observations

    def _begin(self, seed: int) -> Array:
        # EnvPool's seeds are arguments of envpool.make.
        how = {} if self._ids else {"seed": seed}
        self._seen = self._packed(self.env.reset(**how)[0])
        return self._seen

    def _reset(self, mask: Array) -> Array:
        if self._ids:
            begun = self._packed(self.env.reset(np.flatnonzero(mask).astype(np.int32))[0])
            self._seen = self._seen.copy()
            self._seen[mask] = begun
        elif not self._same_step:
            kept = self._seen[~mask].copy()
            self._seen = self._packed(self.env.reset(options={"reset_mask": mask.copy()})[0])
            if (self._seen[~mask] != kept).any():
                raise Misfit('reset(options={"reset_mask": ...}) changed copies outside the mask')
        return self._seen

    def step(self, action: Array, mask: Array | None = None) -> Results:
        """Step all copies."""
        seen, *told, info = self.env.step(self._converted(action))
        reward, terminated, truncated = map(np.asarray, told)
        named = {"reward": reward, "terminated": terminated, "truncated": truncated}
        for name, value in named.items():
            if value.shape != (self.count,):
                raise Misfit(f"{name} has shape {value.shape}; one per copy is expected")
            if name != "reward" and value.dtype != bool:
                raise Misfit(f"{name} has {value.dtype}; bool is expected")
        ended = terminated | truncated
        after = self._seen = self._packed(seen, ended)
        if self._same_step and ended.any():
            after = self._last(after.copy(), info, ended)
        return after, reward, terminated, truncated

    def _last(self, after: Array, info: dict[str, Any], ended: Array) -> Array:
        """Put the last observations of the ``ended`` episodes into ``after``, if they are known."""
        last = info.get("final_obs")
        self.final = self.final and last is not None
        if isinstance(last, np.ndarray) and last.dtype == object:  # Gymnasium's: one per copy
            for i in np.flatnonzero(ended):
                after[i] = self._packed(_one(last[i]), np.ones(1, bool))[0]
        elif last is not None:
            after[ended] = self._packed(last, np.ones(self.count, bool))[ended]
        return after

    def render(self) -> object:
        """Render the first copy."""
        pictures = self.env.render()
        return None if pictures is None else pictures[0]


def _one(observation: Any) -> Any:
    """Give an observation of one copy the first dimension [1]."""
    if isinstance(observation, dict):
        return {key: _one(value) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return tuple(map(_one, observation))
    return np.asarray(observation)[None]
