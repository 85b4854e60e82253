"""Copies of a Gymnasium environment as one batched environment of TorchRL.

A plain loop steps the copies. A separate call resets the copies whose episode has ended, so that
``("next", "observation")`` is always the result of the step.

The libraries' own loops are slower. TorchRL's GymEnv takes 135 us of CPU per step to convert
observations, while the environment's step takes 10 us. Gymnasium's SyncVectorEnv takes 2 us per
step, or 20 us with a single MuJoCo copy, to merge infos, which klrl does not need. With SAME_STEP
autoreset, SyncVectorEnv also moves an episode's last observation to the info.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar
from zlib import crc32

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import FlattenObservation, TimeLimit
from tensordict import TensorDict, TensorDictBase
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import Compose, EnvBase, RewardSum, StepCounter, Transform, TransformedEnv

from klrl.base.errors import FAULTS, ConfigError, EnvError, NonFiniteError
from klrl.base.seeds import derived_seed
from klrl.base.time_limit import TookTooLong, within
from klrl.config import CONTROL, CustomEnvConfig, EnvConfig, factory
from klrl.control.env.batch import batch_of
from klrl.control.env.contract import (
    FLAGS,
    NUMBERS,
    REAL,
    conversion,
    conversion_note,
    fault,
    require_flag,
    require_number,
    require_observation,
    require_picture,
    require_supported,
)
from klrl.control.env.episodes import Episodes, Say, any_action, replayed, why_unrepeatable
from klrl.control.env.gym_make import make_gym, make_one, wrappers_of
from klrl.control.env.observation import Layout, Packed, flattened, layout_of

T = TypeVar("T")


class VectorGymEnv(EnvBase):
    """``num_envs`` copies of a Gymnasium environment, stepped in this process.

    The copies are stepped one by one or, for some of Gymnasium's own tasks, as one batch with equal
    results (:mod:`klrl.control.env.batch`).

    ``observation`` [N, D] is a float32 vector, or entries packed as float32 or uint8
    (:mod:`klrl.control.env.observation`). Actions are flat (:mod:`klrl.control.env.contract`):
    float32 [N, A] for Box, int64 [N] for Discrete, int64 [N, M] for MultiDiscrete and MultiBinary.
    Box actions are clipped to the bounds. ``reward, done, terminated, truncated`` are [N, 1].

    Args:
        env_id: a Gymnasium id.
        num_envs: the number of copies, N.
        kwargs: arguments of ``gymnasium.make``.
        seed: an episode's seed is derived from ``seed`` + copy index, and the episode's number.
        step_timeout: seconds that a step or a reset of all copies may take; None sets no limit.
        make: a function that makes a copy; default ``gymnasium.make`` of the id.
        setting: the name of the environment in errors; default ``env.id=...``.
        action_mask, channels: the values of ``env.action_mask`` and ``env.channels``.
        batch: whether the copies may be stepped as one batch, which requires equal copies.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int = 1,
        *,
        kwargs: Mapping[str, object] | None = None,
        seed: int = 0,
        step_timeout: float | None = None,
        make: Callable[[], gymnasium.Env] | None = None,
        setting: str | None = None,
        action_mask: str = "auto",
        channels: str = "auto",
        batch: bool = True,
    ) -> None:
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([num_envs]))
        self.env_id = env_id
        self.num_copies = num_envs
        self.seed_episodes(seed)
        self._setting = setting or f"env.id={env_id}"
        make = make or partial(make_gym, env_id, kwargs or {})
        first = make()
        spaces = first.observation_space, first.action_space
        self.layout = layout_of(self._setting, *spaces, action_mask, channels)
        seen = flattened(spaces[0]) if self.layout is None else self.layout.line
        #: Lines for the user about the conversion of observations and actions.
        self.notes = [line for line in (seen, conversion_note(spaces[1])) if line is not None]
        #: How the copies are stepped, in words.
        self.stepped = f"{num_envs} copies one by one" if num_envs > 1 else "one copy"
        several = batch and num_envs > 1 and self.layout is None
        made = batch_of(make, first, num_envs) if several else ""
        self._batch = None if isinstance(made, str) else made
        if self._batch is not None:
            self.stepped = f"{num_envs} copies in one batch"
        elif made:
            self.stepped += f" ({made})"
        # A batch needs only one environment, which is reset in turn for each copy.
        copies = [first, *(make() for _ in range(0 if self._batch else num_envs - 1))]
        if len({id(copy.unwrapped) for copy in copies}) < len(copies):
            raise ConfigError(
                f"{self._setting}: gives two copies the same environment; make a new one per call"
            )
        self._envs = [_make_flat(copy, self.layout) for copy in copies]
        # Trial steps see the numbers before their conversion to float32.
        self._make = lambda: _make_flat(make(), self.layout and replace(self.layout, dtype="f8"))
        self._episodes: Episodes | None = None
        #: The dtype of stored observations.
        self.observation_dtype = np.dtype("float32" if self.layout is None else self.layout.dtype)
        self._set_specs()
        space = self._envs[0].observation_space
        kept = [("seen", space.dtype, space.shape), ("reward", "f8"), ("ends", bool, 2)]
        self._results = np.zeros(num_envs, np.dtype(kept, align=True))
        self._observations, self._rewards = self._results["seen"], self._results["reward"]
        self._ends = self._results["ends"][:, 0], self._results["ends"][:, 1]
        self._step_timeout = step_timeout
        # The copy being stepped or reset, and the number of steps so far, for error messages.
        self._place = SimpleNamespace(copy=0, step=0)

    def _set_specs(self) -> None:
        n = self.num_copies
        observation, action = self._envs[0].observation_space, self._envs[0].action_space
        require_supported(self._setting, action)
        stored = torch.uint8 if self.observation_dtype == np.uint8 else torch.float32
        seen = Unbounded(shape=(n, *observation.shape), dtype=stored)
        flag = Categorical(2, dtype=torch.bool, shape=(n, 1))
        flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        self.observation_spec = Composite(observation=seen, shape=(n,))
        self.action_spec = Composite(action=_action_spec(action, n), shape=(n,))
        self.reward_spec = Composite(reward=Unbounded(shape=(n, 1)), shape=(n,))
        self.done_spec = Composite(flags, shape=(n,))
        self._box = isinstance(action, gymnasium.spaces.Box)
        if self._box:
            self.low, self.high = action.low.reshape(-1), action.high.reshape(-1)  # each [A]
        self._converted = conversion(action)

    @property
    def longest_episode(self) -> int | None:
        """Steps after which Gymnasium's TimeLimit ends an episode; None without a TimeLimit."""
        limits = (each for each in wrappers_of(self._envs[0]) if isinstance(each, TimeLimit))
        return min((int(each._max_episode_steps) for each in limits), default=None)

    @property
    def pictures_per_second(self) -> float:
        """The frame rate for a film of the environment."""
        return float(self._envs[0].metadata.get("render_fps", 30))

    def picture(self) -> np.ndarray:
        """Render the first copy, uint8 [height, width, 3]; requires render_mode=rgb_array."""
        self._place.copy = 0
        first = self._envs[0]
        return self._call_copies(lambda: require_picture(first.render()), "picture after step")

    def reset_native(
        self, mask: np.ndarray | None = None, seeds: Sequence[int] | None = None
    ) -> np.ndarray:
        """Reset all copies, or those in ``mask`` [N]; return observations [N, D].

        A copy that is not reset keeps its last observation. ``seeds`` [N] also has entries for
        copies that are not reset. The next reset or step overwrites the returned array.
        """
        self._call_copies(lambda: self._reset_copies(mask, seeds), "reset")
        return self._observations

    def _reset_copies(self, mask: np.ndarray | None, seeds: Sequence[int] | None) -> None:
        shape, episodes = self._observations.shape[1:], self._episodes
        for i in range(self.num_copies):
            if mask is None or mask[i]:
                self._place.copy = i
                if seeds is None:
                    seed = derived_seed(self._seed + i, "episode", self._begun[i])
                    self._begun[i] += 1
                else:
                    seed = seeds[i]
                observation, _info = self._envs[0 if self._batch else i].reset(seed=seed)
                require_observation(observation, shape, dtype=self._observations.dtype)
                self._observations[i] = observation
                if self._batch is not None:
                    self._batch.begin(i)
                if episodes is not None:
                    episodes.begin(i, self._observations[i])

    def step_native(
        self, action: np.ndarray, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step all copies, or those in ``mask`` [N], with actions [N, A] or [N].

        Returns observation [N, D], reward [N], terminated [N], truncated [N]. Observations and
        rewards may be NaN or infinite. The next reset or step overwrites the returned arrays.
        """
        if self._box:
            # np.clip takes three times as long.
            action = np.minimum(np.maximum(action, self.low), self.high)
        given = action if self._converted is None else self._converted(action)
        self._place.step += 1
        if self._episodes is not None:
            self._episodes.act(action)
        step = self._step_copies if self._batch is None else self._step_batch
        self._call_copies(lambda: step(given, mask), "step")
        return self._observations, self._rewards, *self._ends

    def _step_batch(self, action: Any, mask: np.ndarray | None) -> None:
        assert self._batch is not None
        self._batch.step(action, mask, (self._observations, self._rewards, *self._ends))
        if (episodes := self._episodes) is not None:
            for i in range(self.num_copies) if mask is None else np.flatnonzero(mask):
                episodes.digests[i] = crc32(episodes.rows[i], episodes.digests[i])

    def _step_copies(self, action: Iterable[object], mask: np.ndarray | None) -> None:
        observations, rewards = self._observations, self._rewards
        terminated, truncated = self._ends
        place, shape, episodes = self._place, observations.shape[1:], self._episodes
        dtype, kinds = observations.dtype, REAL if observations.dtype.kind == "f" else ""
        for i, (env, chosen) in enumerate(zip(self._envs, action, strict=True)):
            if mask is not None and not mask[i]:
                continue
            place.copy = i
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
            if episodes is not None:
                episodes.digests[i] = crc32(episodes.rows[i], episodes.digests[i])

    def _call_copies(self, call: Callable[[], T], what: str) -> T:
        """Call a function on the copies; raise any failure as an EnvError of one line."""
        try:
            return within(self._step_timeout, call)
        except TookTooLong:
            limit = f"env.step_timeout={self._step_timeout:g}"
            raise EnvError(f"{self._where(what)} took longer than {limit} s") from None
        except FAULTS as error:  # an environment may raise anything
            raise EnvError(f"{self._where(what)}: {fault(error)}") from error

    def _where(self, what: str) -> str:
        return f"{self._setting}: {what} {self._place.step} of copy {self._place.copy}"

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        observations = self.reset_native(None if mask is None else mask.reshape(-1).cpu().numpy())
        no = torch.zeros(self.num_copies, 1, dtype=torch.bool)
        return self._pack(
            observation=self.observed(observations, "at reset"),
            done=no,
            terminated=no.clone(),
            truncated=no.clone(),
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation, reward, terminated, truncated = self.step_native(
            tensordict.get("action").detach().cpu().numpy()
        )
        return self._pack(
            observation=self.observed(observation, "after a step"),
            reward=self.finite("reward", reward, "after a step").unsqueeze(-1),
            done=torch.from_numpy(terminated | truncated).unsqueeze(-1),
            terminated=torch.from_numpy(terminated.copy()).unsqueeze(-1),
            truncated=torch.from_numpy(truncated.copy()).unsqueeze(-1),
        )

    def _pack(self, **entries: torch.Tensor) -> TensorDict:
        return TensorDict(entries, batch_size=self.batch_size)

    def observed(self, value: np.ndarray, when: str) -> torch.Tensor:
        """Copy observations [N, ...] to a tensor of ``observation_dtype``; refuse NaN and inf."""
        if self.observation_dtype == np.uint8:
            return torch.from_numpy(value.copy())
        return self.finite("observation", value, when)

    def finite(self, what: str, value: np.ndarray, when: str) -> torch.Tensor:
        """Copy numbers [N, ...] to a float32 tensor.

        Raises:
            NonFiniteError: a number is NaN, or infinite in float32 (such as 1e39).
        """
        # numpy warns when it casts 1e39; np.errstate would hide the warning, but takes 2 us.
        tensor = torch.from_numpy(np.array(value, dtype=np.float32, copy=True))
        if not torch.isfinite(tensor).all():
            bad = (~torch.isfinite(tensor)).nonzero()
            raise NonFiniteError(
                f"{what} of {self.env_id} (copy {int(bad[0, 0])}) is not finite {when}; "
                "the simulator diverged or the actions are not finite"
            )
        return tensor

    def seed_episodes(self, seed: int) -> None:
        """Seed all future episodes."""
        self._seed, self._begun = seed, [0] * self.num_copies

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.seed_episodes(seed)

    # ---------------------------------------------------------------------- running episodes

    def keep_episodes(self, say: Say = lambda _: None) -> str:
        """Record episodes from the next reset on, or return the reason why none can be replayed."""
        if self._episodes is None:
            masked = self.layout is not None and self.layout.masked
            draw = self.layout.allowed_action if self.layout and masked else any_action
            if why := why_unrepeatable(self._make, self._step_timeout, say, draw):
                return why
            self._episodes = Episodes(self._results)
        return ""

    def episodes(self) -> dict[str, object] | None:
        """Return the running episodes; None if not recorded, or if one is too long to save."""
        state = None if self._episodes is None else self._episodes.state()
        if state is None:
            return None
        return {**state, "seed": self._seed, "numbers": [number - 1 for number in self._begun]}

    def play_again(self, state: Mapping[str, Any]) -> None:
        """Replay the episodes that :meth:`episodes` returned, each from its reset.

        Raises:
            EnvError: a copy gives different results than in the recorded episode.
        """
        self._seed, self._begun = state["seed"], list(state["numbers"])
        self._episodes = Episodes(self._results)
        for copies, actions in replayed(state):
            if actions is None:
                self.reset_native(copies)
            else:
                self.step_native(actions, copies)
        for i, pair in enumerate(zip(self._episodes.digests, state["digests"], strict=True)):
            if pair[0] != pair[1]:
                raise EnvError(f"{self._setting}: copy {i} does not repeat its recorded episode")

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the copies."""
        for env in self._envs:
            env.close()
        super().close(raise_if_closed=raise_if_closed)


def _make_flat(env: gymnasium.Env, layout: Layout | None) -> gymnasium.Env:
    if layout is not None:
        return Packed(env, layout)
    space = env.observation_space
    if isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1:
        return env
    return FlattenObservation(env)


def _action_spec(space: gymnasium.Space, n: int) -> TensorSpec:
    """Make the spec of the flat actions [N, ...], see :mod:`klrl.control.env.contract`."""
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), shape=(n,), dtype=torch.int64)
    if isinstance(space, spaces.MultiDiscrete):
        counts = space.nvec.reshape(-1).tolist()
        return MultiCategorical(counts, shape=(n, len(counts)), dtype=torch.int64)
    size = int(np.prod(space.shape))
    if isinstance(space, spaces.MultiBinary):
        return Binary(size, shape=(n, size), dtype=torch.int64)
    assert isinstance(space, spaces.Box)
    if not np.isfinite([space.low, space.high]).all():
        return Unbounded(shape=(n, size), dtype=torch.float32)
    bounds = (np.tile(x.reshape(-1), (n, 1)) for x in (space.low, space.high))
    low, high = (torch.as_tensor(x, dtype=torch.float32) for x in bounds)
    return Bounded(low, high, shape=(n, size), dtype=torch.float32)


# ------------------------------------------------------------------- the environment of a setting


def make_copies(config: EnvConfig, *, seed: int, num_envs: int | None = None) -> VectorGymEnv:
    """Make the copies of the chosen ``env`` as one batched environment."""
    copies: VectorGymEnv = factory("env", config, CONTROL)(config, seed=seed, num_envs=num_envs)
    return copies


def gym(config: EnvConfig, *, seed: int, num_envs: int | None = None) -> VectorGymEnv:
    """``env=gym`` and ``env=custom``; arguments as in :func:`make_copies`."""
    return VectorGymEnv(
        config.id,
        num_envs or config.num_envs,
        seed=seed,
        step_timeout=config.step_timeout,
        make=lambda: make_one(config),
        setting=config.named,
        action_mask=config.action_mask,
        channels=config.channels,
        # The user's function may build a different simulator for each copy.
        batch=not isinstance(config, CustomEnvConfig),
    )


def transformed(copies: EnvBase, transforms: tuple[Transform, ...] = ()) -> TransformedEnv:
    """Add the transforms of a rollout to the copies.

    The transforms for an episode's return (``episode_reward``) and length (``step_count``) come
    first, so that the return sums the raw reward even if ``transforms`` subtract a KL.
    """
    return TransformedEnv(copies, Compose(RewardSum(), StepCounter(), *transforms))
