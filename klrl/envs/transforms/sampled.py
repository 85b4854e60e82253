"""Reads the policy's log pi(a|s) from the data; handles actions that the policy did not sample."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution, TransformedDistribution
from torchrl.data import Composite
from torchrl.modules import TanhNormal

from klrl.envs.transforms.base import (
    NextTransform,
    one_choice,
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

#: Ways to treat a step whose action the policy did not sample; the default is ``nan``.
ON_UNSAMPLED = ("nan", "raise", "skip", "zero")
#: A log-prob in the data belongs to a different action if it differs from the recomputed log-prob
#: by more than TOLERANCE * (1 + |log-prob|).
TOLERANCE = 1e-2
#: In this share of the action's range at each bound, the inverse of tanh is inaccurate.
EDGE = 1e-4


def sampled_log_prob(
    tensordict: TensorDictBase,
    keys: Sequence[Key],
    reward: Tensor,
    model: TensorDictModuleBase | None = None,
    on_unsampled: str = "nan",
) -> Tensor:
    """Return the policy's log pi(a|s), in the reward's batch shape; NaN at unsampled actions.

    An action counts as unsampled if its log-prob is missing or NaN, or if log-prob and distribution
    parameters are all zero: a TorchRL collector writes such zeros during ``init_random_frames``. If
    exploration noise changed the action after the policy sampled it, the log-prob is recomputed
    from the parameters in the data, with a warning. ``model``, a policy with the same kind of
    distribution, interprets these parameters; without a model, they are not read.
    """
    log_prob = _written(tensordict, keys, reward)
    if log_prob is None:
        empty = like_reward("reward", reward, reward, tensordict.ndim)
        everywhere = torch.ones_like(empty, dtype=torch.bool)
        return unsampled(tensordict, keys[0], everywhere, empty, on_unsampled)
    missing = log_prob.isnan()
    sampler = None if model is None else _sampler(model)
    if sampler is not None and has_all(tensordict, _parameter_keys(sampler)):
        filled_in = _filled_in(tensordict, sampler, log_prob)
        log_prob = _of_the_action(tensordict, sampler, keys[0], log_prob, filled_in)
        missing = missing | filled_in
    if missing.any() and (on_unsampled == "raise" or not log_prob[missing].isnan().all()):
        return unsampled(tensordict, keys[0], missing, log_prob, on_unsampled)
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


def kl_of_sampled(kl: Tensor, log_prob: Tensor, on_unsampled: str) -> Tensor:
    """With ``on_unsampled=zero``, set the KL to 0 where the log-prob is NaN; else return it."""
    return kl.masked_fill(log_prob.isnan(), 0.0) if on_unsampled == "zero" else kl


def unsampled(
    tensordict: TensorDictBase, key: Key, where: Tensor, values: Tensor, on_unsampled: str
) -> Tensor:
    """Set ``values`` to NaN at the unsampled actions ``where``, with a warning; or raise an error.

    NaN is the default because TorchRL checks specs with rollouts of random actions: an error would
    break the check, and a KL of zero would be false.
    """
    if not written_keys(tensordict, [key]) and _in_parallel_env(tensordict):
        raise RuntimeError(
            f"no {key} in a worker of ParallelEnv, which sends its workers only the action: put "
            "this transform around the ParallelEnv, or use RetrieveKL"
        )
    reason = f"no {key} for some actions: a random action has no KL to the reference"
    if on_unsampled == "raise":
        raise RuntimeError(f"{reason}; collect with the policy, or set on_unsampled=skip or zero")
    if on_unsampled == "nan":
        remedy = "its charged reward is NaN; collect with the policy, or set on_unsampled"
    else:
        remedy = f"its reward is not charged (on_unsampled={on_unsampled})"
    warnings.warn(f"{reason}, and {remedy}", stacklevel=4)
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
        return zero & (_log_prob(data, sampler, sampler.get_dist(data), log_prob.ndim) != 0)


def _log_prob(
    data: TensorDictBase, sampler: ProbabilisticTensorDictModule, dist: Distribution, dims: int
) -> Tensor:
    """Compute the action's log-prob from the parameters in the data, [*B] or [*B, N]."""
    heads = log_probs(dist, data, sampler.dist_sample_keys[0])
    return sum_beyond(add_heads(list(heads.values())), dims)


def _of_the_action(
    tensordict: TensorDictBase,
    sampler: ProbabilisticTensorDictModule,
    key: Key,
    log_prob: Tensor,
    filled_in: Tensor,
) -> Tensor:
    """Recompute the log-prob from the parameters where it is not that of the action."""
    data = parameters_or_one(tensordict, _parameter_keys(sampler), filled_in)
    with torch.no_grad():
        dist = sampler.get_dist(data)
        edge = _at_the_edge(dist, data.get(sampler.dist_sample_keys[0]), log_prob)
        if edge is None:
            return log_prob
        again = _log_prob(data, sampler, dist, log_prob.ndim)
    readable = ~edge & ~filled_in
    other = (again - log_prob).abs() > TOLERANCE * (1 + log_prob.abs())
    if not (other & readable).any():
        return log_prob
    warnings.warn(
        f"the log-prob at {key} is not that of the action, which exploration noise or a transform "
        "of the environment changed: log pi of the action is recomputed from the policy's "
        "parameters in the data",
        stacklevel=4,
    )
    return torch.where(readable, again.to(log_prob), log_prob)


def _at_the_edge(dist: Distribution, action: Tensor, log_prob: Tensor) -> Tensor | None:
    """Mark the actions whose log-prob cannot be recomputed; None if this holds for all actions."""
    if isinstance(dist, TanhNormal):
        share = (action - dist.low) / (dist.high - dist.low)
        edge = (share < EDGE) | (share > 1 - EDGE)
        return sum_beyond(edge, log_prob.ndim) > 0
    return None if isinstance(dist, TransformedDistribution) else log_prob.isnan()


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
        *,
        on_unsampled: str = "nan",
    ) -> None:
        self.on_unsampled = one_choice("on_unsampled", on_unsampled, ON_UNSAMPLED)
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
        charged = shaped(reward, kl, self.coef)
        if self.on_unsampled == "skip":
            charged = torch.where(kl.isnan(), reward, charged)
        return next_tensordict.set(self.out_key, charged)

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
