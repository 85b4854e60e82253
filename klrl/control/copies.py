"""Copies of a Gymnasium environment as one batched environment of TorchRL.

TorchRL's GymEnv builds specs and converts observations at every step (135 us of CPU against 10 for
Gymnasium's own step), and with SAME_STEP autoreset it hides the last observation of an episode in
an info dictionary. Gymnasium's SyncVectorEnv merges info dictionaries that nothing here reads, for
2 us a step, 20 us with a single MuJoCo copy. Here the copies are stepped in a plain loop and those
that are done are reset through a mask, so ``("next", "observation")`` is always the step's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import FlattenObservation, TimeLimit
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary
from torchrl.envs import EnvBase

from klrl.base.errors import EnvError, NonFiniteError
from klrl.base.seeds import generators_kept
from klrl.base.time_limit import TookTooLong, within
from klrl.control.action_space import conversion, told
from klrl.control.answers import (
    FLAGS,
    NUMBERS,
    REAL,
    require_flag,
    require_number,
    require_observation,
    require_picture,
)
from klrl.control.answers import told as fault
from klrl.control.env_proof import Way, prove, take_up
from klrl.control.gym_make import make_gym
from klrl.control.observation import MASK, Layout, Packed, flattened, layout_of
from klrl.control.specs import action_spec, done_spec, observation_spec, reward_spec


class VectorGymEnv(EnvBase):
    """``num_envs`` copies of a Gymnasium environment, stepped one after the other in this process.

    ``observation`` [N, D] is a vector of float32, or the transport of several entries, float32 or
    uint8, as :mod:`klrl.control.observation` says. Actions are flat, as
    :mod:`klrl.control.action_space` says: float32 [N, A] for Box, clipped to the bounds on the way
    into the simulator, int64 [N] for Discrete, int64 [N, M] for MultiDiscrete and MultiBinary.
    ``reward, done, terminated, truncated`` [N, 1].

    Args:
        env_id: a Gymnasium id.
        num_envs: the number of copies, N.
        kwargs: arguments of ``gymnasium.make``.
        seed: seed of the first reset; copy i is seeded with seed + i.
        step_timeout: seconds that a step or a reset of all copies may take; None sets no limit.
        make: makes a copy; default ``gymnasium.make`` of the id.
        setting: that names the environment, for errors; default ``env.id=...``.
        action_mask: ``env.action_mask``.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int = 1,
        *,
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        step_timeout: float | None = None,
        make: Callable[[], gymnasium.Env] | None = None,
        setting: str | None = None,
        action_mask: str = "auto",
    ) -> None:
        super().__init__(device=torch.device("cpu"), batch_size=torch.Size([num_envs]))
        self.env_id = env_id
        self.num_copies = num_envs
        self._next_seed: int | None = seed
        self._setting = setting or f"env.id={env_id}"
        make = make or partial(make_gym, env_id, kwargs or {})
        copies = [make() for _ in range(num_envs)]
        spaces = copies[0].observation_space, copies[0].action_space
        self.layout = layout_of(self._setting, *spaces, action_mask)
        seen = flattened(spaces[0]) if self.layout is None else self.layout.line
        #: What the policy sees or does otherwise than the environment.
        self.notes = [line for line in (seen, told(spaces[1])) if line is not None]
        self._envs = [_make_flat(copy, self.layout) for copy in copies]
        self._make = lambda: _make_flat(make(), self.layout)
        self._way: Way | None = None
        self._new = True
        #: Of ``observation``, wherever it is stored.
        self.observation_dtype = np.dtype("float32" if self.layout is None else self.layout.dtype)
        self._action_mask = action_mask
        self._set_specs()
        space = self._envs[0].observation_space
        self._observations = np.zeros((num_envs, *space.shape), space.dtype)
        self._rewards = np.zeros(num_envs)
        self._ends = np.zeros(num_envs, bool), np.zeros(num_envs, bool)
        self._step_timeout = step_timeout
        self._place = _Place()

    def _set_specs(self) -> None:
        n = self.num_copies
        observation, action = self._envs[0].observation_space, self._envs[0].action_space
        self.observation_spec = observation_spec(observation.shape, self.observation_dtype, n)
        self.action_spec = action_spec(self._setting, action, n)
        self.reward_spec, self.done_spec = reward_spec(n), done_spec(n)
        self._box = isinstance(action, gymnasium.spaces.Box)
        if self._box:
            self._low, self._high = action.low.reshape(-1), action.high.reshape(-1)
        self._converted = conversion(action)

    def unread_mask(self) -> str | None:
        """A line about a mask in ``info`` that is not read, seen in one more copy; None without."""
        discrete = not self._box and not isinstance(self.action_spec, Binary)
        masked = self.layout is not None and self.layout.masked
        if self._action_mask != "auto" or not discrete or masked:
            return None
        try:
            with generators_kept():
                copy = self._make()
                _, info = within(self._step_timeout, partial(copy.reset, seed=0))
                copy.close()
        except Exception:  # someone else's code: the run's own reset will report it
            return None
        if not isinstance(info, Mapping) or MASK not in info:
            return None
        return (
            f"actions: info has {MASK}, which env.action_mask=auto does not read; set "
            "env.action_mask=info, or none to leave it unread"
        )

    @property
    def longest_episode(self) -> int | None:
        """Steps after which Gymnasium's TimeLimit ends an episode; None without one."""
        env: Any = self._envs[0]
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, TimeLimit):
                return int(env._max_episode_steps)
            env = env.env
        return None

    @property
    def pictures_per_second(self) -> float:
        """The speed at which its pictures are to be shown."""
        return float(self._envs[0].metadata.get("render_fps", 30))

    def picture(self) -> np.ndarray:
        """The first copy as it is now, uint8 [height, width, 3]; made with an rgb_array mode."""
        drawn: list[np.ndarray] = []

        def draw() -> None:
            self._place.copy = 0
            drawn.append(require_picture(self._envs[0].render()))

        self._call_copies(draw, "picture after step")
        return drawn[0]

    def reset_native(
        self, mask: np.ndarray | None = None, seeds: Sequence[int] | None = None
    ) -> np.ndarray:
        """Reset all copies, or those of a mask [N]; observations [N, D].

        A copy that is not reset keeps its last one. ``seeds`` has one for each copy, reset or
        not. The next call reuses the memory.
        """
        self._call_copies(lambda: self._reset_copies(mask, seeds), "reset")
        return self._observations

    def _reset_copies(self, mask: np.ndarray | None, seeds: Sequence[int] | None) -> None:
        first, self._next_seed = self._next_seed, None
        if self._new:  # to set an attribute takes 2 us
            self._new = False
        if seeds is None and first is not None:
            seeds = range(first, first + self.num_copies)
        shape = self._observations.shape[1:]
        for i, env in enumerate(self._envs):
            if mask is None or mask[i]:
                self._place.copy = i
                observation, _info = env.reset(seed=None if seeds is None else seeds[i])
                require_observation(observation, shape)
                self._observations[i] = observation

    def step_native(
        self, action: np.ndarray, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step all copies, or those of a mask [N], with actions [N, A] or [N].

        Observation [N, D], reward [N], terminated [N], truncated [N]; whether they are finite is
        not checked, and the next call reuses their memory.
        """
        if self._box:
            # np.clip costs three times these two.
            action = np.minimum(np.maximum(action, self._low), self._high)
        given = action if self._converted is None else self._converted(action)
        self._place.step += 1
        self._call_copies(lambda: self._step_copies(given, mask), "step")
        return self._observations, self._rewards, *self._ends

    def _step_copies(self, action: Iterable[Any], mask: np.ndarray | None) -> None:
        observations, rewards = self._observations, self._rewards
        terminated, truncated = self._ends
        place, shape = self._place, observations.shape[1:]
        for i, (env, chosen) in enumerate(zip(self._envs, action, strict=True)):
            if mask is not None and not mask[i]:
                continue
            place.copy = i
            observation, reward, terminal, timeout, _info = env.step(chosen)
            # A tenth of a microsecond, where nothing is wrong; numpy would take nearly anything.
            if not (
                type(observation) is np.ndarray
                and observation.shape == shape
                and observation.dtype.kind in REAL
                and type(reward) in NUMBERS
                and type(terminal) in FLAGS
                and type(timeout) in FLAGS
            ):
                require_observation(observation, shape)
                reward = require_number(reward)
                terminal = require_flag("terminated", terminal)
                timeout = require_flag("truncated", timeout)
            observations[i], rewards[i] = observation, reward
            terminated[i], truncated[i] = terminal, timeout

    def _call_copies(self, call: Callable[[], None], what: str) -> None:
        """Step or reset them; whatever goes wrong is an EnvError in one line."""
        try:
            within(self._step_timeout, call)
        except TookTooLong:
            limit = f"env.step_timeout={self._step_timeout:g}"
            raise EnvError(f"{self._where(what)}: {limit}: took longer") from None
        except Exception as error:  # someone else's code: it may raise anything
            raise EnvError(f"{self._where(what)}: {fault(error)}") from error

    def _where(self, what: str) -> str:
        return f"{self._setting}: {what} {self._place.step} of copy {self._place.copy}"

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
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
        """Observations [N, ...] as they are stored, copied; bytes are always finite."""
        if self.observation_dtype == np.uint8:
            return torch.from_numpy(value.copy())
        return self.finite("observation", value, when)

    def finite(self, what: str, value: np.ndarray, when: str) -> torch.Tensor:
        """Numbers [N, ...] as float32 (where 1e39 is infinite), copied.

        Raises:
            NonFiniteError: a NaN or an infinity; it names the copy of the environment.
        """
        # numpy warns of 1e39; np.errstate would take 2 us of every step to silence it.
        tensor = torch.from_numpy(np.array(value, dtype=np.float32, copy=True))
        if not torch.isfinite(tensor).all():
            bad = (~torch.isfinite(tensor)).nonzero()
            raise NonFiniteError(
                f"{what} of {self.env_id} (copy {int(bad[0, 0])}) is not finite {when}; "
                "the simulator diverged or the actions are not finite"
            )
        return tensor

    def seed_first_reset(self, seed: int) -> None:
        """Seed the next reset; copy i gets seed + i."""
        self._next_seed = seed

    def _set_seed(self, seed: int | None) -> None:
        self._next_seed = seed

    # ------------------------------------------------------------------------------- its state

    def keep_state(self) -> Way:
        """Have the copies' state at hand, from before their first reset on; how it is saved."""
        if self._way is None:
            self._way = prove(self._make, self._step_timeout)
            self._envs = [self._way.keep(env) for env in self._envs]
        return self._way

    def copies_state(self) -> torch.Tensor | None:
        """The state of all copies [bytes], JSON in uint8; None where a copy cannot be saved."""
        copies = [None if self._way is None else self._way.read(env) for env in self._envs]
        if None in copies:
            return None
        text = json.dumps({"next_seed": self._next_seed, "copies": copies})
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_copies_state(self, state: torch.Tensor) -> None:
        """Go on from :meth:`copies_state`; where that fails, the copies are as they were made."""
        saved = json.loads(state.cpu().numpy().tobytes())
        if not self._new:
            self._make_anew()
        try:
            for env, of_copy in zip(self._envs, saved["copies"], strict=True):
                within(self._step_timeout, partial(take_up, env, of_copy))
        except BaseException:
            self._make_anew()
            raise
        self._next_seed, self._new = saved["next_seed"], False

    def _make_anew(self) -> None:
        """Replace the copies by new ones."""
        for env in self._envs:
            env.close()
        made = [self._make() for _ in range(self.num_copies)]
        self._envs = made if self._way is None else [self._way.keep(env) for env in made]
        self._new = True

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the copies."""
        for env in self._envs:
            env.close()
        super().close(raise_if_closed=raise_if_closed)


@dataclass(slots=True)
class _Place:
    """Which copy is stepped or reset, and how often all were stepped."""

    copy: int = 0
    step: int = 0


def _make_flat(env: gymnasium.Env, layout: Layout | None) -> gymnasium.Env:
    if layout is not None:
        return Packed(env, layout)
    space = env.observation_space
    if isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1:
        return env
    return FlattenObservation(env)
