"""Takes the gradient steps of a language run, on minibatches of whole groups of responses."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.functional import pad

from klrl.base import ranks
from klrl.config import AdamWConfig, LanguageConfig, OptimConfig, factory
from klrl.kl.charge import ReferenceKL
from klrl.kl.estimators import estimate_kl, masked_mean
from klrl.language.data.batch import (
    ATTENTION,
    LOG_PROBS,
    REF_LOG_PROBS,
    SAMPLER_LOG_PROBS,
    response_mask,
    response_part,
    shortened,
    take_prompts,
)
from klrl.language.model.causal_lm import Head, head, in_low_precision, model_dtype
from klrl.language.model.vocabulary import (
    Against,
    NextTokens,
    exact_token_kl,
    response_log_probs,
    token_entropy,
    token_measures,
)
from klrl.language.run.kl import Reference, of_old
from klrl.language.run.load import Policy
from klrl.language.run.rollout import (
    EXACT_MEASURES,
    REF_STATES,
    SAMPLER_STATES,
    STATES,
    exact_every,
)
from klrl.language.run.scoring import ScoringLayout
from klrl.language.run.shares import own_part, own_rows, take
from klrl.losses.policy import LossTerms, Scored, make_loss
from klrl.losses.terms import normalized
from klrl.runs.metrics import Row
from klrl.train.learner import Coefficients, Steps

#: Minimum number of prompts per forward without gradient, unless micro-batches are set.
PROMPTS_WITHOUT_GRADIENT = 32


class LanguageSteps(Steps[TensorDictBase, TensorDictBase]):
    """Takes gradient steps on the model (or its adapters) and the value head.

    If the loss charges the exact KL, the reference's head is applied to the reference's hidden
    states, which the rollout contains.
    """

    mode = "false"

    def __init__(
        self,
        config: LanguageConfig,
        policy: Policy,
        layout: ScoringLayout,
        reference: Reference | None = None,
        kl: ReferenceKL | None = None,
    ) -> None:
        self.config, self.policy, self.layout, self.reference = config, policy, layout, reference
        self.loss = make_loss(config.loss, config.domain, kl)
        self.optimizer: Optimizer = factory("optim", config.optim, config.domain)(
            config.optim, policy.parameters
        )
        self.say = lambda _: None
        self._temperature = config.collector.temperature
        self._old_head: nn.Module = head(policy.model)  # type: ignore[assignment]
        #: The head of mu, the policy that sampled the rollout; None: mu's head is pi_old's.
        self.sampler_head: nn.Module | None = None
        #: The divergence from mu that ``loss.measure`` reads over the vocabulary, if any.
        self.exact_measure = EXACT_MEASURES.get(getattr(config.loss, "measure", ""))
        self.loss.anchor = config.anchor

    @property
    def actor_parameters(self) -> list[nn.Parameter]:
        """The trained parameters of the model."""
        return self.policy.actor_parameters

    def lay_out(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch [B] unchanged; store the sampling policy's head, for KL(old||new)."""
        exact = own_rows(batch, ()).get(STATES, None) is not None
        # With kl.exact=every:N, what adapts reads k3 in every row, for one scale in all of them.
        self.sampled_old = not exact or exact_every(self.config) != 1
        if not exact:
            return batch
        now: nn.Module = head(self.policy.model)  # type: ignore[assignment]
        moves = any(p.requires_grad for p in now.parameters())
        self._old_head = deepcopy(now).requires_grad_(False) if moves else now
        if moves and in_low_precision(self.policy.model):
            # Cast to the dtype of the arithmetic: bfloat16 takes half the memory.
            self._old_head.to(model_dtype(self.policy.model))
        return batch

    def minibatches(self, frames: TensorDictBase) -> Iterator[TensorDictBase]:
        """Yield minibatches of whole groups, each group once, in random order."""
        size, count = self.config.collector.group_size, self.config.learner.minibatches
        # Each of n adjacent parts of the rollout, with one prompt for each minibatch, is shuffled.
        # So processes that share the rollout have equally many prompts of every minibatch.
        # The order comes from the CPU's generator, so it is the same on every device; and from that
        # of rank 0, where alone the reward functions may have drawn from it too.
        parts = frames.batch_size[0] // size // count
        places = ranks.first(lambda: torch.stack([torch.randperm(count) for _ in range(parts)]))
        order = places + count * torch.arange(parts)[:, None]  # [n, count]
        for prompts in order.to(frames["advantage"].device).unbind(1):
            yield take_prompts(frames, prompts, size)

    def step(self, minibatch: TensorDictBase, coefficients: Coefficients) -> Tensor:
        """Take one gradient step; return its metrics."""
        measured, width = [], response_mask(minibatch).shape[1]
        parts = self._parts(minibatch)
        for part, share, spread in self._shares(minibatch, parts):
            terms = self.loss_terms(part, coefficients, spread)
            total = terms.total if share is None else terms.total * share.to(terms.total)
            total.backward()
            cut = width - response_mask(part).shape[1]
            measured.append({n: pad(x.detach(), (0, cut)) for n, x in terms.measured.items()})
        self.optimizer.sum_gradients()
        norm = self.optimizer.clipped_step(coefficients.lr)
        with torch.no_grad():
            order = torch.cat(parts).argsort()
            own = {n: torch.cat([each[n] for each in measured])[order] for n in measured[0]}
            whole = {name: ranks.concatenated(value) for name, value in own.items()}
            metrics = self.loss.measure(whole, self._learned(minibatch))
            if self.config.loss.mask_truncated:
                # Average over all responses: the loss's mask is empty if all are truncated.
                entropy = of_old(-response_part(minibatch, LOG_PROBS), minibatch)
                entropy = masked_mean(entropy, response_mask(minibatch))
                metrics[self.loss.measures.index("policy/entropy")] = entropy
            return torch.cat([metrics, norm.reshape(1)]).float()

    def _parts(self, minibatch: TensorDictBase) -> tuple[Tensor, ...]:
        """Return the rows of each micro-batch, [n]: this process's rows of the minibatch."""
        learner, group_size = self.config.learner, self.config.collector.group_size
        own = torch.arange(len(minibatch), device=minibatch["advantage"].device)
        own = own[own_part(len(minibatch))]
        if self.layout.tokens is None:
            return own.split((learner.micro_batch or len(minibatch)) * group_size)
        # Responses of similar length need little padding.
        order = own[minibatch[ATTENTION][own].sum(1).argsort(descending=True, stable=True)]
        parts = self.layout.parts(minibatch[order])
        return (own,) if len(parts) == 1 else tuple(order[rows] for rows in parts)

    def _shares(
        self, minibatch: TensorDictBase, parts: tuple[Tensor, ...]
    ) -> Iterator[tuple[TensorDictBase, Tensor | None, Tensor | None]]:
        """Yield each micro-batch, its loss's weight, and the divisor that scaled its advantages.

        Weight and divisor are None for a single micro-batch; the divisor is also None without
        ``normalize_advantage``.
        """
        if len(parts[0]) == len(minibatch):
            yield minibatch, None, None
            return
        minibatch, mask, spread = minibatch.copy(), self._learned(minibatch), None
        if self.config.loss.normalize_advantage:
            advantage, spread = normalized(minibatch["advantage"].squeeze(-1), mask)
            minibatch["advantage"] = advantage.unsqueeze(-1)
        for rows in parts:
            chosen = torch.isin(torch.arange(len(mask), device=mask.device), rows)
            part = take(minibatch, rows, 1)
            part = part if self.layout.tokens is None else shortened(part)
            yield part, self.loss.share(chosen, mask), spread

    def _learned(self, batch: TensorDictBase) -> Tensor:
        """Return the loss's mask [B, R]; with ``mask_truncated``, without truncated responses."""
        mask = response_mask(batch)
        return mask & ~batch["next", "truncated"] if self.config.loss.mask_truncated else mask

    def loss_terms(
        self, batch: TensorDictBase, coefficients: Coefficients, spread: Tensor | None = None
    ) -> LossTerms:
        """Compute the loss of a minibatch [B]; ``spread`` is explained in :class:`PolicyLoss`."""
        scored = self.score(batch)
        beta, kl_coef = scored.log_prob.new_tensor([coefficients.beta, coefficients.kl_ref])
        return self.loss(scored, beta, kl_coef, spread)

    def score(self, batch: TensorDictBase) -> Scored:
        """Compute the loss's inputs at the batch's tokens [B, R]; one forward, differentiable."""
        mask, old_log_prob = self._learned(batch), response_part(batch, LOG_PROBS)
        states = self.layout.states(self.policy.model, batch)
        now: Head = head(self.policy.model)
        policy = NextTokens(states, now, self._temperature)
        log_prob, exact_ref, kl_old, far = self._measures(policy, batch, mask)
        # Without an entropy bonus, -log pi_old of the tokens estimates the entropy at no cost.
        bonus = self.loss.entropy_bonus
        entropy = token_entropy(policy, mask) if bonus else of_old(-old_log_prob, batch)
        charged = self.loss.reference_estimator is not None
        return Scored(
            log_prob=log_prob,
            old_log_prob=old_log_prob,
            advantage=batch["advantage"].squeeze(-1),
            kl_old=kl_old,
            entropy=entropy,
            **self._critic(states, batch, mask),
            ref_log_prob=response_part(batch, REF_LOG_PROBS) if charged else None,
            exact_ref=exact_ref,
            sampler_log_prob=self._log_mu(batch),
            sampler_divergence=far,
            mask=mask,
        )

    def _measures(
        self, policy: NextTokens, batch: TensorDictBase, mask: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return log pi_theta, any exact divergence that is charged, KL(old||new), [B, R] nats.

        Last is any exact divergence from mu, which ``loss.measure`` names.
        """
        against: list[Against] = []
        charged, exact_old = self.loss.divergence.name, self.loss.kl_old == "exact"
        if self.loss.reference_estimator == "exact" and self.reference is not None:
            reference = self.reference.next_tokens(batch[REF_STATES], self._temperature)
            against.append(Against(reference, [charged]))
        if exact_old:
            against.append(Against(self._old(batch), ["forward"]))
        measure = self.exact_measure
        if measure is not None:
            mu_head = self.sampler_head or self._old_head
            mu = NextTokens(batch[SAMPLER_STATES], mu_head, self._temperature)
            against.append(Against(mu, [measure]))
        log_prob, found = token_measures(policy, batch["tokens", "response"], mask, against)
        far = None if measure is None else found.pop().divergence[measure].detach()
        if exact_old:
            kl_old = found.pop().divergence["forward"]
        else:
            # k3 = w - 1 - log w >= 0, where w = pi_theta / pi_old at tokens drawn from pi_old. Its
            # value and its gradient are unbiased, since E_old[w] = 1, E_old[grad w] = 0, and
            # grad KL(old||new) = -E_old[grad log pi_theta].
            scored = log_prob.detach() if self.loss.kl_old == "measured" else log_prob
            old = response_part(batch, LOG_PROBS)
            kl_old = of_old(estimate_kl(old, scored, "k3", mask), batch)
        return log_prob, found.pop().divergence[charged] if found else None, kl_old, far

    def _log_mu(self, batch: TensorDictBase) -> Tensor | None:
        """Return log mu of the tokens [B, R]; None if the job does not read it."""
        return response_part(batch, SAMPLER_LOG_PROBS) if self.config.reads_sampler else None

    def _critic(self, states: Tensor, batch: TensorDictBase, mask: Tensor) -> dict[str, Tensor]:
        """Return the values, old values and targets; an empty dict without a value head."""
        if self.policy.value_head is None:
            return {}
        target, old = (batch[key].squeeze(-1) for key in ("value_target", "state_value"))
        value = self.policy.value_head(states, mask).to(target)
        return {"value": value, "value_target": target, "old_value": old}

    def kl_old(self, frames: TensorDictBase) -> float:
        """Compute KL(old||new), averaged over a rollout's tokens, in nats per token.

        It is exact; or k3, if some rollouts of the run have no states of pi_old.
        """
        return self._kl_old(frames, exact=not self.sampled_old)

    def exact_old(self, frames: TensorDictBase) -> Row:
        """Return KL(old||new) in closed form, if the rollout has states of pi_old."""
        known = own_rows(frames, ()).get(STATES, None) is not None
        return {"kl/old/exact": self._kl_old(frames, exact=True)} if known else {}

    @torch.no_grad()
    def _kl_old(self, frames: TensorDictBase, *, exact: bool) -> float:
        total = frames["advantage"].new_zeros((), dtype=torch.float64)
        own = own_rows(frames, ())
        for rows in self.layout.parts(own, prompts_at_a_time(self.config)):
            part = own[rows]
            new, mask = (
                self.layout.next_tokens(self.policy.model, part, self._temperature),
                response_mask(part),
            )
            if exact:
                kl = exact_token_kl(self._old(part), new, mask)
            else:
                log_prob = response_log_probs(new, part["tokens", "response"], mask)
                kl = estimate_kl(response_part(part, LOG_PROBS), log_prob, "k3", mask)
                kl = of_old(kl, part)
            total += kl.sum(dtype=torch.float64)
        return float(ranks.summed(total) / response_mask(frames).sum())

    def positions_per_unit(self, frames: TensorDictBase) -> float:
        """Return 1, or with ``loss.unit=sequence`` the mean number of tokens per response."""
        if self.loss.unit != "sequence":
            return 1.0
        return float(response_mask(frames).sum()) / len(frames)

    def _old(self, batch: TensorDictBase) -> NextTokens:
        """Return the distributions that the batch was sampled from."""
        return NextTokens(batch[STATES], self._old_head, self._temperature)


def prompts_at_a_time(config: LanguageConfig) -> int:
    """Return the number of prompts per forward without gradient."""
    if config.learner.micro_batch is not None:
        return config.learner.micro_batch
    return max(PROMPTS_WITHOUT_GRADIENT, config.collector.prompts // config.learner.minibatches)


class Optimizer(torch.optim.AdamW):
    """Adam or AdamW with gradient clipping; a ``weight_decay`` of 0 gives plain Adam."""

    def __init__(
        self, config: OptimConfig, parameters: list[nn.Parameter], weight_decay: float
    ) -> None:
        # The fused step takes a third of the time on a CPU, but needs contiguous parameters.
        fused = all(p.is_contiguous() for p in parameters)
        super().__init__(
            parameters, lr=config.lr, eps=config.eps, weight_decay=weight_decay, fused=fused
        )
        self._max_norm = config.max_grad_norm

    def sum_gradients(self) -> None:
        """Sum the gradients of all processes of torchrun, each of which has its share's."""
        if ranks.world() == 1:
            return
        parameters = self.param_groups[0]["params"]
        # Adam skips a parameter without a gradient, and moves one with a gradient of 0.
        used = ranks.summed(torch.tensor([p.grad is not None for p in parameters]).long())
        for p, processes in zip(parameters, used.tolist(), strict=True):
            if processes:
                p.grad = ranks.summed(torch.zeros_like(p) if p.grad is None else p.grad)

    def clipped_step(self, lr: float) -> Tensor:
        """Clip the gradient, step, and drop the gradient; return its norm before clipping."""
        (group,) = self.param_groups
        group["lr"] = lr
        norm = torch.nn.utils.clip_grad_norm_(group["params"], self._max_norm)
        if torch.isfinite(norm):  # a NaN would destroy the weights
            self.step()
        self.zero_grad()  # at once, to free memory for the next forward
        return norm


def adam(config: OptimConfig, parameters: list[nn.Parameter]) -> Optimizer:
    """``optim=adam``."""
    return Optimizer(config, parameters, weight_decay=0.0)


def adamw(config: AdamWConfig, parameters: list[nn.Parameter]) -> Optimizer:
    """``optim=adamw``."""
    return Optimizer(config, parameters, config.weight_decay)
