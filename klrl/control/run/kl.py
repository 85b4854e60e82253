"""Measure KL(policy||reference) of a control rollout by every estimator, and charge it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torch.distributions import Distribution
from torchrl.envs import Compose

from klrl.config import KLConfig, LegacyKLConfig, RetrieveKLConfig, factory
from klrl.control.policy.networks import Agent
from klrl.domains import CONTROL
from klrl.kl.charge import KL_KEY, RAW_REWARD_KEY, ReferenceKL, chosen_divergence, chosen_estimator
from klrl.kl.divergences import REVERSE, Divergence
from klrl.kl.measure import mean_charged, mean_kl
from klrl.kl.reference import THE_POLICY, FrozenPolicy, FrozenReference
from klrl.train.preflight import kl_at_start, run_checks

#: Key under "next" in a control batch: log pi_ref(a|s).
REF_LOG_PROB_KEY = "ref_log_prob"

#: Key of the charged divergence [N, T], unless it is the reverse KL; and key of its standard error,
#: if the divergence is estimated from draws.
DIVERGENCE, ERROR = ("ref", "divergence"), ("ref", "divergence_error")
#: Key of log mu of the sampled actions [N, T], if the job measures mu, the policy that sampled.
SAMPLER_LOG_PROB = ("sampler", "log_prob")


class LivePolicy(FrozenPolicy):
    """A run's policy in an environment's transform; ``env.to(device)`` does not move it."""

    def __init__(self, policy: ProbabilisticTensorDictSequential) -> None:
        super().__init__(policy, own=False)

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """pi(.|s); of a batch from :func:`annotate`, by the parameters that its rollout has."""
        annotated = tensordict.get(("ref", "log_prob"), None) is not None
        return (
            self.build_dist_from_params(tensordict) if annotated else super().get_dist(tensordict)
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return self


class AnnotatedReference(LivePolicy):
    """A reference that reads its outputs from the batch, where :func:`annotate` stored them.

    So a rollout needs one forward of the reference, for all transforms. For a batch without stored
    outputs, such as a single step of an environment, the reference is evaluated. The wrapped policy
    is not copied, since its weights may change during the run.
    """

    def log_prob(self, tensordict: TensorDictBase, **how: object) -> Tensor:
        """log pi_ref(a|s), [N, T]."""
        known = tensordict.get(("ref", "log_prob"), None)
        return super().log_prob(tensordict, **how) if known is None else known

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """pi_ref(.|s)."""
        known = tensordict.get("ref", None)
        if known is None:
            return super().get_dist(tensordict)
        return self.build_dist_from_params(known)


Reference: TypeAlias = ProbabilisticTensorDictSequential | AnnotatedReference


def make_reference_kl(
    config: KLConfig, actor: ProbabilisticTensorDictSequential, reference: Reference
) -> ReferenceKL | None:
    """Build the :class:`ReferenceKL` of the chosen ``kl``; None for ``kl=none``.

    Its transform shares both policies' weights, so it always reads the current weights.
    """
    return factory("kl", config, CONTROL.name)(config, actor, reference)


def no_kl(config: KLConfig, actor: ProbabilisticTensorDictSequential, reference: Reference) -> None:
    """``kl=none``: measure and charge no KL."""


def retrieve(
    config: RetrieveKLConfig, actor: ProbabilisticTensorDictSequential, reference: Reference
) -> ReferenceKL:
    """``kl=retrieve``: build the transforms that estimator, divergence and placement require."""
    divergence = Divergence(chosen_divergence(config), config.samples_mc_js)
    how = (chosen_estimator(config), config.placement)
    if config.placement == "loss":
        return ReferenceKL(config.first_coef, *how, divergence=divergence)
    if not divergence.is_reverse:  # annotate() writes the divergence
        penalty = _penalty(config)
        return ReferenceKL((penalty, "coef"), *how, penalty, divergence=divergence)
    from klrl.envs.llm.transforms.kl.retrieve import KLComputation, RetrieveLogProb

    retrieved = (
        RetrieveLogProb(LivePolicy(actor), log_probs_full_key="log_prob"),
        RetrieveLogProb(reference, log_probs_full_key=REF_LOG_PROB_KEY),
    )
    if config.estimator == "exact":
        from klrl.envs.transforms.constrained import KLDivergenceTransform

        penalty = _penalty(config)
        compare = KLDivergenceTransform(
            reference, estimator="exact", ref_log_prob_key=REF_LOG_PROB_KEY, kl_key=KL_KEY
        )
        transform, coef = Compose(*retrieved, compare, penalty), (penalty, "coef")
    else:
        computation = KLComputation(
            "log_prob",
            REF_LOG_PROB_KEY,
            kl_key=KL_KEY,
            coef=config.first_coef,
            estimator=how[0],
            raw_reward_key=RAW_REWARD_KEY,
        )
        transform, coef = Compose(*retrieved, computation), (computation, "coef")
    online = config.apply == "step"
    return ReferenceKL(coef, *how, transform, online=online)


def _penalty(config: RetrieveKLConfig) -> Any:
    """Make the transform that subtracts coef * KL from rewards; batches already have the KL."""
    from klrl.envs.transforms.constrained import RewardAdjustmentTransform

    return RewardAdjustmentTransform(
        config.first_coef, kl_key=KL_KEY, raw_reward_key=RAW_REWARD_KEY
    )


def legacy(
    config: LegacyKLConfig, actor: ProbabilisticTensorDictSequential, reference: Reference
) -> ReferenceKL:
    """``kl=legacy``: use one KLRewardTransform; arguments as in :func:`make_reference_kl`."""
    from klrl.envs.transforms.rlhf import KLRewardTransform

    transform = KLRewardTransform(
        reference,
        coef=config.first_coef,
        kl_key=KL_KEY,
        ref_log_prob_key=REF_LOG_PROB_KEY,
        raw_reward_key=RAW_REWARD_KEY,
    )
    coef = (transform, "coef")
    return ReferenceKL(coef, "k1", "reward", transform, online=config.apply == "step")


@torch.no_grad()
def annotate(
    batch: TensorDictBase,
    reference: ProbabilisticTensorDictSequential,
    agent: Agent,
    divergence: Divergence = REVERSE,
) -> None:
    """Write the outputs of one forward of the reference into a rollout [N, T].

    Writes ``("ref", key)`` for each parameter of the family, ``("ref", "log_prob")`` [N, T] of the
    actions, and the charged divergence if it is not the reverse KL.
    """
    family = agent.family
    outputs = reference[0].module(batch.get("observation"))
    ref = dict(zip(family.param_keys, outputs, strict=True))
    for key, value in ref.items():
        batch.set(("ref", key), value)
    batch.set(("ref", "log_prob"), family.log_prob(ref, batch.get(family.sample_key)))
    if not divergence.is_reverse:
        policy = {key: batch.get(key) for key in family.param_keys}
        # The noise is independent of the sampled action, so the policy gradient stays unbiased.
        noise = family.divergence_noise(divergence.name, policy, divergence.samples)
        batch.set(DIVERGENCE, family.divergence(divergence.name, policy, ref, noise))
        if noise is not None:
            batch.set(ERROR, family.divergence_error(policy, ref, noise, divergence.name))


def charge(batch: TensorDictBase, kl: ReferenceKL | None) -> None:
    """Subtract coef * KL from an annotated rollout's reward, unless the environment has done so."""
    if kl is None or kl.transform is None or kl.online:
        return
    if not kl.divergence.is_reverse:
        batch.set(("next", KL_KEY), batch.get(DIVERGENCE).unsqueeze(-1))
    kl.transform(batch)


@torch.no_grad()
def measure(batch: TensorDictBase, agent: Agent, weight: Tensor | None = None) -> dict[str, Tensor]:
    """Compute :func:`klrl.kl.measure.mean_kl` of an annotated rollout, in nats per frame.

    The batch contains the distribution parameters and log-probs of the policy before the update;
    if mu sampled it, ``weight`` [N, T] is pi_old / mu. :func:`klrl.kl.measure.mean_charged` is
    added if a divergence other than the reverse KL is charged.
    """
    family = agent.family
    policy = {key: batch.get(key) for key in family.param_keys}
    ref = {key: batch.get(("ref", key)) for key in family.param_keys}
    log_ratio = batch.get("action_log_prob") - batch.get(("ref", "log_prob"))
    closed = family.kl(policy, ref), family.kl(ref, policy)
    means = mean_kl(*closed, log_ratio, weight=weight)
    charged = batch.get(DIVERGENCE, None)
    if charged is not None:
        means |= mean_charged(charged, error=batch.get(ERROR, None))
    return means


# ------------------------------------------------------------------------- before the first rollout

#: How many synthetic observations the policy is compared on with its copy, and with another policy.
_OF_A_COPY, _OF_ANOTHER = 64, 6


@torch.no_grad()
def preflight_checks(agent: Agent, reference: FrozenReference | None) -> list[str]:
    """Measure the KL of a fresh run; check that it is 0 if the reference is the initial policy."""
    if reference is None:
        return []
    same = reference.rule.source == THE_POLICY
    like = next(agent.actor.parameters())
    seen = agent.synthetic_observations(_OF_A_COPY if same else _OF_ANOTHER)
    seen = seen.to(like) if agent.layout is None else seen.to(like.device)  # uint8 stays uint8
    remedy = "report this: a fresh policy must equal its reference" if same else None
    kl = agent.family.kl(_params(agent.actor, seen), _params(reference.module, seen))
    return run_checks([kl_at_start(kl, CONTROL, like.dtype, remedy)])


def _params(actor: ProbabilisticTensorDictSequential, seen: torch.Tensor) -> TensorDict:
    """Compute the parameters of pi(.|s) at observations [B, D]."""
    return actor.get_dist_params(TensorDict({"observation": seen}, seen.shape[:1]))
