"""The base of the KL transforms: one function for an environment step and for a batch."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from klrl.kl.charge import shaped
from klrl.kl.coefficient import KeepsCoefficient, one_spelling
from klrl.kl.policies import Key, as_key, has_all, sum_heads


class NextTransform(Transform):
    """A transform that reads a transition and writes below its ``next``.

    Subclasses implement ``_step(tensordict, next_tensordict)``. TorchRL calls it once per
    environment step; :meth:`forward` calls it on a whole batch, so that both give the same numbers.

    Attributes:
        written: the keys that it writes.
    """

    written: list[Key]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch of transitions, in place.

        Raises:
            KeyError: the batch has no "next".
        """
        next_tensordict = tensordict.get("next", None)
        if next_tensordict is None:
            raise KeyError(f"{type(self).__name__} reads transitions, and this batch has no 'next'")
        return tensordict.set("next", self._step(tensordict, next_tensordict))

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        """A reset has no action and so no KL: write the zeros that the observation spec promises.

        A reward is no observation, and a reset has none.
        """
        output_spec = self.transform_output_spec(self.parent.output_spec.clone())
        spec = output_spec["full_observation_spec"]
        for key in self.written:
            if key in spec.keys(include_nested=True):
                tensordict_reset.set(key, spec[key].zero())
        return tensordict_reset


class ChargedReward(KeepsCoefficient, NextTransform):
    """The charge of the control transforms: reward <- reward - coef * KL.

    Args:
        coef: reward per nat; :attr:`coef` may be moved later.
        in_keys: the key of the reward to read; a string or a list of one. Default ``reward``.
        out_keys: the key of the reward to write; default ``in_keys``.
        raw_reward_key: where to keep the reward that was read; None keeps none.
        reads: further keys that a subclass reads.
        coeff: the other spelling of ``coef``.

    Raises:
        ValueError: more than one in- or out-key; a coefficient that is no number >= 0.
    """

    def __init__(
        self,
        coef: float | Tensor,
        in_keys: Key | Sequence[Key] | None,
        out_keys: Key | Sequence[Key] | None,
        raw_reward_key: Key | None,
        reads: Sequence[Key],
        coeff: float | Tensor | None = None,
    ) -> None:
        self.reward_key = one_key("in_keys", "reward" if in_keys is None else in_keys)
        self.out_key = one_key("out_keys", self.reward_key if out_keys is None else out_keys)
        self.raw_key = raw_reward_key and as_key(raw_reward_key)
        super().__init__(in_keys=[self.reward_key, *reads], out_keys=[self.out_key])
        self.written = [key for key in (self.out_key, self.raw_key) if key is not None]
        self.keep_coefficient(one_spelling(coef, coeff))

    coef: Tensor

    def charge(self, next_tensordict: TensorDictBase, reward: Tensor, kl: Tensor) -> TensorDictBase:
        """Write the charged reward, and the one that was read where it is kept.

        Args:
            next_tensordict: where to write.
            reward: as it was read, [..., 1].
            kl: nats, as many numbers.

        Raises:
            RuntimeError: the reward was charged already (seen by ``raw_reward_key``).
        """
        refuse_second_charge(next_tensordict, self.raw_key)
        if self.raw_key is not None:
            next_tensordict.set(self.raw_key, reward)
        charged = shaped(reward, kl.view_as(reward), self.coef)
        return next_tensordict.set(self.out_key, charged)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """The charged reward replaces the reward, or is a new observation beside it."""
        parent, observation_spec = self.parent, output_spec["full_observation_spec"]
        charged = reward_like(parent)
        if self.reward_key in observation_spec.keys(include_nested=True):
            like = observation_spec[self.reward_key]
            charged = Unbounded(shape=like.shape, dtype=like.dtype, device=like.device)
        if self.out_key == parent.reward_key:
            output_spec["full_reward_spec"][self.out_key] = charged
        else:
            observation_spec[self.out_key] = charged
        if self.raw_key is not None:
            observation_spec[self.raw_key] = charged.clone()
        return output_spec


def reward_like(parent: Transform) -> Unbounded:
    """A spec with the shape and type of the environment's reward."""
    spec = parent.full_reward_spec[parent.reward_key]
    return Unbounded(shape=spec.shape, dtype=spec.dtype, device=spec.device)


def sampled_log_prob(tensordict: TensorDictBase, keys: Sequence[Key], like: Tensor) -> Tensor:
    """log pi(a|s) as the policy wrote it; NaN, with a warning, for an action it did not sample.

    Args:
        tensordict: the transition.
        keys: where the policy writes its log-probs, one per head.
        like: a tensor of the log-prob's shape.

    Raises:
        RuntimeError: in a worker of a ParallelEnv, which was not sent the log-prob.
    """
    if has_all(tensordict, keys):
        return sum_heads(tensordict, keys, tensordict.ndim)
    return unsampled(tensordict, keys[0], like)


def unsampled(tensordict: TensorDictBase, key: Key, like: Tensor) -> Tensor:
    """NaN in the shape of ``like``, with a warning, for an action that no policy sampled.

    TorchRL checks specs with rollouts of random actions: an error would break the check, and a KL
    of zero would be false.

    Raises:
        RuntimeError: in a worker of a ParallelEnv, which was not sent ``key``.
    """
    if _in_parallel_env(tensordict):
        raise RuntimeError(
            f"no {key} in a worker of ParallelEnv, which sends its workers only the action: put "
            "klrl.kl.SendToWorkers(actor) before this transform, or this one around the ParallelEnv"
        )
    warnings.warn(
        f"no {key} in the data: a random action has no KL to the reference, "
        "and its charged reward is NaN; collect with the policy",
        stacklevel=4,
    )
    return torch.full_like(like, torch.nan)


def _in_parallel_env(tensordict: TensorDictBase) -> bool:
    """Whether a transition came through the shared buffers of a ParallelEnv.

    TorchRL gives a worker's environment no sign of it, but there all data, the action included,
    are in shared memory. GPU tensors always are, so only CPU tensors count.
    """
    if multiprocessing.parent_process() is None:
        return False
    leaves = tensordict.exclude("next").values(True, True)
    return all(
        leaf.device.type == "cpu" and leaf.is_shared()
        for leaf in leaves
        if isinstance(leaf, Tensor)
    )


def reward_of(next_tensordict: TensorDictBase, key: Key) -> Tensor:
    """The reward of a transition.

    Raises:
        KeyError: there is none; a reward left unchanged in silence would look charged.
    """
    reward = next_tensordict.get(key, None)
    if reward is None:
        raise KeyError(f"no reward at {('next', key)}: give its key in in_keys")
    return reward


def one_key(name: str, keys: Key | Sequence[Key]) -> Key:
    """A key, or a list of one key.

    Raises:
        ValueError: a list of none or several, or something that is no key.
    """
    listed: list[Any] = list(keys) if isinstance(keys, list) else [keys]
    if len(listed) != 1:
        raise ValueError(f"{name}={listed}: exactly one key is allowed")
    if not _is_key(listed[0]):
        raise ValueError(f"{name}={listed}: a key is a string or a tuple of strings")
    return as_key(listed[0])


def _is_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return bool(key) and all(map(_is_key, key))
    return isinstance(key, str)


def refuse_second_charge(next_tensordict: TensorDictBase, raw_key: Key | None) -> None:
    """Refuse to charge a reward twice; a charged reward has its raw value beside it.

    Raises:
        RuntimeError: the raw reward exists already.
    """
    if raw_key is not None and raw_key in next_tensordict.keys(include_nested=True):
        raise RuntimeError(
            f"the KL was charged to this reward already: the batch holds {raw_key}; charge it once"
        )
