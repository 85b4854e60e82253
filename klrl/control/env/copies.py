"""N simulators as one batched environment of TorchRL: its specs, seeds and running episodes.

Simulators step by the contract of :mod:`klrl.control.env.simulators`. A separate call resets those
whose episode has ended, so that ``("next", "observation")`` is always the result of the step.

The libraries' own loops are slower. TorchRL's GymEnv takes 135 us of CPU per step to convert
observations, while the environment's step takes 10 us. Gymnasium's SyncVectorEnv takes 2 us per
step, or 20 us with a single MuJoCo copy, to merge infos, which klrl does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import FlattenObservation
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

from klrl.base.errors import FAULTS, EnvError, NonFiniteError
from klrl.base.time_limit import TookTooLong, within
from klrl.config import CONTROL, CustomEnvConfig, EnvConfig, factory
from klrl.control.env.contract import (
    conversion_note,
    fault,
    require_picture,
    require_supported,
)
from klrl.control.env.episodes import Episodes, Say, replayed, why_unrepeatable
from klrl.control.env.gym_make import make_gym, make_one
from klrl.control.env.observation import Layout, Packed, flattened, layout_of
from klrl.control.env.simulators import Copies, Native, Results, functions, native, simulators_of

if TYPE_CHECKING:
    from klrl.control.env.library import Library

T = TypeVar("T")

#: What the user reads about simulators of which a process has one.
ONCE = (
    "environment: env.target returns the same simulators at each call: evaluations step them, and "
    "training then begins new episodes"
)


class VectorGymEnv(EnvBase):
    """``num_envs`` copies of an environment, stepped in this process.

    ``observation`` [N, D] is a float32 vector, or entries packed as float32 or uint8
    (:mod:`klrl.control.env.observation`). Actions are flat (:mod:`klrl.control.env.contract`):
    float32 [N, A] for Box, int64 [N] for Discrete, int64 [N, M] for MultiDiscrete and MultiBinary.
    Box actions are clipped to the bounds. ``reward, done, terminated, truncated`` are [N, 1].

    Args:
        env_id: a Gymnasium id.
        num_envs: the number of copies, N.
        kwargs: arguments of ``gymnasium.make``.
        seed: the seed of all episodes, see :meth:`Simulators.seed`.
        step_timeout: seconds that a step or a reset of all copies may take; None sets no limit.
        make: a function that makes a copy, default ``gymnasium.make`` of the id; or all simulators.
        setting: the name of the environment in errors; default ``env.id=...``.
        action_mask, channels: the values of ``env.action_mask`` and ``env.channels``.
        batch: whether a batch may step the copies, which requires equal copies.
        threads: the value of ``env.threads``.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int = 1,
        *,
        kwargs: Mapping[str, object] | None = None,
        seed: int = 0,
        step_timeout: float | None = None,
        make: Callable[[], gymnasium.Env | Library] | None = None,
        setting: str | None = None,
        action_mask: str = "auto",
        channels: str = "auto",
        batch: bool = True,
        threads: int | None = None,
    ) -> None:
        make = make or partial(make_gym, env_id, kwargs or {})
        first = make()
        num_envs = num_envs if isinstance(first, gymnasium.Env) else first.count
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([num_envs]))
        self.env_id = env_id
        self.num_copies = num_envs
        self._setting = setting or f"env.id={env_id}"
        spaces = first.observation_space, first.action_space
        self.layout = layout_of(self._setting, *spaces, action_mask, channels)
        seen = flattened(spaces[0]) if self.layout is None else self.layout.line
        #: Lines for the user about the conversion of observations and actions.
        self.notes = [line for line in (seen, conversion_note(spaces[1])) if line is not None]
        self.simulators: Copies | Library
        if not isinstance(first, gymnasium.Env):
            self.simulators, self._make = first, lambda: _prepared(make(), self.layout)
            first.prepare(self.layout)
            if first.once:
                self.notes.append(ONCE)
        else:
            flat, batch = partial(_make_flat, layout=self.layout), batch and self.layout is None
            how = (self._setting, make, first, num_envs, flat)
            self.simulators = simulators_of(*how, batch=batch, threads=threads)
            # Trial steps see the numbers before their conversion to float32.
            self._make = lambda: _make_flat(
                make(), self.layout and replace(self.layout, dtype="f8")
            )
        self.seed_episodes(seed)
        #: The dtype of stored observations.
        self.observation_dtype = np.dtype("float32" if self.layout is None else self.layout.dtype)
        self._set_specs()
        self._step_timeout = step_timeout
        self._saves = isinstance(self.simulators, Copies)  # a library's: if a comparison says so
        # The number of steps so far, for errors; in a list, since EnvBase takes 4 us to set an int.
        self._steps = [0]

    def _set_specs(self) -> None:
        n, action = self.num_copies, self.simulators.action_space
        require_supported(self._setting, action)
        stored = torch.uint8 if self.observation_dtype == np.uint8 else torch.float32
        seen = Unbounded(shape=(n, *self.simulators.observation_space.shape), dtype=stored)
        flag = Categorical(2, dtype=torch.bool, shape=(n, 1))
        flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        self.observation_spec = Composite(observation=seen, shape=(n,))
        self.action_spec = Composite(action=_action_spec(action, n), shape=(n,))
        self.reward_spec = Composite(reward=Unbounded(shape=(n, 1)), shape=(n,))
        self.done_spec = Composite(flags, shape=(n,))
        self._box = isinstance(action, gymnasium.spaces.Box)
        if self._box:
            self.low, self.high = action.low.reshape(-1), action.high.reshape(-1)  # each [A]
            bounds = (torch.from_numpy(each) for each in (self.low, self.high))
            self._low, self._high = (native(x.to(self.simulators.device)) for x in bounds)

    def picture(self) -> np.ndarray:
        """Render the first copy, uint8 [height, width, 3]; requires render_mode=rgb_array."""
        return self._call(lambda: require_picture(self.simulators.render()), "picture after step")

    def reset_native(
        self, mask: Native | None = None, seeds: Sequence[int] | None = None
    ) -> Native:
        """Reset all copies, or those in ``mask`` [N]; return observations [N, D].

        A copy that is not reset keeps its last observation. ``seeds`` [N] also has entries for
        copies that are not reset. The next reset or step overwrites the returned array.
        """
        return self._call(lambda: self.simulators.reset(mask, seeds), "reset")

    def step_native(self, action: Native, mask: Native | None = None) -> Results:
        """Step all copies, or those in ``mask`` [N], with actions [N, A] or [N].

        Returns observation [N, D], reward [N], terminated [N], truncated [N]. Observations and
        rewards may be NaN or infinite. The next reset or step overwrites the returned arrays.
        """
        if self._box:
            xp = functions(action)  # np.clip takes three times as long
            action = xp.minimum(xp.maximum(action, self._low), self._high)
        self._steps[0] += 1
        return self._call(lambda: self.simulators.step(action, mask), "step")

    def _call(self, call: Callable[[], T], what: str) -> T:
        """Call a function of the simulators; raise any failure as an EnvError of one line."""
        try:
            return within(self._step_timeout, call)
        except TookTooLong:
            limit = f"env.step_timeout={self._step_timeout:g}"
            raise EnvError(f"{self._where(what)} took longer than {limit} s") from None
        except FAULTS as error:  # an environment may raise anything
            raise EnvError(f"{self._where(what)}: {fault(error)}") from error

    def _where(self, what: str) -> str:
        return f"{self._setting}: {what} {self._steps[0]}{self.simulators.place()}"

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
        if not self.simulators.final:
            raise EnvError(
                f"{self._setting}: gives no last observations, which TorchRL's loop requires; "
                "choose collector=vector"
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

    def observed(self, value: Native, when: str) -> torch.Tensor:
        """Copy observations [N, ...] to a tensor of ``observation_dtype``; refuse NaN and inf."""
        if self.observation_dtype == np.uint8:
            return torch.as_tensor(value).clone(memory_format=torch.contiguous_format)
        return self.finite("observation", value, when)

    def finite(self, what: str, value: Native, when: str) -> torch.Tensor:
        """Copy numbers [N, ...] to a float32 tensor.

        Raises:
            NonFiniteError: a number is NaN, or infinite in float32 (such as 1e39).
        """
        if isinstance(value, np.ndarray):  # torch's copy takes three times as long
            tensor = torch.from_numpy(np.array(value, dtype=np.float32, copy=True))
        else:
            how = torch.contiguous_format
            tensor = value.to(torch.float32, copy=True, memory_format=how)
        if not torch.isfinite(tensor).all():
            bad, named = (~torch.isfinite(tensor)).nonzero(), self.env_id or self._setting
            raise NonFiniteError(
                f"{what} of {named} (copy {int(bad[0, 0])}) is not finite {when}; "
                "the simulator diverged or the actions are not finite"
            )
        return tensor

    def seed_episodes(self, seed: int) -> None:
        """Seed all future episodes."""
        self.simulators.seed(seed)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.seed_episodes(seed)

    # ---------------------------------------------------------------------- running episodes

    def keep_episodes(self, say: Say = lambda _: None) -> str:
        """Record episodes from the next reset on, or return the reason why none can be resumed."""
        kept = self.simulators
        if not isinstance(kept, Copies):
            why = kept.why_anew(self._make)
            self._saves = not why
        elif kept.episodes is not None:
            return ""
        elif not (why := why_unrepeatable(self._make, self._step_timeout, say, self.layout)):
            kept.episodes = Episodes(kept.rows)
        return why

    def episodes(self) -> dict[str, Any] | None:
        """Return the running episodes for :meth:`play_again`; None if they cannot be saved."""
        return self.simulators.state() if self._saves else None

    def play_again(self, state: Mapping[str, Any]) -> None:
        """Continue the episodes of :meth:`episodes`; copies replay them from the reset.

        Raises:
            EnvError: a copy gives different results than in the recorded episode.
        """
        kept = self.simulators
        if not isinstance(kept, Copies):
            self._call(lambda: kept.restore(state), "restore at step")
            return
        kept.begun, kept.episodes = (state["seed"], list(state["numbers"])), Episodes(kept.rows)
        for copies, actions in replayed(state):
            if actions is None:
                self.reset_native(copies)
            else:
                self.step_native(actions, copies)
        for i, pair in enumerate(zip(kept.episodes.digests, state["digests"], strict=True)):
            if pair[0] != pair[1]:
                raise EnvError(f"{self._setting}: copy {i} does not repeat its recorded episode")

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the copies."""
        self.simulators.close()
        super().close(raise_if_closed=raise_if_closed)


def _prepared(made: gymnasium.Env | Library, layout: Layout | None) -> Library:
    assert not isinstance(made, gymnasium.Env)
    made.prepare(layout)
    return made


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


def make_copies(
    config: EnvConfig, *, seed: int, num_envs: int | None = None, device: str = "cpu"
) -> VectorGymEnv:
    """Make the copies of the chosen ``env`` as one batched environment.

    ``device``: what ``env.target`` gets as its argument of this name, if it has one.
    """
    make = factory("env", config, CONTROL)
    copies: VectorGymEnv = make(config, seed=seed, num_envs=num_envs, device=device)
    return copies


def gym(config: EnvConfig, *, seed: int, num_envs: int | None, device: str) -> VectorGymEnv:
    """``env=gym`` and ``env=custom``; arguments as in :func:`make_copies`."""
    return VectorGymEnv(
        config.id,
        num_envs or config.num_envs,
        seed=seed,
        step_timeout=config.step_timeout,
        make=lambda: make_one(config, num_envs, device),
        setting=config.named,
        action_mask=config.action_mask,
        channels=config.channels,
        # The user's function may build a different simulator for each copy.
        batch=not isinstance(config, CustomEnvConfig),
        threads=config.threads,
    )


def transformed(copies: EnvBase, transforms: tuple[Transform, ...] = ()) -> TransformedEnv:
    """Add the transforms of a rollout to the copies.

    The transforms for an episode's return (``episode_reward``) and length (``step_count``) come
    first, so that the return sums the raw reward even if ``transforms`` subtract a KL.
    """
    return TransformedEnv(copies, Compose(RewardSum(), StepCounter(), *transforms))
