"""Makes the rollouts of a language run: a TensorDict [B] of prompts, responses and scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from klrl.base import ranks
from klrl.base.seeds import derived_seed
from klrl.config import AdvantageConfig, LanguageConfig
from klrl.kl.estimators import estimate_kl, masked_mean
from klrl.language.data.batch import (
    ATTENTION,
    LOG_PROBS,
    SCORE,
    make_batch,
    pad_to_full,
    prompt_length,
    response_mask,
    response_part,
)
from klrl.language.data.prompts import Prompt, PromptBatch, PromptStream
from klrl.language.data.rewards import Extras, response_texts
from klrl.language.data.tasks import Task
from klrl.language.model.causal_lm import head, model_device, weights_cast_once
from klrl.language.model.vocabulary import NextTokens, States, response_log_probs
from klrl.language.run.load import Policy
from klrl.language.run.sampler import CacheSampler, Decoding
from klrl.language.run.scoring import ScoringLayout
from klrl.language.run.shares import own_prompts, spread
from klrl.runs.metrics import Row

#: Hidden states [B, R, D] that predict the responses: pi_old's, those of the sampling policy mu, if
#: it is not pi_old, and pi_ref's.
STATES = ("old", "states")
SAMPLER_STATES = ("sampler", "states")
REF_STATES = ("ref", "states")
#: The gold score [B, 1, 1], if the reward is a different function.
GOLD = ("next", "gold")
#: Label -> unweighted score [B, 1, 1] of each reward function, if there are several.
PARTS = ("next", "reward_parts")


#: ``loss.measure`` over the whole vocabulary -> the divergence of the policy and the sampler.
EXACT_MEASURES = {"tv_exact": "tv", "kl_exact": "forward"}


def learns_from_states(config: LanguageConfig) -> bool:
    """Return whether the critic or the loss reads hidden states from before the update."""
    kl_old, measure = (getattr(config.loss, name, "") for name in ("kl_old", "measure"))
    critic = isinstance(config.advantage, AdvantageConfig)
    return critic or kl_old == "exact" or measure in EXACT_MEASURES


def exact_every(config: LanguageConfig) -> int:
    """Return the iterations from one with exact KLs to the next (``kl.exact``); 0 if none has."""
    exact, charged = config.kl.exact, getattr(config.kl, "estimator", "") == "exact"
    if exact == "always" or charged or learns_from_states(config):
        return 1
    return 0 if exact == "charged" else int(exact.removeprefix("every:"))


def make_sampler(policy: Policy) -> CacheSampler:
    """Make the sampler for training, which also returns hidden states."""
    return CacheSampler(policy.model, policy.special, keep_states=True)


def decoding_of(config: LanguageConfig, *, greedy: bool = False) -> Decoding:
    """Return training's settings for sampling; if ``greedy``, the likeliest tokens are taken."""
    return Decoding(config.collector.max_new_tokens, config.collector.temperature, greedy)


@dataclass(eq=False)
class PromptRollout:
    """Samples responses to the next prompts and scores them."""

    config: LanguageConfig
    policy: Policy
    sampler: CacheSampler
    task: Task
    prompts: PromptStream
    iteration: int  # of the next rollout; also seeds its samples
    phase: Callable[[str], None] = field(default=lambda name: None)
    #: Prompts and texts of the latest rollout, B each.
    scored_prompts: list[Prompt] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    built: tuple[object, ...] = ()  # the TorchRL objects that the rollout uses

    def collect(self) -> TensorDictBase:
        """Make the next rollout [B], scored."""
        batch = self.respond(self.prompts.take(self.config.collector.prompts))
        self.score(batch)
        return batch

    def respond(self, prompts: PromptBatch) -> TensorDictBase:
        """Sample this iteration's responses to the prompts, as a batch [B]."""
        own = self.draw(*own_prompts(prompts))
        # A checkpoint of rank 0 contains rollouts that wait, with all states.
        batch = spread(own, [] if self.config.collector.staleness else [STATES])
        self.iteration += 1
        group_size = self.config.collector.group_size
        self.scored_prompts = [prompt for prompt in prompts.prompts for _ in range(group_size)]
        self.responses = texts_of(self.policy, batch)
        return batch

    @property
    def exact(self) -> bool:
        """Whether the next rollout keeps its hidden states, for exact KLs (``kl.exact``)."""
        every = exact_every(self.config)
        return every > 0 and (self.iteration + 1) % every == 0

    def draw(self, prompts: PromptBatch, first: int) -> TensorDict:
        """Sample responses to this process's prompts; ``first`` is the number of the first one."""
        seed = derived_seed(self.config.seed, "sample", self.iteration)
        sampler = self.sampler if self.exact else self.sampler.without_states()
        return sample(self.policy, sampler, prompts, self.config, seed, first)

    def recall(self, batch: TensorDictBase, served: int) -> None:
        """Set prompts and texts to those of a rollout before which ``served`` were served."""
        now, collector = self.prompts.served, self.config.collector
        self.prompts.served = served
        asked = self.prompts.take(collector.prompts).prompts
        self.prompts.served = now
        self.scored_prompts = [prompt for prompt in asked for _ in range(collector.group_size)]
        self.responses = texts_of(self.policy, batch)

    def score(self, batch: TensorDictBase) -> None:
        """Write scores and any gold scores; for several reward functions, also their own scores.

        Rank 0 of the run's processes calls the reward functions.
        """
        self.phase("reward")
        for key, scores in ranks.first(partial(self.rewarded, batch)).items():
            batch[key] = scores.to(batch.device).reshape(-1, 1, 1)

    def rewarded(self, batch: TensorDictBase) -> dict[tuple[str, ...], Tensor]:
        """Return the scores of the latest rollout's responses by their key in the batch, [B]."""
        samples = (self.scored_prompts, self.responses, extras_of(batch))
        parts = self.task.reward.parts(*samples)
        scores: dict[tuple[str, ...], Tensor] = {SCORE: self.task.reward.total(parts)}
        if len(parts) > 1:
            scores |= {(*PARTS, name): part for name, part in parts.items()}
        if self.task.gold is not None:
            scores[GOLD] = self.task.gold(*samples)
        return scores

    def close(self) -> None:
        """Do nothing: no resource is open."""


def sample(
    policy: Policy,
    sampler: CacheSampler,
    prompts: PromptBatch,
    config: LanguageConfig,
    seed: int,
    first: int = 0,
) -> TensorDict:
    """Sample responses with the settings of training; return a batch [B] without scores."""
    group_size = config.collector.group_size
    return respond(sampler, prompts, group_size, decoding_of(config), seed, first)


def respond(
    sampler: CacheSampler,
    prompts: PromptBatch,
    group_size: int,
    decoding: Decoding,
    seed: int,
    first: int = 0,
) -> TensorDict:
    """Sample responses, as a batch [B]; with ("old", "states") if the sampler keeps states."""
    device = model_device(sampler.model)
    ids, mask = prompts.ids.to(device), prompts.mask.to(device)
    with weights_cast_once(device):
        responses = sampler(ids, mask, group_size, decoding, seed, first)
    batch = make_batch(ids, mask, responses, group_size)
    if responses.states is not None:
        batch[STATES] = responses.states
    return batch


def texts_of(policy: Policy, batch: TensorDictBase) -> list[str]:
    """Decode the B responses, without their final EOS."""
    return response_texts(policy.causal.tokenizer, ids_of(batch)[1], policy.special.eos)


def extras_of(batch: TensorDictBase) -> Extras:
    """Collect the data on B responses that a reward function may request in addition to texts."""
    truncated = batch["next", "truncated"].flatten().tolist()
    return Extras(truncated, *ids_of(batch), batch.device or torch.device("cpu"))


def ids_of(batch: TensorDictBase) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of B prompts and of their responses, without padding."""
    prompt_mask = batch[ATTENTION][:, : prompt_length(batch)]
    masks = {"prompt": prompt_mask, "response": response_mask(batch)}
    prompts, responses = (
        [
            row[real].tolist()
            for row, real in zip(batch["tokens", name].cpu(), mask.cpu(), strict=True)
        ]
        for name, mask in masks.items()
    )
    return prompts, responses


@torch.no_grad()
def rescore(
    batch: TensorDictBase,
    model: nn.Module,
    layout: ScoringLayout,
    prompts: int,
    temperature: float,
    *,
    keep: bool = True,
) -> Row:
    """Replace a rollout's states and log-probs from sampling by those computed in ``layout``.

    The model computes ``prompts`` prompts of the batch [B] per forward. Without ``keep`` the batch
    gets no states. Return the :func:`rounding` of old and new log-probs.
    """
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    sampled = response_part(batch, LOG_PROBS)
    states: States = layout.rollout_states(model, batch, prompts)
    if keep:
        states = batch[STATES] = torch.cat([*states])
    scored = response_log_probs(NextTokens(states, head(model), temperature), tokens, mask)
    batch[LOG_PROBS] = pad_to_full(batch, scored)
    return rounding(sampled, scored, mask)


def rounding(sampled: Tensor, scored: Tensor, mask: Tensor) -> Row:
    """Compare log-probs [B, R], nats, from sampling with those from scoring whole responses.

    Return ``kl/ref/floor``, k3's estimate of KL(sampled||scored), which would be 0 without
    rounding, and ``policy/gap``, the largest absolute difference, in nats.
    """
    sampled, scored = sampled.double(), scored.double()
    floor = masked_mean(estimate_kl(sampled, scored, "k3", mask), mask)
    gap = (sampled - scored).masked_fill(~mask, 0.0).abs().max()
    return {"kl/ref/floor": float(floor), "policy/gap": float(gap)}
