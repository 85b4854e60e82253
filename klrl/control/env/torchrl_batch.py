"""TorchRL environments (``EnvBase``) as simulators that step together.

An environment of batch size [N] steps as it is; so does one of batch size [] that takes any batch
size (``batch_locked`` is false). Of any other, TorchRL's ``SerialEnv`` steps N copies one by one.
The environment may compute on any device, where its results stay. ``MJLabWrapper``,
``IsaacLabWrapper`` and the other wrappers of TorchRL are such environments.

A batch draws from its own random stream. Without it, an evaluation would change the noise of the
policy in training, since many environments seed torch's global generator.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.data.utils import torch_to_numpy_dtype_dict
from torchrl.envs import (
    EnvBase,
    GymLikeEnv,
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
)

from klrl.base.errors import ConfigError, first_line, in_one_line
from klrl.base.seeds import Stream, generators_kept
from klrl.control.env.contract import Misfit
from klrl.control.env.library import Library
from klrl.control.env.simulators import Array, Native, Results, native, on_host

#: A key of a tensordict: a name, or a tuple for nested entries.
Key = str | tuple[str, ...]
#: Steps before the state of a first object is saved, and steps that a second one must repeat.
_PAST, _COMPARED = 8, 24


def as_batch(
    setting: str, made: object, make: Callable[[], Any], count: int
) -> TorchRLBatch | None:
    """Make simulators of a TorchRL environment; return None for anything else.

    ``make`` makes further copies of an environment that has no batch.
    """
    if not isinstance(made, EnvBase):
        return None
    _require_one(setting, made)
    env: EnvBase = made
    if not tuple(env.batch_size) and env.batch_locked:
        env = SerialEnv(count, make)
    if isinstance(env, SerialEnv | ParallelEnv) and env.is_closed:
        env.start()  # before this, it answers no questions about its copies
    count = env.batch_size.numel() if env.batch_size else count
    return TorchRLBatch(setting, env, count, made)


class TorchRLBatch(Library):
    """A TorchRL environment of ``count`` simulators, with one action and one reward.

    ``tried``: the environment whose specs are checked, ``env`` or one copy of those in it.
    """

    def __init__(self, setting: str, env: EnvBase, count: int, tried: EnvBase) -> None:
        self._tried = tried
        self._action_key, self._reward_key = env.action_keys[0], env.reward_keys[0]
        self._action_spec: TensorSpec = env.full_action_spec_unbatched[self._action_key]
        spec = self._action_spec  # the policy's action is a number even if the spec is one-hot
        plain = spec.to_categorical_spec() if isinstance(spec, OneHot) else spec
        seen = _space(f"{setting}: its observation_spec", env.observation_spec_unbatched)
        action = _space(f"{setting}: its action_spec", plain)
        super().__init__(setting, env, count, (seen, action), _inner(tried))
        self.select(list(seen.spaces))
        self.device = str(env.device or "cpu")
        self.stepped = f"{count} copies in a {type(env).__name__}"
        if self.device != "cpu":
            self.stepped += f" on {self.device}"
        shown = _first(getattr(env, "metadata", None)) or {}
        self.pictures_per_second = float(shown.get("render_fps", 30))
        self.longest_episode = min(_limits(env), default=None)
        self._stream = Stream(0)
        self._data = TensorDict()  # the data for the next step
        self._seen: Native = np.empty(0)  # the results of the last step
        self._never = torch.zeros(count, dtype=torch.bool, device=env.device)

    def select(self, keys: Sequence[str]) -> None:
        """Show some entries only; a single entry is the observation itself."""
        super().select(keys)
        self._alone = keys[0] if len(keys) == 1 else None
        if self._alone is not None:
            self.seen_space = self.observation_space = self.seen_space[self._alone]

    def _begin(self, seed: int) -> Native:
        self._stream = Stream(seed)
        # An environment without a batch of its own takes that of the data.
        sized = None if tuple(self.env.batch_size) else TensorDict(batch_size=[self.count])
        with self._stream.drawing(), torch.no_grad():
            self.env.set_seed(seed)
            self._data = self.env.reset(None if sized is None else sized.to(self.env.device))
        return self._shown(self._data)

    def _reset(self, mask: Native) -> Native:
        begins = torch.as_tensor(mask, device=self.env.device).unsqueeze(-1)
        if self.device != "cpu":
            self._look(begins[:, 0])
        with self._stream.drawing(), torch.no_grad():
            self._data = self.env.reset(self._data.set("_reset", begins), set_state=False)
        self._data.pop("_reset", None)
        return self._shown(self._data)

    def step(self, action: Native, mask: Native | None = None) -> Results:
        """Step all simulators; report ``done`` without ``terminated`` as a truncation."""
        given = self._data.set(self._action_key, self._as_action(action))
        with self._stream.drawing(), torch.no_grad():
            stepped = self.env.step(given)
        after = stepped["next"]
        done, terminated = self._flag(after, "done"), self._flag(after, "terminated")
        truncated = self._flag(after, "truncated") | (done & ~terminated)
        reward, self._seen = (
            native(self._per_copy(after, self._reward_key)),
            self._shown(after, done),
        )
        self._data = self.env.step_mdp(stepped)
        if self.device == "cpu" and (ended := done | truncated).any():
            self._look(ended)  # on a device this would wait for it
        return self._seen, reward, terminated, truncated

    def _look(self, ended: Native) -> None:
        """Find whether the last observations are known; some wrappers give NaN for them."""
        numbers = self._seen[ended].reshape(-1)
        if self.final and len(numbers) and (numbers != numbers).all():
            self.final = False

    def render(self) -> object:
        """Return the first copy's picture; a tensor becomes an array."""
        drawn = _first(self.env.render())  # a subclass of EnvBase may have ``render``
        return drawn.cpu().numpy() if isinstance(drawn, Tensor) else drawn

    # ---------------------------------------------------------------------- running episodes

    def why_anew(self, again: Callable[[], Any]) -> str:
        """Compare a second object, restored from the state of a first one, with the first."""
        rng = np.random.default_rng(0)
        try:
            with generators_kept():
                first = again()
                if first.inner is self.inner:
                    return "its simulators exist once, so none can be compared with them"
                seen = _continued(first, first.reset(None), rng, _PAST)[-1]
                state, later = copy.deepcopy(first.state()), copy.deepcopy(rng)
                expected = _continued(first, seen, rng, _COMPARED)
                second = again()
                second.restore(state)
                found = _continued(second, seen, later, _COMPARED)
        except Exception as error:  # an environment may raise anything
            return f"a second object of the environment raises an error: {first_line(error)}"
        same = all(x.tobytes() == y.tobytes() for x, y in zip(expected, found, strict=True))
        return "" if same else "a second object, restored from its state, continues differently"

    def state(self) -> dict[str, Any]:
        """Return what :meth:`restore` needs to continue the running episodes."""
        return {
            "data": self._data.to_dict(),
            "env": dict(self.env.state_dict()),
            "stream": self._stream.state,
            "generators": [each.get_state() for each in self._generators()],
            "resets": self._resets,
            "seed": self._seed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue the episodes of :meth:`state`, of this object or of an equal one."""
        self.reset(None)
        self._data = TensorDict(state["data"], [self.count], device=self.env.device)
        self.env.load_state_dict(state["env"])
        self._stream.state = state["stream"].cpu()
        for generator, kept in zip(self._generators(), state["generators"], strict=True):
            generator.set_state(kept.cpu())
        self._seed, self._resets = state["seed"], state["resets"]

    def _generators(self) -> Iterator[torch.Generator]:
        env: Any = self.env
        while env is not None:
            yield from (x for x in vars(env).values() if isinstance(x, torch.Generator))
            env = env.base_env if isinstance(env, TransformedEnv) else None

    # ------------------------------------------------------------------------------- results

    def trial(self) -> None:
        """Reset and step all simulators once; raise a Misfit if the results do not fit."""
        with self._stream.drawing(), torch.no_grad():
            _require_specs(self._tried)
        super().trial()

    def _as_action(self, action: Native) -> Tensor:
        spec = self._action_spec
        given = torch.as_tensor(action, device=self.env.device)
        if isinstance(spec, OneHot):
            given = spec.to_categorical_spec().to_one_hot(given.long())
        return given.to(self.env.device, spec.dtype).reshape(self.count, *spec.shape)

    def _shown(self, data: TensorDictBase, ended: Native | None = None) -> Native:
        return self._packed(data if self._alone is None else _entry(data, self._alone), ended)

    def _per_copy(self, data: TensorDictBase, key: Key) -> Tensor:
        value = _entry(data, key)
        if value.numel() != self.count:
            shape = tuple(value.shape)
            raise Misfit(f"{_listed([key])} has shape {shape}; one per copy is expected")
        return value.reshape(-1)

    def _flag(self, data: TensorDictBase, name: str) -> Native:
        known = data.get(name, None) is not None
        return native(self._per_copy(data, name) if known else self._never)


def _require_specs(env: EnvBase) -> None:
    """Raise a Misfit if a reset or a step does not fit the specs."""
    logger = logging.getLogger("torchrl")
    level = logger.level
    start = env.rand_action(env.reset())
    _require_entries("reset", start, env.observation_spec)
    # Not step(), which gives an unclear error if _step omits an entry.
    after = env._step(start.copy())
    for spec in (env.observation_spec, env.full_reward_spec):
        _require_entries("step", after, spec)
    logger.setLevel(logging.WARNING)  # hide the line that check_env_specs logs on success
    try:
        check_env_specs(env)
    except AssertionError as error:
        why = in_one_line(error)
        raise Misfit(f"torchrl's check_env_specs refuses the specs: {why}") from error
    finally:
        logger.setLevel(level)


def _inner(env: Any) -> Any:
    """Return what an environment's transforms, and TorchRL's wrapper of it, wrap."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return getattr(env._env, "unwrapped", env) if isinstance(env, GymLikeEnv) else env


def _limits(env: Any) -> Iterator[int]:
    """Yield the numbers of steps after which an environment declares to end an episode."""
    if isinstance(env, TransformedEnv):
        steps = (getattr(each, "max_steps", None) for each in env.transform.modules())
        yield from (int(each) for each in steps if each is not None)
        yield from _limits(env.base_env)
    elif (steps := _first(getattr(env, "max_episode_steps", None))) is not None:
        yield int(steps)


def _first(value: Any) -> Any:
    """Return the first copy's answer, if ``SerialEnv`` gives a list of answers."""
    return value[0] if isinstance(value, list) else value


def _continued(sims: Library, seen: Native, rng: np.random.Generator, steps: int) -> list[Array]:
    """Step simulators; return copies of all results, and their observation at the end."""
    told = []
    for step in range(steps):
        results = sims.step(sims.draw(seen, rng))
        told += [on_host(each).copy() for each in results]
        ended = results[2] | results[3] | (step == steps // 2)  # a reset draws, too
        seen = sims.reset(ended) if ended.any() else results[0]
        told.append(on_host(seen).copy())
    return told


def _require_one(setting: str, base: EnvBase) -> None:
    """Require at most one batch dimension, one action, one reward and a done entry."""
    if len(base.batch_size) > 1:
        raise ConfigError(
            f"{setting}: has the batch size {list(base.batch_size)}; return an environment of "
            "batch size [N]"
        )
    for what, keys in (("action", base.action_keys), ("reward", base.reward_keys)):
        if len(keys) != 1:
            raise ConfigError(f"{setting}: has {len(keys)} {what}s ({_listed(keys)}); give one")
    reward = base.full_reward_spec_unbatched[base.reward_keys[0]]
    if reward.shape.numel() != 1:
        raise ConfigError(
            f"{setting}: its reward has shape {list(reward.shape)} per simulator; give one number, "
            "for one agent"
        )
    if "done" not in base.done_keys:
        raise ConfigError(f"{setting}: its done_spec has {_listed(base.done_keys)}; add done")


# ------------------------------------------------------------------------------------------ specs


def _space(what: str, spec: TensorSpec) -> Space:
    """Convert a spec of batch size [] to a space; ``what`` names the spec in errors."""
    if isinstance(spec, Composite):
        return spaces.Dict({key: _space(f"{what}'s {key}", each) for key, each in spec.items()})
    shape, dtype = tuple(spec.shape), torch_to_numpy_dtype_dict.get(spec.dtype)
    if dtype is None or any(size < 1 for size in shape):
        raise ConfigError(f"{what} is {spec.dtype or 'no tensor'} of shape {shape}; {_LEAVE_OUT}")
    if isinstance(spec, OneHot | Binary) or spec.dtype == torch.bool:
        return spaces.MultiBinary(shape) if shape else spaces.Discrete(2)
    if isinstance(spec, MultiCategorical):
        return spaces.MultiDiscrete(spec.nvec.numpy())
    if isinstance(spec, Categorical):
        return spaces.MultiDiscrete(np.full(shape, spec.n)) if shape else spaces.Discrete(spec.n)
    if isinstance(spec, Bounded):
        return spaces.Box(spec.low.cpu().numpy(), spec.high.cpu().numpy(), shape, dtype)
    if isinstance(spec, Unbounded):
        low, high = -np.inf, np.inf
        if np.issubdtype(dtype, np.integer):
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return spaces.Box(low, high, shape, dtype)
    raise ConfigError(f"{what} is a {type(spec).__name__}; {_LEAVE_OUT}")


_LEAVE_OUT = "leave it out, with torchrl.envs.ExcludeTransform, or wrap the environment"


# ---------------------------------------------------------------------------------------- results


def _require_entries(when: str, data: TensorDictBase, spec: Composite) -> None:
    """Require that ``data`` has the entries of a spec, with their dtypes and sizes."""
    for key, leaf in spec.items(True, True):
        value = data.get(key, None)
        if not isinstance(value, Tensor):
            raise Misfit(f"{when} wrote no {_listed([key])}, which its spec requires; write it")
        if (value.dtype, value.numel()) != (leaf.dtype, leaf.shape.numel()):
            wrote, due = (f"{x.dtype} of shape {list(x.shape)}" for x in (value, leaf))
            raise Misfit(f"{when} wrote {_listed([key])} as {wrote}, but its spec requires {due}")


def _entry(data: TensorDictBase, key: Key) -> Tensor:
    value = data.get(key, None)
    if not isinstance(value, Tensor):
        raise Misfit(f"the environment wrote no {_listed([key])}")
    return value


def _listed(keys: Iterable[Key]) -> str:
    return ", ".join(key if isinstance(key, str) else ".".join(key) for key in keys)
