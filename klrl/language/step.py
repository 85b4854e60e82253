"""PPO's update of a language policy: epochs of minibatches over one rollout, per token."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.config import LanguageConfig, factory
from klrl.kl.estimators import masked_mean
from klrl.language import token_loss as terms
from klrl.language.batch import (
    LOG_PROBS,
    REF_LOG_PROBS,
    on_response,
    response_mask,
    take_prompts,
)
from klrl.language.causal_lm import head
from klrl.language.exact import exact_token_kl, log_probs_and_exact_kl
from klrl.language.loss import TokenLoss
from klrl.language.optimizer import Optimizer
from klrl.language.policy import Policy
from klrl.language.reference import Reference
from klrl.language.rollout import REF_STATES, STATES
from klrl.language.scoring import Layout
from klrl.language.vocabulary import NextTokens, response_log_probs, token_entropy
from klrl.losses import BetaRule, line_search
from klrl.train.learner import Learned, require_finite

#: Prompts scored at a time where no gradient is needed, as many as a minibatch at least.
PROMPTS_WITHOUT_GRADIENT = 32
#: What a gradient step gives, and how each is called where it is not finite.
MEASURES = {
    "objective": "loss/objective",
    "critic": "loss/critic",
    "entropy": "loss/entropy",
    "kl_ref": "loss/kl_ref",
    "policy_entropy": "policy/entropy",
    "kl_old": "KL(old||new)",
    "grad_norm": "gradient",
}


@dataclass(frozen=True)
class Scored:
    """What the updated policy says of a minibatch, each [B, R] in nats.

    Attributes:
        policy: its distributions.
        log_prob: of the tokens.
        exact_ref: KL(pi_theta || pi_ref), where the loss charges the exact one.
    """

    policy: NextTokens
    log_prob: Tensor
    exact_ref: Tensor | None


class LanguageLearner:
    """The update of model (or adapters) and value head.

    Args:
        config: the job.
        policy: changed in place.
        layout: how it is scored.
        reference: pi_ref, asked again only where the loss charges the exact KL.
        estimator: how the loss charges KL(policy||reference): exact, k1, k2, k3; None: not at all.
    """

    mode = "false"

    def __init__(
        self,
        config: LanguageConfig,
        policy: Policy,
        layout: Layout,
        reference: Reference | None = None,
        estimator: str | None = None,
    ) -> None:
        self.config, self.policy, self.layout = config, policy, layout
        self.reference, self.estimator = reference, estimator
        self.loss: TokenLoss = factory("loss", config.loss, config.domain)(config.loss)
        self.optimizer: Optimizer = factory("optim", config.optim, config.domain)(
            config.optim, policy.parameters
        )
        self.beta_rule: BetaRule = self.loss.beta_rule()
        self.say: Callable[[str], None] = lambda _: None
        self._reduce = terms.REDUCTIONS[config.loss.reduction]
        self._old_head: nn.Module = head(policy.model)  # type: ignore[assignment]

    def update(self, batch: TensorDictBase, progress: float, kl_coef: float = 0.0) -> Learned:
        """Learn from a rollout.

        Args:
            batch: [B] with advantages, annotated.
            progress: share of the run that is over, 0..1, for the learning rate.
            kl_coef: ``kl.coef``, for a loss that charges KL to the reference.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite.
        """
        optim, loss = self.config.optim, self.loss
        lr = optim.lr + (optim.lr_floor - optim.lr) * min(progress, 1.0)
        beta = self.beta_rule.beta
        self._old_head = self._keep_head()
        before = [p.detach().clone() for p in self.policy.actor_parameters]
        made: list[Tensor] = []
        epochs = 0
        while epochs < self.config.learner.epochs:
            epochs += 1
            made += self._epoch(batch, lr, kl_coef)
            if loss.target_kl and self.kl_old(batch) > 1.5 * loss.target_kl:
                break
        metrics = torch.stack(made).double().cpu()
        require_finite(metrics, tuple(MEASURES.values()), self.config.learner.minibatches)
        kl_old = self.kl_old(batch)
        if not self.beta_rule.every_forward:
            self.beta_rule.update(kl_old)  # on the KL before a line search
        alpha = 1.0
        if line_search.due(loss.line_search, kl_old, loss.dtarg):
            parameters, measure = self.policy.actor_parameters, lambda: self.kl_old(batch)
            alpha, kl_old = line_search.search(parameters, before, measure, kl_old, loss.dtarg)
        mean = dict(zip(MEASURES, metrics.mean(0).tolist(), strict=True))
        del mean["kl_old"]  # of minibatches, in the midst of the update
        return Learned(**mean, kl_old=kl_old, alpha=alpha, beta=beta, lr=lr, epochs=epochs)

    def _epoch(self, batch: TensorDictBase, lr: float, kl_coef: float) -> list[Tensor]:
        """One pass: every prompt's group once, shuffled, in equal parts; the metrics of each."""
        size = self.config.collector.group_size
        # The order comes from the CPU's generator, the same on every device.
        order = torch.randperm(batch.batch_size[0] // size).to(batch["advantage"].device)
        made = []
        for prompts in order.chunk(self.config.learner.minibatches):
            made.append(self._step(take_prompts(batch, prompts, size), lr, kl_coef))
            if self.beta_rule.every_forward:
                self.beta_rule.update(float(made[-1][list(MEASURES).index("kl_old")]))
        return made

    def _step(self, batch: TensorDictBase, lr: float, kl_coef: float) -> Tensor:
        """One gradient step; its metrics, in the order of :data:`MEASURES`."""
        named = self.loss_terms(batch, kl_coef)
        self.optimizer.zero_grad()
        named["total"].backward()
        norm = self.optimizer.step(lr)
        found = {**named, "grad_norm": norm}
        return torch.stack([found[name].detach().float() for name in MEASURES])

    def loss_terms(self, batch: TensorDictBase, kl_coef: float) -> dict[str, Tensor]:
        """The loss of a minibatch [B] and its parts, scalars; ``total`` is what is minimised."""
        c, mask = self.config.loss, response_mask(batch)
        scored = self.score(batch)
        old_log_prob = on_response(batch, LOG_PROBS)
        advantage = batch["advantage"].squeeze(-1)
        if c.normalize_advantage:
            advantage = _normalized(advantage, mask)
        kl_old = self._kl_old(scored, batch)
        beta = self.beta_rule.beta
        gain = self.loss.gain(scored.log_prob, old_log_prob, advantage, kl_old, mask, beta)
        objective = -self._reduce(gain, mask)
        critic = self._critic(scored.policy.states, batch, mask)
        entropy, policy_entropy = self._entropy(scored.policy, batch, mask)
        kl_ref = objective.new_zeros(())
        if self.estimator is not None:
            ref_log_prob = on_response(batch, REF_LOG_PROBS)
            penalty = terms.reference_penalty(
                self.estimator, scored.log_prob, old_log_prob, ref_log_prob, scored.exact_ref, mask
            )
            kl_ref = kl_coef * self._reduce(penalty, mask)
        return {
            "total": objective + critic + entropy + kl_ref,
            "objective": objective,
            "critic": critic,
            "entropy": entropy,
            "kl_ref": kl_ref,
            "policy_entropy": policy_entropy,
            "kl_old": masked_mean(kl_old.detach(), mask),
        }

    def score(self, batch: TensorDictBase) -> Scored:
        """One forward of the policy, differentiable; the head once."""
        temperature = self.config.collector.temperature
        policy = self.layout.next_tokens(self.policy.model, batch, temperature)
        tokens, mask = batch["tokens", "response"], response_mask(batch)
        if self.estimator != "exact" or self.reference is None:
            return Scored(policy, response_log_probs(policy, tokens, mask), None)
        reference = self.reference.next_tokens(batch[REF_STATES], temperature)
        log_prob, _, exact = log_probs_and_exact_kl(policy, reference, tokens, mask)
        return Scored(policy, log_prob, exact)

    @torch.no_grad()
    def kl_old(self, batch: TensorDictBase) -> float:
        """Mean KL(old||new) over a rollout's tokens, whole vocabulary, nats per token."""
        total = batch["advantage"].new_zeros((), dtype=torch.float64)
        size = self.config.collector.group_size
        prompts = torch.arange(batch.batch_size[0] // size, device=total.device)
        for few in prompts.split(self.prompts_at_a_time):
            part = take_prompts(batch, few, size)
            new = self.layout.next_tokens(
                self.policy.model, part, self.config.collector.temperature
            )
            mask = response_mask(part)
            total += exact_token_kl(self._old(part), new, mask).sum(dtype=torch.float64)
        return float(total / response_mask(batch).sum())

    @property
    def prompts_at_a_time(self) -> int:
        """In one forward without gradient."""
        c = self.config
        return max(PROMPTS_WITHOUT_GRADIENT, c.collector.prompts // c.learner.minibatches)

    def _old(self, batch: TensorDictBase) -> NextTokens:
        """The distributions that the batch was sampled from."""
        temperature = self.config.collector.temperature
        return NextTokens(batch[STATES], self._old_head, temperature)

    def _keep_head(self) -> nn.Module:
        """The sampling policy's head, for KL(old||new): a copy where the update will move it."""
        now: nn.Module = head(self.policy.model)  # type: ignore[assignment]
        moves = any(p.requires_grad for p in now.parameters())
        return deepcopy(now).requires_grad_(False) if moves else now

    def _kl_old(self, scored: Scored, batch: TensorDictBase) -> Tensor:
        """KL(old||new) per token [B, R]: exact or k3 for KLPEN; for clip k3, only measured."""
        mask = response_mask(batch)
        if self.loss.exact_kl_old:
            return exact_token_kl(self._old(batch), scored.policy, mask)
        return terms.sampled_kl_old(scored.log_prob, on_response(batch, LOG_PROBS), mask)

    def _critic(self, states: Tensor, batch: TensorDictBase, mask: Tensor) -> Tensor:
        """critic_coeff * distance of the values, reduced; 0 without a value head."""
        c, value_head = self.config.loss, self.policy.value_head
        if value_head is None:
            return states.new_zeros(())
        target, old = (batch[key].squeeze(-1) for key in ("value_target", "state_value"))
        kind, clip = c.loss_critic_type, c.clip_value
        value = value_head(states).to(target)
        distance = terms.critic_distance(value, target, old, mask, kind, clip)
        return c.critic_coeff * self._reduce(distance, mask)

    def _entropy(
        self, policy: NextTokens, batch: TensorDictBase, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(-entropy_coeff * entropy, reduced; mean entropy per token in nats)."""
        c = self.config.loss
        if c.entropy_bonus and c.entropy_coeff > 0:
            entropy = token_entropy(policy, mask)
            mean = masked_mean(entropy.detach(), mask)
            return -c.entropy_coeff * self._reduce(entropy, mask), mean
        # Of the sampling policy, estimated from its own tokens: E[-log pi] costs nothing.
        surprise = masked_mean(-on_response(batch, LOG_PROBS), mask)
        return surprise.new_zeros(()), surprise


def _normalized(advantage: Tensor, mask: Tensor) -> Tensor:
    """(A - mean) / std over the minibatch's valid tokens; spread floored at 1e-6."""
    mean = masked_mean(advantage, mask)
    count = (mask.sum() - 1).clamp_min(1)
    std = ((advantage - mean).square().masked_fill(~mask, 0.0).sum() / count).sqrt()
    return (advantage - mean) / std.clamp_min(1e-6)
