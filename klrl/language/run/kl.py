"""Computes pi_ref's log-probs and KL(policy||reference) of a language rollout; charges the KL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
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
from klrl.language.model.vocabulary import (
    Against,
    NextTokens,
    States,
    response_log_probs,
    token_measures,
)
from klrl.language.run.scoring import ScoringLayout


class Reference(FrozenReference):
    """The reference: a separate model, or the policy's model with its adapters switched off."""

    def next_tokens(self, states: States, temperature: float) -> NextTokens:
        """Return the next-token distributions of hidden states."""
        own = head(self.module) if self.own else _OffHead(self.module)
        return NextTokens(states, own, temperature)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; switch its adapters off if it is the policy's model."""
        with nullcontext() if self.own else adapter_off(self.module):
            return super().forward(*args, **kwargs)

    def states(
        self, batch: TensorDictBase, layout: ScoringLayout, prompts: int
    ) -> Iterator[Tensor]:
        """Yield the hidden states [n, R, D] of a rollout, ``prompts`` prompts at a time."""
        during = nullcontext if self.own else partial(adapter_off, self.module)
        return layout.rollout_states(self.module, batch, prompts, during)


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
#: Key of the part of it that a token's own advantage must not contain, if mu sampled [B, R].
EXCESS = ("kl", "excess")


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
    policy: NextTokens | None,
    reference: NextTokens,
    divergence: Divergence = REVERSE,
) -> None:
    """Write log pi_ref of the response tokens, and the exact KLs at these tokens.

    The batch [B] gets ("next", "ref_log_probs", "full") [B, P+R], and at :data:`EXACT`,
    :data:`FORWARD` and, if the charged divergence is not the reverse KL, :data:`DIVERGENCE` [B, R].
    ``policy`` has pi_old's distributions; None: measure no KL.
    """
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    names: dict[tuple[str, str], Which] = {EXACT: "reverse", FORWARD: "forward"}
    if not divergence.is_reverse:
        names[DIVERGENCE] = divergence.name
    if policy is None:
        log_prob = response_log_probs(reference, tokens, mask)
    else:
        against = Against(reference, [*dict.fromkeys(names.values())])
        _, [(log_prob, measured)] = token_measures(policy, tokens, mask, [against])
        for key, name in names.items():
            batch[key] = measured[name]
    if batch.get(REF_LOG_PROBS, None) is None:  # else a transform has written them
        batch[REF_LOG_PROBS] = pad_to_full(batch, log_prob)


def charge(batch: TensorDictBase, kl: ReferenceKL | None, *, corrected: bool = False) -> None:
    """Write the reward of every token [B, R, 1]: the score at the last token, minus any coef * KL.

    The batch [B] has scores and, with a ``kl``, the entries of :func:`annotate`. If the environment
    already charged the KL, the reward is left unchanged.

    An estimate at mu's tokens has the weight w = pi_old / mu: E_mu[w k1] is the KL of pi_old in the
    token's state, which earlier tokens are charged. A loss that weights the token by mu
    (``corrected``) already gives its own k1 this weight.
    """
    if kl is not None and kl.online:
        return
    mask, score = response_mask(batch), batch[SCORE].flatten()
    if kl is None:
        batch[REWARD] = on_last(score, mask).unsqueeze(-1)
        return
    log_prob, ref_log_prob = response_part(batch, LOG_PROBS), response_part(batch, REF_LOG_PROBS)
    exact = batch.get(EXACT if kl.divergence.is_reverse else DIVERGENCE, None)
    applied = sampled_kl(kl.estimator, log_prob, ref_log_prob, exact, mask)
    if kl.estimator != "exact":
        own, applied = applied, of_old(applied, batch)
        if corrected and kl.placement == "reward":
            batch[EXCESS] = applied - own
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
    log_ratio, weight = log_prob - response_part(batch, REF_LOG_PROBS), _weight(batch)
    exact, forward = (batch.get(key, None) for key in (EXACT, FORWARD))
    means = mean_kl(exact, forward, log_ratio, mask, weight)
    if DIVERGENCE in batch.keys(include_nested=True):
        means |= mean_charged(batch[DIVERGENCE], mask)
    return means


def _weight(batch: TensorDictBase) -> Tensor | None:
    """Return pi_old / mu of the tokens [B, R]; None if pi_old sampled them."""
    if SAMPLER_LOG_PROBS not in batch.keys(include_nested=True):
        return None
    return (response_part(batch, LOG_PROBS) - response_part(batch, SAMPLER_LOG_PROBS)).exp()


def of_old(value: Tensor, batch: TensorDictBase) -> Tensor:
    """Weight values at the tokens of mu by pi_old / mu, for means over the tokens of pi_old."""
    weight = _weight(batch)
    return value if weight is None else weight * value
