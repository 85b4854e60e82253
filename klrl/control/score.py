"""What a control policy and its critic say of a minibatch, for the policy loss."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from klrl.config import KLPENConfig
from klrl.control.distributions import Family, Params
from klrl.losses.policy import PolicyLoss, Scored

Minibatch = Mapping[str, Tensor]


def score(
    loss: PolicyLoss, family: Family, params: Params, value: Tensor, batch: Minibatch
) -> Scored:
    """One number per frame [B], differentiable; a pure function.

    ``batch`` holds ``action_log_prob, advantage, value_target, state_value`` [B], the family's
    sample, the old policy's parameters, where the loss charges KL to the reference ``ref_log_prob``
    [B] and ``ref_<parameter>``, and what :func:`draw` gives; ``params`` and ``value`` [B] are those
    of the networks as they are now.
    """
    exact_ref = None
    log_prob = family.log_prob(params, batch[family.sample_key])
    kl_old = _kl_old(loss, family, params, batch)
    # Outside the graph where there is no bonus.
    scored = params if loss.entropy_bonus else _detached(params)
    entropy = family.entropy(scored, batch.get("entropy_noise"))
    if loss.reference_estimator == "exact":
        ref = {key: batch[f"ref_{key}"] for key in family.param_keys}
        noise = batch.get("divergence_noise")
        exact_ref = family.divergence(loss.divergence.name, params, ref, noise)
    return Scored(
        log_prob=log_prob,
        old_log_prob=batch["action_log_prob"],
        advantage=batch["advantage"],
        kl_old=kl_old,
        entropy=entropy,
        value=value,
        value_target=batch["value_target"],
        old_value=batch["state_value"],
        ref_log_prob=batch.get("ref_log_prob"),
        exact_ref=exact_ref,
    )


def draw(loss: PolicyLoss, family: Family, batch: Minibatch) -> dict[str, Tensor]:
    """The random numbers that :func:`score` is a function of.

    ``entropy_noise`` [B, samples, A] where the entropy has no closed form; ``old_sample``
    [B, samples_mc_kl, ...] where KL(old||new) is sampled; ``divergence_noise``
    [B, samples_mc_js, A] where the loss charges a js without a closed form.
    """
    drawn, old = {}, _old(family, batch)
    noise = family.entropy_noise(old, loss.config.samples_mc_entropy)
    if noise is not None:
        drawn["entropy_noise"] = noise
    if loss.kl_old == "sampled":
        assert isinstance(loss.config, KLPENConfig)
        drawn["old_sample"] = family.sample(old, loss.config.samples_mc_kl).movedim(0, 1)
    if loss.reference_estimator == "exact":
        divergence = loss.divergence
        noise = family.divergence_noise(divergence.name, old, divergence.samples)
        if noise is not None:
            drawn["divergence_noise"] = noise
    return drawn


def _kl_old(loss: PolicyLoss, family: Family, params: Params, batch: Minibatch) -> Tensor:
    """KL(old||new) [B] in closed form, or (to compare) the mean of log old - log new over draws."""
    old = _old(family, batch)
    if loss.kl_old == "sampled":
        sample = batch["old_sample"]
        wide_old, wide_new = ({k: v.unsqueeze(1) for k, v in p.items()} for p in (old, params))
        return (family.log_prob(wide_old, sample) - family.log_prob(wide_new, sample)).mean(1)
    return family.kl(old, _detached(params) if loss.kl_old == "measured" else params)


def _old(family: Family, batch: Minibatch) -> dict[str, Tensor]:
    return {key: batch[key] for key in family.param_keys}


def _detached(params: Params) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in params.items()}
