"""Pack the entries of an observation into one array.

An observation has one *entry* for each key of a Dict or index of a Tuple; else it is one entry:

    entry    its space                                    read by
    vector   Box, MultiBinary                             an MLP
    index    Discrete, MultiDiscrete                      an embedding
    image    Box of uint8 with 3 or 4 dimensions, or      a CNN (``actor=cnn``), or the user's
             with 2 if the upper bound is 255             networks (``actor=custom``)
    mask     ``action_mask`` of the Dict or the info      the policy, to exclude actions

For storage, the entries of a step are packed into one array [D], the *transport*, in the order of
the table. Its dtype is uint8 if there are no vectors, and if no index and no choice of actions has
over 256 values; else float32, which is exact for integers up to 2^24. :class:`Layout` lists the
entries. A Dict, a Tuple, an image, a mask in the info or a number of over 4,096 values requires a
layout. Any other observation is flattened to a vector, with integers one-hot.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from klrl.base.errors import ConfigError
from klrl.control.env.contract import Misfit, conversion, require_observation

#: Keys of a Dict and indices of a Tuple, from the outermost inwards.
Path = tuple[str | int, ...]
Info = dict[str, object]
#: The key of the mask of allowed actions, in an observation or an info.
MASK = "action_mask"
#: The kinds of entries, in the order of a transport.
KINDS = ("vector", "index", "image", "mask")
#: The largest number of values that float32, in which minibatches are packed, tells apart.
_MOST = 2**24
#: The largest length of a one-hot observation; beyond it a number is read by an embedding.
_MOST_ONE_HOT = 4096
#: The largest value of a picture's pixel; an image with another largest value is a board.
BRIGHTEST = 255
#: Kind of an entry -> the dtype that must hold its numbers.
_DTYPES: dict[str, np.dtype] = {"index": np.dtype(np.int64), "image": np.dtype(np.uint8)}


@dataclass(frozen=True)
class ObservationPart:
    """One entry of an observation."""

    key: str  # the path joined by dots; empty if the entry is the whole observation
    path: Path  # keys and indices to look up the entry
    kind: str  # one of KINDS
    shape: tuple[int, ...]
    #: For an index, how many values each integer has; for a mask, how many actions each choice has.
    counts: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()  # for an index, the lowest value of each integer
    high: int = BRIGHTEST  # for an image, the largest value in its space
    channels: str = "auto"  # for an image, the value of ``env.channels``

    @property
    def named(self) -> str:
        """The entry in an error."""
        return f"observation's {self.key}" if self.key else "observation"

    @property
    def size(self) -> int:
        """The length of the entry in a transport."""
        return math.prod(self.shape)

    @property
    def channels_last(self) -> bool:
        """Whether the channels of an image are its last dimension."""
        if self.channels != "auto" or len(self.shape) == 2:
            return self.channels == "last" and len(self.shape) > 2
        a, b, c = self.shape[-3:]
        # A board is nearly square, a x b or b x c. Pictures and other boards have few channels.
        last, first = (max(x, y) <= 1.25 * min(x, y) for x, y in ((a, b), (b, c)))
        return c <= a if self.high == BRIGHTEST or last == first else last

    @property
    def pixels(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image; stacked frames count as channels."""
        if len(self.shape) == 2:
            return (1, *self.shape)
        *stack, a, b, c = self.shape
        channels, height, width = (c, a, b) if self.channels_last else (a, b, c)
        return math.prod(stack) * channels, height, width

    def __str__(self) -> str:
        name = self.key or "observation"
        if self.kind == "index":
            return f"{name}: {'x'.join(map(str, self.counts))} values (embedding)"
        if self.kind == "mask":
            return f"{name}: mask of {sum(self.counts)} actions"
        shape = "x".join(map(str, self.shape)) or "1"
        if self.kind == "vector":
            return f"{name}: {shape} numbers"
        axis, read = "last" if self.channels_last else "first", "x".join(map(str, self.pixels))
        return f"{name}: {shape} bytes up to {self.high}, read as {read} (env.channels={axis}; CNN)"


@dataclass(frozen=True)
class Layout:
    """The positions of an observation's entries in a transport [D]."""

    entries: tuple[ObservationPart, ...]
    dtype: str
    from_info: bool = False

    @property
    def size(self) -> int:
        """The length D of a transport."""
        return sum(entry.size for entry in self.entries)

    @property
    def vectors(self) -> int:
        """The total length of the vectors, which come first in a transport."""
        return sum(entry.size for entry in self.entries if entry.kind == "vector")

    @property
    def masked(self) -> int:
        """The length of the mask at the end of a transport; 0 without a mask."""
        return sum(entry.size for entry in self.entries if entry.kind == "mask")

    @property
    def images(self) -> list[ObservationPart]:
        """The entries that are images."""
        return [entry for entry in self.entries if entry.kind == "image"]

    @property
    def space(self) -> spaces.Box:
        """Gymnasium's space of transports."""
        low, high = (0, 255) if self.dtype == "uint8" else (-np.inf, np.inf)
        return spaces.Box(low, high, (self.size,), np.dtype(self.dtype).type)

    def places(self) -> Iterator[tuple[ObservationPart, slice]]:
        """Yield each entry with its slice of a transport [..., D]."""
        start = 0
        for entry in self.entries:
            yield entry, slice(start, start + entry.size)
            start += entry.size

    def pack(self, observation: object, mask: object = None, *, ended: bool = False) -> np.ndarray:
        """Pack an observation into a transport [D]; ``mask`` is the info's, if ``from_info``.

        If the episode has ``ended``, the mask may allow no action or be None.
        """
        packed = np.empty(self.size, self.dtype)
        for entry, place in self.places():
            if entry.kind == "mask":
                packed[place] = self._mask(entry, mask, observation, ended)
                continue
            value = entry_value(observation, entry)
            require_observation(value, entry.shape, entry.named, _DTYPES.get(entry.kind))
            packed[place] = _from_zero(entry, value)
        return packed

    def _mask(
        self, entry: ObservationPart, mask: object, observation: object, ended: bool
    ) -> np.ndarray:
        if not self.from_info:
            mask = entry_value(observation, entry)
        elif mask is None:
            if not ended:
                raise Misfit(f"info has no {MASK}, which env.action_mask=info requires")
            mask = np.zeros(entry.size)
        if isinstance(mask, tuple | list):  # one mask per choice, as MultiDiscrete.sample takes
            mask = np.concatenate([np.asarray(part).reshape(-1) for part in mask])
        require_observation(np.asarray(mask).reshape(-1), (entry.size,), entry.key)
        allowed = np.asarray(mask).reshape(-1) != 0
        for choice in np.split(allowed, np.cumsum(entry.counts)[:-1]):
            if not choice.any() and not ended:
                raise Misfit(f"{entry.key} allows no action, but the episode has not ended")
        return allowed

    def random_transports(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draw transports [count, D]: normal vectors, uniform pixels and indices, masks of ones."""
        drawn = np.ones((count, self.size), self.dtype)
        for entry, place in self.places():
            shape = (count, entry.size)
            if entry.kind == "vector":
                drawn[:, place] = rng.standard_normal(shape)
            elif entry.kind != "mask":
                drawn[:, place] = rng.integers(0, entry.counts or entry.high + 1, shape)
        return drawn

    @property
    def names(self) -> str:
        """The entries as text; equal for two policies that read the same entries."""
        return "; ".join(map(str, self.entries))

    @property
    def line(self) -> str:
        """The entries and their encoders, in a line for the user."""
        return f"observation, by key: {self.names}"


def any_action(layout: Layout | None, space: Space, seen: Any, rng: np.random.Generator) -> object:
    """Draw an action of a space; ``rng`` draws one that the mask of a transport allows."""
    if layout is None or not layout.masked:
        return space.sample()
    allowed = np.split(seen[-layout.masked :], np.cumsum(layout.entries[-1].counts)[:-1])
    drawn = np.array([[rng.choice(np.flatnonzero(choice)) for choice in allowed]])
    rows = drawn[:, 0] if isinstance(space, spaces.Discrete) else drawn
    convert = conversion(space)
    return next(iter(rows if convert is None else convert(rows)))


def layout_of(
    setting: str, observation: Space, action: Space, mask: str = "auto", channels: str = "auto"
) -> Layout | None:
    """Make an observation's layout; None if it needs none. ``setting`` names the environment."""
    parts = dict(_leaves(observation, ()))
    for space in (action, *parts.values()):
        if np.max(getattr(space, "nvec", getattr(space, "n", 0))) > _MOST:
            shown = " ".join(str(space).split())
            raise ConfigError(
                f"{setting}: the space {shown} has a number of over 2^24 values, which float32 "
                "cannot tell apart; wrap the environment"
            )
    from_info = mask == "info"
    has_mask = (MASK,) in parts and mask == "auto"
    alone = parts.get(())  # the space itself, if it is neither a Dict nor a Tuple
    served = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    many = isinstance(alone, served[1:3]) and spaces.flatdim(alone) > _MOST_ONE_HOT
    if not (from_info or many) and isinstance(alone, served) and not is_image(alone):
        return None
    entries = [
        _mask_entry(setting, action)
        if has_mask and path == (MASK,)
        else entry_of(setting, path, space, channels)
        for path, space in parts.items()
        if not (path == (MASK,) and mask == "none")
    ]
    if from_info:
        entries.append(_mask_entry(setting, action))
    if all(entry.kind == "mask" for entry in entries):
        raise ConfigError(f"{setting}: its observation is only a mask; add another entry")
    ordered = tuple(sorted(entries, key=lambda entry: KINDS.index(entry.kind)))
    bytes_hold = all(e.kind != "vector" and max(e.counts, default=0) <= 256 for e in ordered)
    return Layout(ordered, "uint8" if bytes_hold else "float32", from_info)


def require_actor(actor: str, layout: Layout | None) -> None:
    """Refuse an MLP if an entry is an image, and a CNN if none is."""
    images = [] if layout is None else layout.images
    if images and actor not in ("cnn", "custom"):
        shape = "x".join(map(str, images[0].shape))
        raise ConfigError(
            f"actor={actor}: an MLP reads no images, but {images[0].key or 'the observation'} is "
            f"an image of {shape} bytes; choose actor=cnn, or actor=custom"
        )
    if not images and actor == "cnn":
        raise ConfigError(
            "actor=cnn: the observation has no image, a Box of uint8 with 2 to 4 dimensions; "
            "choose actor=mlp"
        )


#: CNN -> the smallest width and height, in pixels, of an image that it can read.
SMALLEST = {"nature": 36, "impala": 1}


def check_images(layout: Layout | None, cnn: str) -> None:
    """Refuse images that are too small for a CNN."""
    for image in [] if layout is None else layout.images:
        _, height, width = image.pixels
        if min(height, width) < SMALLEST[cnn]:
            least = SMALLEST[cnn]
            raise ConfigError(
                f"actor.arch={cnn}: needs images of at least {least} x {least}, but the "
                f"environment's are {height} x {width}; choose actor.arch=impala, or resize them"
            )


def is_image(space: Space) -> TypeGuard[spaces.Box]:
    """Whether a space is read as an image; see the table at the top."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8:
        return False
    return len(space.shape) in (3, 4) or (len(space.shape) == 2 and int(space.high.max()) == 255)


def flattened(space: Space) -> str | None:
    """Describe how a space is flattened, in a line for the user; None for a 1-D Box."""
    if isinstance(space, spaces.Box):
        if len(space.shape) == 1:
            return None
        return f"observation: Box of shape {space.shape}, flat: {math.prod(space.shape)} numbers"
    return f"observation: {space}, one-hot: {spaces.flatdim(space)} numbers"


class Packed(gymnasium.Wrapper):
    """An environment whose observations are transports [D]."""

    def __init__(self, env: gymnasium.Env, layout: Layout) -> None:
        super().__init__(env)
        self.layout, self.observation_space = layout, layout.space

    def reset(self, **how: object) -> tuple[np.ndarray, Info]:
        """Reset the environment, and pack its observation."""
        observation, info = self.env.reset(**how)
        return self.layout.pack(observation, self._mask(info)), info

    def step(self, action: object) -> tuple[np.ndarray, object, bool, bool, Info]:
        """Step the environment, and pack its observation."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        ended = bool(terminated or truncated)
        packed = self.layout.pack(observation, self._mask(info), ended=ended)
        return packed, reward, terminated, truncated, info

    def _mask(self, info: object) -> object:
        return info.get(MASK) if self.layout.from_info and isinstance(info, Mapping) else None


def _leaves(space: Space, path: Path) -> Iterator[tuple[Path, Space]]:
    """Yield (path, space) of every part that is neither a Dict nor a Tuple."""
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for place, inner in enumerate(space.spaces):
            yield from _leaves(inner, (*path, place))
    else:
        yield path, space


def entry_of(setting: str, path: Path, space: Space, channels: str) -> ObservationPart:
    """Describe the entry at ``path``; ``setting`` names the environment in errors."""
    key = ".".join(map(str, path))
    shape = tuple(space.shape or ())
    if is_image(space):
        high = max(int(space.high.max()), 1)
        return ObservationPart(key, path, "image", shape, high=high, channels=channels)
    if isinstance(space, spaces.Discrete):
        return ObservationPart(key, path, "index", (), (int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        counts, starts = (tuple(map(int, x.reshape(-1))) for x in (space.nvec, space.start))
        return ObservationPart(key, path, "index", shape, counts, starts)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return ObservationPart(key, path, "vector", shape)
    where = f"the key {key} of its observation" if key else "its observation space"
    raise ConfigError(
        f"{setting}: {where} is {type(space).__name__}, which has no fixed size; leave it out with "
        "env.observation_keys, or wrap the environment"
    )


def _mask_entry(setting: str, action: Space) -> ObservationPart:
    if isinstance(action, spaces.Discrete):
        counts: tuple[int, ...] = (int(action.n),)
    elif isinstance(action, spaces.MultiDiscrete):
        counts = tuple(map(int, action.nvec.reshape(-1)))
    else:
        raise ConfigError(
            f"{setting}: {MASK} masks Discrete and MultiDiscrete actions, but its actions are "
            f"{type(action).__name__}; set env.action_mask=none, or wrap the environment"
        )
    return ObservationPart(MASK, (MASK,), "mask", (sum(counts),), counts)


def entry_value(observation: object, entry: ObservationPart) -> object:
    """Look up an entry."""
    value: Any = observation
    for step in entry.path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            raise Misfit(f"observation has no {entry.key}") from None
    return value


def _from_zero(entry: ObservationPart, value: object) -> np.ndarray:
    """Flatten an entry's value; shift the values of an index to start at 0."""
    flat = np.asarray(value).reshape(-1)
    if entry.kind != "index":
        return flat
    counted = flat - np.array(entry.starts)
    if ((counted < 0) | (counted >= entry.counts)).any():
        raise Misfit(f"{entry.named} is {flat.tolist()}, outside its space")
    return counted
