"""Wrap a custom TorchRL environment (``EnvBase``) as one copy of a Gymnasium environment.

The specs become spaces, and the wrapper stores the data for the next step (``step_mdp``). TorchRL's
``register_gym`` is not used: it passes an action's number even if the environment expects a one-hot
vector, and turns a mask into a Discrete(2).

Each copy draws from its own random stream. Without it, an evaluation would change the noise of the
policy in training, since many environments seed torch's global generator.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
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
from torchrl.envs import EnvBase, check_env_specs

from klrl.base.errors import ConfigError, in_one_line
from klrl.base.seeds import Stream
from klrl.control.env.contract import Misfit

#: A key of a tensordict: a name, or a tuple for nested entries.
Key = str | tuple[str, ...]


class TorchRLEnv(gymnasium.Env):
    """A copy of a TorchRL environment of batch size [], with one action and one reward."""

    specs_calls = 10  # the largest number of resets and steps in :meth:`require_specs`

    def __init__(self, setting: str, base: EnvBase) -> None:
        _require_one(setting, base)
        self.base = base
        self._action_key, self._reward_key = base.action_keys[0], base.reward_keys[0]
        self._action_spec: TensorSpec = base.full_action_spec[self._action_key]
        spec = self._action_spec  # the policy's action is a number even if the spec is one-hot
        plain = spec.to_categorical_spec() if isinstance(spec, OneHot) else spec
        self.action_space = _space(f"{setting}: its action_spec", plain)
        whole = _space(f"{setting}: its observation_spec", base.observation_spec)
        assert isinstance(whole, spaces.Dict)
        # A single entry becomes the observation itself; several entries become a Dict.
        keys = list(whole.spaces)
        self._alone = keys[0] if len(keys) == 1 else None
        self.observation_space = whole if self._alone is None else whole[self._alone]
        self.metadata = dict(getattr(base, "metadata", None) or {})
        self.render_mode = getattr(base, "render_mode", None)
        self._stream = Stream(0)
        #: The data for the next step.
        self._carried = TensorDict()

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[object, dict[str, object]]:
        """Reset the environment; ``options`` are ignored."""
        if seed is not None:
            self._stream = Stream(seed)
        with self._stream.drawing():
            if seed is not None:
                self.base.set_seed(seed)
            self._carried = self.base.reset()
        return self._seen(self._carried), {}

    def step(self, action: object) -> tuple[object, float, bool, bool, dict[str, object]]:
        """Step the environment; report ``done`` without ``terminated`` as a truncation."""
        given = self._carried.copy().set(self._action_key, self._as_action(action))
        with self._stream.drawing():
            stepped = self.base.step(given)
            self._carried = self.base.step_mdp(stepped)
        after = stepped["next"]
        done, terminated = _flag(after, "done"), _flag(after, "terminated")
        truncated = _flag(after, "truncated") or (done and not terminated)
        reward = float(_entry(after, self._reward_key).item())
        return self._seen(after), reward, terminated, truncated, {}

    def render(self) -> object:
        """Return the result of the wrapped ``render``; a tensor becomes an array."""
        drawn = self.base.render()  # a subclass of EnvBase may have ``render``
        return drawn.cpu().numpy() if isinstance(drawn, Tensor) else drawn

    def close(self) -> None:
        """Close the environment."""
        self.base.close(raise_if_closed=False)

    def require_specs(self) -> None:
        """Raise a Misfit if a reset or a step does not fit the specs."""
        logger = logging.getLogger("torchrl")
        before, level = self.base.observation_spec, logger.level
        with self._stream.drawing():
            start = self.base.rand_action(self.base.reset())
            _require_entries("reset", start, before)
            # Not step(), which gives an unclear error if _step omits an entry.
            after = self.base._step(start.copy())
            for spec in (before, self.base.full_reward_spec):
                _require_entries("step", after, spec)
            logger.setLevel(logging.WARNING)  # hide the line that check_env_specs logs on success
            try:
                check_env_specs(self.base)
            except AssertionError as error:
                why = in_one_line(error)
                raise Misfit(f"torchrl's check_env_specs refuses the specs: {why}") from error
            finally:
                logger.setLevel(level)

    def _as_action(self, action: object) -> Tensor:
        spec = self._action_spec
        given = torch.tensor(np.asarray(action))
        if isinstance(spec, OneHot):
            given = spec.to_categorical_spec().to_one_hot(given.long())
        return given.to(spec.dtype).reshape(spec.shape).to(self.base.device)

    def _seen(self, data: TensorDictBase) -> object:
        if self._alone is not None:
            return _array(data, self._alone)
        return _arrays(data, self.base.observation_spec)


def as_gym(setting: str, made: object) -> object:
    """Convert a TorchRL environment to Gymnasium; return anything else unchanged."""
    return TorchRLEnv(setting, made) if isinstance(made, EnvBase) else made


def _require_one(setting: str, base: EnvBase) -> None:
    """Require batch size [], one action, one reward and a done entry."""
    if tuple(base.batch_size):
        raise ConfigError(
            f"{setting}: has the batch size {list(base.batch_size)}; return one environment of "
            "batch size []; klrl makes env.num_envs copies of it"
        )
    for what, keys in (("action", base.action_keys), ("reward", base.reward_keys)):
        if len(keys) != 1:
            raise ConfigError(f"{setting}: has {len(keys)} {what}s ({_listed(keys)}); give one")
    if "done" not in base.done_keys:
        raise ConfigError(f"{setting}: its done_spec has {_listed(base.done_keys)}; add done")


# ------------------------------------------------------------------------------------------ specs


def _space(what: str, spec: TensorSpec) -> gymnasium.Space:
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


def _flag(data: TensorDictBase, name: str) -> bool:
    value = data.get(name, None)
    return value is not None and bool(value.any())


def _array(data: TensorDictBase, key: Key) -> np.ndarray:
    return _entry(data, key).detach().cpu().numpy()


def _arrays(data: TensorDictBase, spec: Composite) -> dict[str, object]:
    """Convert a spec's entries to arrays, nested as in the spec."""
    return {
        key: _arrays(data[key], each) if isinstance(each, Composite) else _array(data, key)
        for key, each in spec.items()
    }


def _listed(keys: Iterable[Key]) -> str:
    return ", ".join(key if isinstance(key, str) else ".".join(key) for key in keys)
