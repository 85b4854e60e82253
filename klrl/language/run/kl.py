"""Computes pi_ref's log-probs and KL(policy||reference) of a language rollout; charges the KL."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.config import (
    KLConfig,
    LanguageConfig,
    LegacyKLConfig,
    RetrieveKLConfig,
)
from klrl.kl.charge import (
    KL_KEY,
    ReferenceKL,
    chosen_divergence,
    chosen_estimator,
    on_last,
    sampled_kl,
)
from klrl.kl.divergences import REVERSE, Divergence, Which
from klrl.kl.measure import mean_charged, mean_kl
from klrl.kl.reference import NO_ADAPTERS, OTHER_POLICY, FrozenReference, ReferenceRule
from klrl.language.data.batch import (
    LOG_PROBS,
    REF_LOG_PROBS,
    REWARD,
    SAMPLER_LOG_PROBS,
    SCORE,
    pad_to_full,
    response_mask,
    response_part,
)
from klrl.language.model.causal_lm import head
from klrl.language.model.pretrained import adapter_off
from klrl.language.model.vocabulary import Against, NextTokens, token_measures
from klrl.language.run.scoring import ScoringLayout


class Reference(FrozenReference):
    """The reference: a separate model, or the policy's model with its adapters switched off."""

    def next_tokens(self, states: Tensor, temperature: float) -> NextTokens:
        """Return the next-token distributions of stored hidden states [B, R, D]."""
        own = head(self.module) if self.own else _OffHead(self.module)
        return NextTokens(states, own, temperature)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; switch its adapters off if it is the policy's model."""
        with nullcontext() if self.own else adapter_off(self.module):
            return super().forward(*args, **kwargs)

    def states(self, batch: TensorDictBase, layout: ScoringLayout, prompts: int) -> Tensor:
        """Compute the hidden states [B, R, D] of a rollout, ``prompts`` prompts at a time."""
        with nullcontext() if self.own else adapter_off(self.module):
            return layout.rollout_states(self.module, batch, prompts)


@dataclass(frozen=True)
class _OffHead:
    """The head of the policy's model, with its adapters (if any) switched off."""

    model: nn.Module

    @property
    def weight(self) -> Tensor:
        """The head's weight [V, D]; :class:`NextTokens` reads V."""
        return head(self.model).weight  # type: ignore[attr-defined]

    def __call__(self, states: Tensor) -> Tensor:
        with adapter_off(self.model):
            return head(self.model)(states)


def checkpointed(rule: ReferenceRule, config: LanguageConfig) -> bool:
    """Return whether checkpoints must contain pi_ref, since it changes or is not the base model."""
    if rule.source == NO_ADAPTERS:
        return False
    return rule.moves or rule.source == OTHER_POLICY or config.actor.init is not None


#: Keys of exact divergences at each token [B, R]: the reverse KL, KL(policy||reference); the
#: forward KL; the divergence that is charged, if it is not the reverse KL.
EXACT, FORWARD, DIVERGENCE = ("kl", "exact"), ("kl", "forward"), ("kl", "divergence")
#: Key of the estimate that is charged, before its coefficient [B, R, 1].
CHARGED = ("next", KL_KEY)


def no_kl(config: KLConfig) -> None:
    """``kl=none``: measure and charge nothing."""


def legacy(config: LegacyKLConfig) -> ReferenceKL:
    """``kl=legacy``: k1 in the reward."""
    return ReferenceKL(config.first_coef, "k1", "reward")


def retrieve(config: RetrieveKLConfig) -> ReferenceKL:
    """``kl=retrieve``: the configured estimator, divergence and placement."""
    divergence = Divergence(chosen_divergence(config))
    estimator = chosen_estimator(config)
    return ReferenceKL(config.first_coef, estimator, config.placement, divergence=divergence)


@torch.no_grad()
def annotate(
    batch: TensorDictBase,
    policy: NextTokens,
    reference: NextTokens,
    divergence: Divergence = REVERSE,
) -> None:
    """Write log pi_ref of the response tokens, and the exact KLs at these tokens.

    The batch [B] gets ("next", "ref_log_probs", "full") [B, P+R], and at :data:`EXACT`,
    :data:`FORWARD` and, if the charged divergence is not the reverse KL, :data:`DIVERGENCE` [B, R].
    ``policy`` has the distributions that the batch was sampled from.
    """
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    names: dict[tuple[str, str], Which] = {EXACT: "reverse", FORWARD: "forward"}
    if not divergence.is_reverse:
        names[DIVERGENCE] = divergence.name
    against = Against(reference, [*dict.fromkeys(names.values())])
    _, [compared] = token_measures(policy, tokens, mask, [against])
    if REF_LOG_PROBS not in batch.keys(include_nested=True):  # else a transform has written them
        batch[REF_LOG_PROBS] = pad_to_full(batch, compared.log_prob)
    for key, name in names.items():
        batch[key] = compared.divergence[name]


def charge(batch: TensorDictBase, kl: ReferenceKL | None) -> None:
    """Write the reward of every token [B, R, 1]: the score at the last token, minus any coef * KL.

    The batch [B] has scores and, with a ``kl``, the entries of :func:`annotate`. If the environment
    already charged the KL, the reward is left unchanged.
    """
    if kl is not None and kl.online:
        return
    mask, score = response_mask(batch), batch[SCORE].flatten()
    if kl is None:
        batch[REWARD] = on_last(score, mask).unsqueeze(-1)
        return
    log_prob, ref_log_prob = response_part(batch, LOG_PROBS), response_part(batch, REF_LOG_PROBS)
    exact = batch[EXACT if kl.divergence.is_reverse else DIVERGENCE]
    applied = sampled_kl(kl.estimator, log_prob, ref_log_prob, exact, mask)
    batch[CHARGED] = applied.unsqueeze(-1)
    reward = on_last(score.to(applied.dtype), mask)
    batch[REWARD] = kl.shaped(reward, applied).unsqueeze(-1)


@torch.no_grad()
def measure(batch: TensorDictBase) -> dict[str, Tensor]:
    """Apply :func:`klrl.kl.measure.mean_kl` to a rollout that :func:`annotate` has completed.

    Returns:
        Means over valid tokens, nats; under names with ``_seq``, sums over a response's tokens,
        averaged over responses. If the charged divergence is not the reverse KL, also the means of
        :func:`klrl.kl.measure.mean_charged`.

    Raises:
        NonFiniteError: a mean is NaN or infinite.
    """
    mask, log_prob = response_mask(batch), response_part(batch, LOG_PROBS)
    log_ratio, weight = log_prob - response_part(batch, REF_LOG_PROBS), None
    if SAMPLER_LOG_PROBS in batch.keys(include_nested=True):  # the tokens are mu's
        weight = (log_prob - response_part(batch, SAMPLER_LOG_PROBS)).exp()
    means = mean_kl(batch[EXACT], batch[FORWARD], log_ratio, mask, weight)
    if DIVERGENCE in batch.keys(include_nested=True):
        means |= mean_charged(batch[DIVERGENCE], mask)
    return means
