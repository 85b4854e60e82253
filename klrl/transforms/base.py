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

from klrl.kl.policies import Key, as_key, has_all, sum_heads


class NextTransform(Transform):
    """A transform that reads a transition and writes below its ``next``.

    Subclasses implement ``_step(tensordict, next_tensordict)``. TorchRL calls it once per
    environment step; :meth:`forward` calls it on a whole batch, so that both give the same numbers.
    """

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch of transitions, in place.

        Raises:
            KeyError: the batch has no "next".
        """
        next_tensordict = tensordict.get("next", None)
        if next_tensordict is None:
            raise KeyError(f"{type(self).__name__} reads transitions, and this batch has no 'next'")
        return tensordict.set("next", self._step(tensordict, next_tensordict))


def zeros_at_reset(
    tensordict_reset: TensorDictBase, spec: Composite, keys: list[Key]
) -> TensorDictBase:
    """A reset has no action and so no KL: write the zeros that the observation spec promises."""
    for key in keys:
        tensordict_reset.set(key, spec[key].zero())
    return tensordict_reset


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
