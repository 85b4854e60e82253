"""The KL transforms that TorchRL announced but never wrote; each can be used alone.

    ReferenceModelLogProbTransform   log pi_ref(a|s) of the sampled action
    KLDivergenceTransform            KL(pi || pi_ref), sampled or in closed form
    RewardAdjustmentTransform        reward - coef * KL
    KLConstrainedTransform           the three above in a row

Shapes: log-probs [...], KL and reward [..., 1], per agent or per team (:mod:`klrl.kl.shapes`).
Units: nats; coefficients are reward per nat.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution, ProbabilisticTensorDictSequential
from torch import Tensor
from torchrl.data import Composite

from klrl.envs.transforms.base import (
    NextTransform,
    OneTransform,
    ScoresAction,
    one_choice,
    one_key,
    reward_like,
    reward_of,
)
from klrl.envs.transforms.sampled import (
    ChargedReward,
    not_sampled,
    parameters_or_one,
    sampled_log_prob,
    unsampled,
)
from klrl.kl.estimators import ESTIMATORS, estimate_kl, exact_kl
from klrl.kl.policies import Key, as_key, log_prob_keys, require_reference, written_keys
from klrl.kl.reference import FrozenPolicy
from klrl.kl.shapes import like_reward


class ReferenceModelLogProbTransform(ScoresAction):
    """Writes log pi_ref(a|s) of the sampled action to ``("next", ref_log_prob_key)``.

    The action is never resampled or overwritten.

    Args:
        frozen_model: the reference; copied and frozen, so that training does not change it. A
            :class:`~klrl.kl.reference.FrozenPolicy` is not copied.
        ref_log_prob_key: where to write the log-prob, shape [...].
        reward_key: key of the reward whose batch shape the log-prob gets; None: the environment's,
            or ``reward`` without an environment. If the data have no reward, the log-prob keeps the
            shape in which the model computes it.

    Raises:
        TypeError: the model has no ``get_dist``.
        ValueError: the model is recurrent, or its log-prob does not fit the reward.
    """

    def __init__(
        self,
        frozen_model: ProbabilisticTensorDictSequential,
        *,
        ref_log_prob_key: Key = "ref_log_prob",
        reward_key: Key | None = None,
    ) -> None:
        self._reward_key = reward_key
        if not hasattr(frozen_model, "get_dist"):
            raise TypeError(f"frozen_model={type(frozen_model).__name__}: needs get_dist")
        require_reference("frozen_model", frozen_model)
        self.written = [as_key(ref_log_prob_key)]
        super().__init__(in_keys=list(frozen_model.in_keys), out_keys=self.written)
        self.frozen_model = FrozenPolicy.copy_of(frozen_model)
        self.log_prob_keys: list[Key] | None = None  # in the data; None: the model's keys

    @torch.no_grad()
    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.write_log_prob(
            self.frozen_model, tensordict, next_tensordict, self.log_prob_keys
        )


class KLDivergenceTransform(NextTransform):
    """Writes KL(pi || pi_ref) to ``("next", kl_key)``, [..., 1].

    k1, k2 and k3 compare the log-probs at ``log_prob_key`` and ``("next", ref_log_prob_key)``.
    ``exact`` compares distributions: pi has the parameters that the policy wrote into the
    transition; the reference computes pi_ref at the same observation.

    Args:
        reference: needed by ``exact``; with k1, k2 or k3 optional, to find actions that the policy
            did not sample. It is not copied, but run in evaluation mode.
        estimator: k1, k2, k3 or exact.
        log_prob_key: key of the policy's log pi(a|s); or a list, whose log-probs are summed.
        ref_log_prob_key: key of log pi_ref(a|s).
        kl_key: where to write the KL.
        reward_key: key of the reward whose shape the KL gets; None: the environment's, or
            ``reward`` without an environment.

    Raises:
        ValueError: an unknown estimator; ``exact`` without a reference; a
            recurrent reference; a KL that does not fit the reward.
        KeyError: the data lack ``ref_log_prob_key``, the reward, or for ``exact`` the parameters.
        RuntimeError: the policy's outputs did not reach a worker of a ParallelEnv.
    """

    def __init__(
        self,
        reference: ProbabilisticTensorDictSequential | None = None,
        *,
        estimator: str = "k1",
        log_prob_key: Key | list[Key] = "action_log_prob",
        ref_log_prob_key: Key = "ref_log_prob",
        kl_key: Key = "kl_penalty",
        reward_key: Key | None = None,
    ) -> None:
        self._reward_key = reward_key
        one_choice("estimator", estimator, (*ESTIMATORS, "exact"))
        if estimator == "exact" and reference is None:
            raise ValueError("estimator=exact: needs the reference's distribution; give reference")
        require_reference("reference", reference)
        keys = log_prob_key if isinstance(log_prob_key, list) else [log_prob_key]
        self.log_prob_keys = [as_key(key) for key in keys]
        self.ref_key, self.kl_key = as_key(ref_log_prob_key), as_key(kl_key)
        super().__init__(in_keys=[*self.log_prob_keys, self.ref_key], out_keys=[self.kl_key])
        self.written = [self.kl_key]
        self.estimator, self.reference = estimator, FrozenPolicy.shared(reference)

    @torch.no_grad()
    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        reward = reward_of(next_tensordict, self.reward_key)
        if self.reference is not None and self.estimator == "exact":
            kl = self._exact(self.reference, tensordict, reward)
        else:
            ref_log_prob = next_tensordict.get(self.ref_key, None)
            if ref_log_prob is None:
                raise KeyError(
                    f"no log-probs at {('next', self.ref_key)}: "
                    "put ReferenceModelLogProbTransform before"
                )
            name = f"the log-prob at {self.ref_key}"
            ref_log_prob = like_reward(name, ref_log_prob, reward, tensordict.ndim)
            log_prob = sampled_log_prob(tensordict, self.log_prob_keys, reward, self.reference)
            kl = estimate_kl(log_prob, ref_log_prob, self.estimator)
        return next_tensordict.set(self.kl_key, kl.view_as(reward))

    def _exact(
        self,
        reference: ProbabilisticTensorDictSequential,
        tensordict: TensorDictBase,
        reward: Tensor,
    ) -> Tensor:
        """Compute the exact KL in the reward's batch shape; NaN at unsampled actions."""
        keys = [as_key(key) for key in reference.dist_params_keys]
        if any(tensordict.get(key, None) is None for key in keys):
            if written_keys(tensordict, self.log_prob_keys):
                raise KeyError(
                    f"no {keys} in the data: estimator=exact compares distributions; keep the "
                    "parameters that the policy writes"
                )
            nothing = torch.ones_like(reward, dtype=torch.bool)
            return unsampled(tensordict, self.log_prob_keys[0], nothing, reward)
        where = not_sampled(tensordict, self.log_prob_keys, reward, reference)
        device = next(reference.parameters()).device
        ref_dist = reference.get_dist(tensordict.copy().to(device))
        dist = reference.build_dist_from_params(
            parameters_or_one(tensordict, keys, where).to(device)
        )
        name = "the exact KL"
        if isinstance(dist, CompositeDistribution):
            name += " of a composite (summed over agents, unlike k1)"
        kl = like_reward(name, exact_kl(dist, ref_dist), reward, tensordict.ndim)
        kl = kl.to(reward.device)
        return unsampled(tensordict, self.log_prob_keys[0], where, kl) if where.any() else kl

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the KL, with the reward's shape."""
        observation_spec[self.kl_key] = reward_like(self.parent, self.reward_key)
        return observation_spec


class RewardAdjustmentTransform(ChargedReward):
    """reward <- reward - coef * KL, with KL from ``("next", kl_key)``.

    Args:
        coef: reward per nat; :attr:`coef` may be changed later.
        in_keys: the key of the reward to read, or a list of one key. Default ``reward``.
        out_keys: the key of the reward to write; default ``in_keys``.
        kl_key: key of the KL: in the reward's shape; or per agent, if a team shares the reward.
        raw_reward_key: where to keep the uncharged reward; None: nowhere.
        coeff: alias of ``coef``.

    Raises:
        ValueError: several in- or out-keys; a coefficient that is no number >= 0; a KL that
            does not fit the reward.
        KeyError: the data lack the KL or the reward.
        RuntimeError: the batch was charged already (its raw reward exists).
    """

    def __init__(
        self,
        coef: float | Tensor = 1.0,
        in_keys: Key | Sequence[Key] | None = None,
        out_keys: Key | Sequence[Key] | None = None,
        *,
        kl_key: Key = "kl_penalty",
        raw_reward_key: Key | None = None,
        coeff: float | Tensor | None = None,
    ) -> None:
        self.kl_key = as_key(kl_key)
        super().__init__(coef, in_keys, out_keys, raw_reward_key, [self.kl_key], coeff)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        reward = reward_of(next_tensordict, self.reward_key)
        kl = next_tensordict.get(self.kl_key, None)
        if kl is None:
            raise KeyError(f"no KL at {('next', self.kl_key)}: put KLDivergenceTransform before")
        kl = like_reward(f"the KL at {self.kl_key}", kl, reward, tensordict.ndim)
        return self.charge(next_tensordict, reward, kl.view_as(reward))


class KLConstrainedTransform(OneTransform):
    """reward <- reward - coef * KL(pi || pi_ref): the three transforms above in a row.

    Args:
        frozen_model: the reference; copied and frozen.
        coef: reward per nat; :attr:`coef` may be changed later.
        estimator: k1, k2, k3 or exact; charged to the reward, only k1 gives the KL's gradient.
        in_keys: the key of the reward to read; default ``reward``.
        out_keys: the key of the reward to write; default ``in_keys``.
        log_prob_key: key of the policy's log pi(a|s); default that of ``frozen_model``.
        ref_log_prob_key: where to write log pi_ref(a|s).
        kl_key: where to write the KL, without coef.
        raw_reward_key: where to keep the uncharged reward; None: nowhere.
        coeff: alias of ``coef``.

    Raises:
        ValueError, TypeError, KeyError, RuntimeError: as the three transforms raise them.
    """

    def __init__(
        self,
        frozen_model: ProbabilisticTensorDictSequential,
        coef: float | Tensor = 1.0,
        *,
        estimator: str = "k1",
        in_keys: Key | Sequence[Key] | None = None,
        out_keys: Key | Sequence[Key] | None = None,
        log_prob_key: Key | list[Key] | None = None,
        ref_log_prob_key: Key = "ref_log_prob",
        kl_key: Key = "kl_penalty",
        raw_reward_key: Key | None = None,
        coeff: float | Tensor | None = None,
    ) -> None:
        reward_key = one_key("in_keys", "reward" if in_keys is None else in_keys)
        reference = ReferenceModelLogProbTransform(
            frozen_model, ref_log_prob_key=ref_log_prob_key, reward_key=reward_key
        )
        divergence = KLDivergenceTransform(
            reference.frozen_model,
            estimator=estimator,
            log_prob_key=log_prob_key or log_prob_keys(frozen_model),
            ref_log_prob_key=ref_log_prob_key,
            kl_key=kl_key,
            reward_key=reward_key,
        )
        reference.log_prob_keys = divergence.log_prob_keys
        adjustment = RewardAdjustmentTransform(
            coef,
            in_keys,
            out_keys,
            kl_key=kl_key,
            raw_reward_key=raw_reward_key,
            coeff=coeff,
        )
        super().__init__(reference, divergence, adjustment)
