"""Simulators of other libraries, which step together: what their kinds have in common.

:mod:`klrl.control.env.gym_vector` has the kind of ``gymnasium.vector``, and
:mod:`klrl.control.env.torchrl_batch` TorchRL's. Imports no torch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
from gymnasium import Space, spaces

from klrl.base.errors import ConfigError
from klrl.base.seeds import derived_seed
from klrl.config import EnvConfig
from klrl.control.env.contract import Misfit
from klrl.control.env.observation import Layout, ObservationPart, entry_of, entry_value
from klrl.control.env.simulators import Array, Native, Simulators, functions, on_host


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
            ("step_timeout", config.step_timeout, "drop it"),
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

    def draw(self, seen: Native, rng: np.random.Generator) -> Array:
        """Draw actions, as the policy's, that the masks in ``seen`` [N, D] allow."""
        space, n = self.action_space, self.count
        if isinstance(space, spaces.Box):
            low, high = (bound.reshape(-1).clip(-1, 1) for bound in (space.low, space.high))
            return rng.uniform(low, high, (n, len(low))).astype(np.float32)
        if isinstance(space, spaces.MultiBinary):
            return rng.integers(0, 2, (n, int(np.prod(space.shape))))
        counts = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.reshape(-1)
        masked = self.layout is not None and self.layout.masked
        allowed = on_host(seen[:, -masked:]) if masked else np.ones((n, sum(counts)))
        parts = np.split(
            (allowed != 0) * (1 - rng.random(allowed.shape)), np.cumsum(counts)[:-1], 1
        )
        drawn = np.stack([part.argmax(1) for part in parts], 1)
        return drawn[:, 0] if isinstance(space, spaces.Discrete) else drawn

    def trial(self) -> None:
        """Reset and step all simulators once; raise a Misfit if the results do not fit."""
        seen = self.reset(None)
        after, reward, *_ = self.step(self.draw(seen, np.random.default_rng(0)))
        shown = zip(("observation", "observation", "reward"), (seen, after, reward), strict=True)
        for name, value in ((name, on_host(each)) for name, each in shown):
            if not np.isfinite(value).all():
                wrong = np.flatnonzero(~np.isfinite(value.reshape(self.count, -1)).all(1))
                raise Misfit(f"{name} of copy {wrong[0]} is not finite")

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
