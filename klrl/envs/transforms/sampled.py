"""Reads the policy's log pi(a|s) from the data; NaN for actions that the policy did not sample."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModuleBase
from torch import Tensor
from torchrl.data import Composite

from klrl.envs.transforms.base import (
    NextTransform,
    one_key,
    refuse_repeated_charge,
    refuse_second_charge,
    reward_like,
)
from klrl.kl.charge import shaped
from klrl.kl.coefficient import KeepsCoefficient
from klrl.kl.estimators import sum_beyond
from klrl.kl.policies import Key, as_key, has_all, written_keys
from klrl.kl.saturated import expanded, log_probs
from klrl.kl.shapes import add_heads, like_reward, reward_shape


def sampled_log_prob(
    tensordict: TensorDictBase,
    keys: Sequence[Key],
    reward: Tensor,
    model: TensorDictModuleBase | None = None,
) -> Tensor:
    """Return the policy's log pi(a|s), in the reward's batch shape; NaN at unsampled actions.

    An action counts as unsampled if its log-prob is missing or NaN, or if log-prob and distribution
    parameters are all zero: a TorchRL collector writes such zeros during ``init_random_frames``.
    ``model``, a policy with the same kind of distribution, interprets these parameters; without a
    model, they are not read.
    """
    log_prob = _written(tensordict, keys, reward)
    if log_prob is None:
        empty = like_reward("reward", reward, reward, tensordict.ndim)
        everywhere = torch.ones_like(empty, dtype=torch.bool)
        return unsampled(tensordict, keys[0], everywhere, empty)
    sampler = None if model is None else _sampler(model)
    if sampler is not None and has_all(tensordict, _parameter_keys(sampler)):
        filled_in = _filled_in(tensordict, sampler, log_prob)
        if filled_in.any():
            return unsampled(tensordict, keys[0], filled_in, log_prob)
    return log_prob


def not_sampled(
    tensordict: TensorDictBase, keys: Sequence[Key], reward: Tensor, model: TensorDictModuleBase
) -> Tensor:
    """Return a mask [*B] or [*B, N] of unsampled actions; all False if the data lack log-probs."""
    log_prob, sampler = _written(tensordict, keys, reward), _sampler(model)
    if log_prob is None or sampler is None:
        shape = reward_shape(reward.shape, tensordict.ndim)
        return torch.zeros(shape, dtype=torch.bool, device=reward.device)
    return log_prob.isnan() | _filled_in(tensordict, sampler, log_prob)


def unsampled(tensordict: TensorDictBase, key: Key, where: Tensor, values: Tensor) -> Tensor:
    """Set ``values`` to NaN at the unsampled actions ``where``, with a warning.

    TorchRL checks specs with rollouts of random actions: an error would break the check, and a KL
    of zero would be false.
    """
    if not written_keys(tensordict, [key]) and _in_parallel_env(tensordict):
        raise RuntimeError(
            f"no {key} in a worker of ParallelEnv, which sends its workers only the action: put "
            "this transform around the ParallelEnv, or use RetrieveKL"
        )
    warnings.warn(
        f"no {key} for some actions: a random action has no KL to the reference, and its charged "
        "reward is NaN; collect with the policy",
        stacklevel=4,
    )
    return values.masked_fill(where, torch.nan)


def _written(tensordict: TensorDictBase, keys: Sequence[Key], reward: Tensor) -> Tensor | None:
    """Return the log-prob in the data, in the reward's batch shape; None if it is missing."""
    heads = [tensordict.get(key) for key in written_keys(tensordict, keys)]
    if not heads:
        return None
    return like_reward(f"the log-prob at {keys[0]}", add_heads(heads), reward, tensordict.ndim)


def _sampler(model: TensorDictModuleBase) -> ProbabilisticTensorDictModule | None:
    """Return the module of a policy that turns parameters into a distribution, or None."""
    for module in (model, getattr(model, "module", None)):  # a wrapper may contain the policy
        if module is not None:
            parts = [m for m in module.modules() if isinstance(m, ProbabilisticTensorDictModule)]
            if parts:
                return parts[-1]
    return None


def _parameter_keys(sampler: ProbabilisticTensorDictModule) -> list[Key]:
    return [as_key(key) for key in sampler.dist_params_keys]


def parameters_or_one(
    tensordict: TensorDictBase, keys: Sequence[Key], where: Tensor
) -> TensorDictBase:
    """Return a shallow copy with parameters 1, which are valid, at the steps ``where``."""
    if not where.any():
        return tensordict.copy()
    steps = sum_beyond(where, tensordict.ndim) > 0

    def one(value: Tensor) -> Tensor:
        return torch.where(expanded(steps, value), torch.ones_like(value), value)

    filled = tensordict.copy()
    for key in keys:
        value = tensordict.get(key)
        filled.set(key, one(value) if isinstance(value, Tensor) else value.apply(one))
    return filled


def _filled_in(
    tensordict: TensorDictBase, sampler: ProbabilisticTensorDictModule, log_prob: Tensor
) -> Tensor:
    """Mark the steps whose log-prob and parameters are zeros that a collector filled in."""
    zero = log_prob == 0
    if not zero.any():
        return zero
    for key in _parameter_keys(sampler):
        value = tensordict.get(key)
        leaves = [value] if isinstance(value, Tensor) else list(value.values(True, True))
        for leaf in leaves:
            zero = zero & ~expanded(sum_beyond(leaf != 0, tensordict.ndim) > 0, zero)
    if not zero.any():
        return zero
    # A policy with a single action has log-prob 0 for all parameters: do not mark its steps.
    data = parameters_or_one(tensordict, _parameter_keys(sampler), zero)
    with torch.no_grad():
        heads = log_probs(sampler.get_dist(data), data, sampler.dist_sample_keys[0])
        return zero & (sum_beyond(add_heads(list(heads.values())), log_prob.ndim) != 0)


def _in_parallel_env(tensordict: TensorDictBase) -> bool:
    """Whether a transition came through the shared buffers of a ParallelEnv."""
    # TorchRL does not mark a worker's environment, but all data of a worker are in shared memory,
    # including the action. GPU tensors prove nothing, since is_shared() is always true for them.
    if multiprocessing.parent_process() is None:
        return False
    leaves = tensordict.exclude("next").values(True, True)
    return all(
        leaf.device.type == "cpu" and leaf.is_shared()
        for leaf in leaves
        if isinstance(leaf, Tensor)
    )


class ChargedReward(KeepsCoefficient, NextTransform):
    """Base of the control transforms that charge: reward <- reward - coef * KL.

    Arguments are as in :class:`~klrl.kl.KLRewardTransform`; ``reads``: further keys that a subclass
    reads.
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
        self._reward_key = one_key("in_keys", "reward" if in_keys is None else in_keys)
        self.out_key = one_key("out_keys", self._reward_key if out_keys is None else out_keys)
        self.raw_key = raw_reward_key and as_key(raw_reward_key)
        super().__init__(in_keys=[self._reward_key, *reads], out_keys=[self.out_key])
        self.written = [key for key in (self.out_key, self.raw_key) if key is not None]
        self.keep_coefficient(coef, coeff)

    coef: Tensor

    def charge(self, next_tensordict: TensorDictBase, reward: Tensor, kl: Tensor) -> TensorDictBase:
        """Write the charged reward, and the raw reward if it has a key; all are [..., 1]."""
        refuse_second_charge(next_tensordict, self.raw_key)
        if self.raw_key is not None:
            next_tensordict.set(self.raw_key, reward)
        return next_tensordict.set(self.out_key, shaped(reward, kl, self.coef))

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Add the charged reward: it replaces the reward, or becomes an observation."""
        refuse_repeated_charge(self)
        parent, observation_spec = self.parent, output_spec["full_observation_spec"]
        charged = reward_like(parent, self.reward_key)
        if self.out_key in parent.reward_keys:
            output_spec["full_reward_spec"][self.out_key] = charged
        else:
            observation_spec[self.out_key] = charged
        if self.raw_key is not None:
            observation_spec[self.raw_key] = charged.clone()
        return output_spec
