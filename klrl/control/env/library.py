"""Simulators of other libraries, which step together, and those of ``gymnasium.vector``.

:mod:`klrl.control.env.torchrl_batch` has TorchRL's. Imports no torch.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from klrl.base.errors import ConfigError
from klrl.base.seeds import derived_seed
from klrl.config import EnvConfig
from klrl.control.env.contract import Misfit, batch_conversion
from klrl.control.env.observation import Layout, ObservationPart, entry_of, entry_value
from klrl.control.env.simulators import Array, Native, Results, Simulators, functions


class Library(Simulators):
    """Simulators that a library steps together; any observations, until :meth:`prepare`.

    A library's generators are seeded when all simulators are reset. Two objects may share the
    library's ``env``, if it exists once in a process: ``once`` is then true, and the object that
    resets all simulators ends the episodes of the other.

    Args:
        setting: the name of the environment in errors.
        env: the library's object.
        inner: what ``env`` wraps, which may exist once although each wrapper is new.
        spaces: the spaces of one simulator's observations, not flat, and of its actions.
    """

    #: A library's innermost object -> a token of the :class:`Library` that began its episodes.
    _begun: ClassVar[WeakKeyDictionary[Any, object]] = WeakKeyDictionary()

    def __init__(
        self, setting: str, env: Any, count: int, spaces: tuple[Space, Space], inner: Any
    ) -> None:
        self.setting, self.env, self.count, self.inner = setting, env, count, inner
        #: What the library shows; after :meth:`prepare`, ``observation_space`` is flat.
        self.seen_space, self.action_space = spaces
        self.observation_space = spaces[0]
        self.once, self._token = inner in self._begun, object()
        self._begun.setdefault(inner, self._token)
        self._seed, self._resets = 0, 0

    def check_settings(self, config: EnvConfig, num_envs: int) -> None:
        """Refuse the settings that require separate copies, and another number of simulators."""
        if self.count not in (num_envs, config.num_envs):
            raise ConfigError(
                f"env.num_envs={config.num_envs}: {config.named} returned a batch of {self.count}; "
                f"set env.num_envs={self.count}, or let the function take num_envs"
            )
        for setting, given, remedy in (
            ("wrappers", config.wrappers, "wrap them in the function"),
            ("action_mask", config.action_mask == "info", "show action_mask in the observation"),
        ):
            if given:
                raise ConfigError(
                    f"env.{setting}: {config.named} returned simulators that step together, and "
                    f"env.{setting} acts on separate copies; {remedy}"
                )

    def select(self, keys: Sequence[str]) -> None:
        """Show some keys of a Dict observation only."""
        shown = spaces.Dict({key: self.seen_space[key] for key in keys})
        self.seen_space = self.observation_space = shown

    def prepare(self, layout: Layout | None) -> None:
        """Set how observations are packed."""
        self.layout = layout
        size = spaces.flatdim(self.seen_space) if layout is None else layout.size
        dtype = np.float32 if layout is None else np.dtype(layout.dtype).type
        low, high = (0, 255) if dtype is np.uint8 else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, (size,), dtype)

    @property
    def intact(self) -> bool:  # type: ignore[override]
        """Whether no other object has begun new episodes of the same simulators."""
        return self._begun.get(self.inner) is self._token

    def seed(self, seed: int) -> None:
        """Seed the generators at each reset of all simulators, differently each time."""
        self._seed, self._resets = seed, 0

    def reset(self, mask: Native | None, seeds: Sequence[int] | None = None) -> Native:
        """Begin episodes."""
        if mask is not None:
            return self._reset(mask)
        self._begun[self.inner] = self._token = object()
        seed = derived_seed(self._seed, "episode", self._resets) if seeds is None else seeds[0]
        self._resets += seeds is None
        return self._begin(seed)

    @abstractmethod
    def _begin(self, seed: int) -> Native:
        """Seed the generators, and begin episodes of all simulators."""

    @abstractmethod
    def _reset(self, mask: Native) -> Native:
        """Begin episodes of the simulators in ``mask``."""

    def close(self) -> None:
        """Keep what may exist once in a process; Python frees it with its last reference."""

    def why_anew(self, again: Callable[[], Any]) -> str:
        """Return why a resume cannot continue the episodes; empty if it can.

        ``again`` makes simulators for a comparison.
        """
        return f"the state of a {type(self.env).__name__} cannot be saved"

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the episodes of :meth:`state`, of this object or of an equal one."""

    def _packed(self, observation: Any, ended: Native | None = None) -> Native:
        return pack_rows(self.seen_space, self.layout, observation, ended)


def pack_rows(
    space: Space, layout: Layout | None, observation: Any, ended: Native | None = None
) -> Native:
    """Pack observations of N simulators, arrays [N, ...] nested as ``space``, to [N, D].

    Where an episode has ``ended`` [N], a mask may allow no action.
    """
    if layout is None:
        entry = entry_of("", (), space, "auto")
        rows = _rows(observation, entry)
        if entry.kind != "index":
            return rows
        xp = functions(rows)
        values = (xp.arange(n, device=rows.device) for n in entry.counts)
        one_hot = [rows[:, i, None] == each for i, each in enumerate(values)]
        return xp.asarray(xp.concatenate(one_hot, 1), dtype=xp.float32)
    parts = []
    for entry in layout.entries:
        rows = _rows(entry_value(observation, entry), entry)
        if entry.kind == "mask":
            rows = rows != 0
            ends = np.cumsum(entry.counts)
            choices = zip(ends - entry.counts, ends, strict=True)
            blocked = sum(~rows[:, start:end].any(1) for start, end in choices) > 0
            if (blocked if ended is None else blocked & ~ended).any():
                raise Misfit(f"{entry.key} allows no action, but the episode has not ended")
        parts.append(rows)
    xp = functions(rows)
    return xp.asarray(xp.concatenate(parts, 1), dtype=getattr(xp, layout.dtype))


def _rows(value: object, entry: ObservationPart) -> Native:
    """Flatten an entry of N simulators to [N, size]; indices count from 0."""
    array: Native = value if getattr(value, "is_cuda", False) else np.asarray(value)
    if array.shape[1:] != entry.shape and math.prod(array.shape) != len(array) * entry.size:
        raise Misfit(f"{entry.named} has shape {array.shape}, not (N, *{entry.shape})")
    rows = array.reshape(len(array), entry.size)
    if entry.kind == "index":
        starts, counts = _range(entry, functions(rows), rows.device)
        rows = rows - starts
        if ((rows < 0) | (rows >= counts)).any():
            raise Misfit(f"{entry.named} is outside its space")
    return rows


@cache
def _range(entry: ObservationPart, xp: Any, device: Any) -> tuple[Native, Native]:
    return tuple(xp.asarray(each, device=device) for each in (entry.starts, entry.counts))


# ------------------------------------------------------------------------------ gymnasium.vector


class GymVector(Library):
    """A ``gymnasium.vector.VectorEnv``, or another environment with its interface.

    A library resets a copy in the step that ends its episode (SAME_STEP), in the next step
    (NEXT_STEP), or when it is told to (DISABLED). klrl needs the last observation of the old
    episode, the first of the new one, and no step in between: the first mode gives both, and
    DISABLED by ``reset_mask``. NEXT_STEP spends a step on the reset, unless ``reset`` takes the ids
    of copies, as EnvPool's does.
    """

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
