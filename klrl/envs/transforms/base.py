"""Base classes of the KL transforms, which apply to an environment's steps and to batches alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, EnvBase, FrameSkipTransform, Transform, TransformedEnv

from klrl.kl.coefficient import KeepsCoefficient
from klrl.kl.policies import Key, as_key, score
from klrl.kl.shapes import like_reward, reward_shape

Part = TypeVar("Part")
Class = TypeVar("Class", bound=type)


def taking_arguments_of(*parts: type, without: Sequence[str] = ()) -> Callable[[Class], Class]:
    """Replace ``**kwargs`` in a class's signature by arguments of ``parts``, except ``without``."""

    def shown(cls: Class) -> Class:
        own = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
        own = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        for part in parts:
            for each in inspect.signature(part).parameters.values():
                if each.name not in (*without, *(known.name for known in own)):
                    own.append(each.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        cls.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        return cls

    return shown


class InPlace(Transform):
    """A transform whose :attr:`parent` is correct at any position in an environment."""

    @property
    def parent(self) -> EnvBase:
        """The environment up to this transform; None without an environment.

        TorchRL 0.14.1's property fails in a nested Compose: for the first transform it raises an
        IndexError; for later ones it omits the transforms before the nested Compose.
        """
        # tests/transforms/test_places.py fails when TorchRL fixes this.
        if self.__dict__.get("_parent") is None:
            self.__dict__["_parent"] = environment_before(self)
        return self.__dict__["_parent"]


def environment_before(transform: Transform) -> TransformedEnv | None:
    """Build the environment up to ``transform`` from clones; None if it is in no environment."""
    before, _, container = _neighbours(transform)
    if container is None:
        return None
    if not isinstance(container, TransformedEnv):
        raise ValueError(f"{type(container).__name__} is not an environment; use TransformedEnv")
    parent = TransformedEnv(container.base_env, auto_unwrap=False)
    if container.__dict__.get("_torchrl_native_autoreset", False):
        parent._torchrl_native_autoreset = True
    for part in before:
        parent.append_transform(part.clone())
    return parent


def _neighbours(
    transform: Transform,
) -> tuple[list[Transform], list[Transform], Transform | TransformedEnv | None]:
    """Return the transforms before and after ``transform``, and what contains all of them."""
    before: list[Transform] = []
    after: list[Transform] = []
    inner, container = transform, _container(transform)
    while isinstance(container, Compose):
        parts = list(container.transforms)
        place = next(index for index, part in enumerate(parts) if part is inner)
        before, after = [*parts[:place], *before], [*after, *parts[place + 1 :]]
        inner, container = container, _container(container)
    return before, after, container


def _container(transform: Transform) -> Transform | TransformedEnv | None:
    held = transform.__dict__.get("_container")
    return None if held is None else held()


def siblings(transform: Transform) -> list[Transform]:
    """Return the transforms of the Compose that contains ``transform``; [] without a Compose."""
    container = _container(transform)
    return list(container.transforms) if isinstance(container, Compose) else []


class OneTransform(InPlace, Compose):
    """A sequence of transforms that the user sees as a single transform.

    If this Compose is the environment's ``transform``, the environment's ``append_transform``
    appends to it. Therefore parts are looked up by class, never by position.
    """

    def part(self, kind: type[Part]) -> Part:
        """Return the part of class ``kind``."""
        return next(part for part in self.transforms if isinstance(part, kind))

    @property
    def coef(self) -> float | Tensor:
        """The coefficient of the part that charges, reward per nat; may be changed."""
        return self.part(KeepsCoefficient).coef

    @coef.setter
    def coef(self, value: float | Tensor) -> None:
        self.part(KeepsCoefficient).coef = value

    coeff = coef

    def clone(self) -> Self:
        """Copy this transform; the copy shares buffers and models.

        TorchRL's clone of a Compose would be a plain Compose.
        """
        copied = Transform.clone(self)
        copied.transforms = nn.ModuleList(part.clone() for part in self.transforms)
        for part in copied.transforms:
            part.set_container(copied)
        return copied


class NextTransform(InPlace):
    """A transform that reads a transition and writes the keys :attr:`written` under its ``next``.

    Subclasses implement ``_step(tensordict, next_tensordict)``. TorchRL calls ``_step`` at every
    environment step, and :meth:`forward` calls it on a whole batch: both give the same numbers.
    """

    written: list[Key]
    _reward_key: Key | None = None

    @property
    def reward_key(self) -> Key:
        """The given reward key, else the environment's, else "reward"."""
        if self._reward_key is not None:
            return as_key(self._reward_key)
        keys = self.parent.reward_keys if self.parent is not None else []
        if len(keys) > 1:
            raise ValueError(f"the environment has the rewards {keys}: choose one by its key")
        return as_key(keys[0]) if keys else "reward"

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch of transitions, in place."""
        next_tensordict = tensordict.get("next", None)
        if next_tensordict is None:
            raise KeyError(f"{type(self).__name__} reads transitions, but this batch has no 'next'")
        return tensordict.set("next", self._step(tensordict, next_tensordict))

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        """Write zeros at the keys :attr:`written`, since a reset has no action and no KL."""
        output_spec = self.transform_output_spec(self.parent.output_spec.clone())
        spec = output_spec["full_observation_spec"]
        for key in self.written:
            if key in spec.keys(include_nested=True):
                tensordict_reset.set(key, spec[key].zero())
        return tensordict_reset


class ScoresAction(NextTransform):
    """Base of transforms that write a model's log pi(a|s) of the action to their first key."""

    def write_log_prob(
        self,
        model: ProbabilisticTensorDictSequential,
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
        log_prob_keys: Sequence[Key] | None = None,
    ) -> TensorDictBase:
        """Write the log-prob in the reward's batch shape; without a reward, as it is computed.

        ``log_prob_keys`` as in :func:`klrl.kl.policies.score`.
        """
        log_prob = score(model, tensordict, log_prob_keys)
        reward = next_tensordict.get(self.reward_key, None)
        key = self.written[0]
        if reward is not None:
            log_prob = like_reward(f"the log-prob for {key}", log_prob, reward, tensordict.ndim)
        return next_tensordict.set(key, log_prob)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the log-prob, in the reward's batch shape."""
        spec = log_prob_like(observation_spec, self.parent, self.reward_key)
        observation_spec[self.written[0]] = spec
        return observation_spec


def reward_like(parent: EnvBase, key: Key) -> Unbounded:
    """Make the spec of an observation with the shape and dtype of a reward."""
    rewards = parent.full_reward_spec
    observed = key not in rewards.keys(include_nested=True)
    spec = (parent.full_observation_spec if observed else rewards)[key]
    return Unbounded(shape=spec.shape, dtype=spec.dtype, device=spec.device)


def log_prob_like(observation_spec: Composite, parent: EnvBase, key: Key) -> Unbounded:
    """Make a spec with the reward's batch shape; without a reward, one number per environment."""
    shape = observation_spec.shape
    if parent.reward_keys:
        shape = reward_shape(reward_like(parent, key).shape, len(parent.batch_size))
    return Unbounded(shape=shape, device=observation_spec.device)


def reward_of(next_tensordict: TensorDictBase, key: Key) -> Tensor:
    """Return the reward of a transition; raise a KeyError if it is missing."""
    reward = next_tensordict.get(key, None)
    if reward is None:
        raise KeyError(f"no reward at {('next', key)}: give its key in in_keys")
    return reward


def one_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``choices``; refuse anything else."""
    if value not in choices:
        raise ValueError(f"{name}={value}: choose one of {', '.join(choices)}")
    return value


def one_key(name: str, keys: Key | Sequence[Key]) -> Key:
    """Return the key if ``keys`` is one key or a list of one key; refuse anything else."""
    listed: list[Any] = list(keys) if isinstance(keys, list) else [keys]
    if len(listed) != 1:
        raise ValueError(f"{name}={listed}: exactly one key is allowed")
    if not _is_key(listed[0]):
        raise ValueError(f"{name}={listed}: a key is a string or a tuple of strings")
    return as_key(listed[0])


def _is_key(key: object) -> bool:
    if isinstance(key, tuple):
        return bool(key) and all(map(_is_key, key))
    return isinstance(key, str)


def refuse_second_charge(next_tensordict: TensorDictBase, raw_key: Key | None) -> None:
    """Raise an error if the data have a raw reward already, since it proves an earlier charge."""
    if raw_key is not None and raw_key in next_tensordict.keys(include_nested=True):
        raise RuntimeError(
            f"the KL was charged to this reward already (the batch has {raw_key}); charge it once"
        )


def refuse_repeated_charge(transform: Transform) -> None:
    """Raise an error if a FrameSkipTransform after ``transform`` would charge one action again."""
    for part in (module for each in _neighbours(transform)[1] for module in each.modules()):
        if isinstance(part, FrameSkipTransform) and part.frame_skip > 1:
            raise RuntimeError(
                f"the KL of one action would be charged {part.frame_skip} times; put "
                "FrameSkipTransform before the transform that charges it"
            )
