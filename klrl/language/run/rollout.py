"""Rollouts of a language run: prompts, responses, scores; one TensorDict [B] per iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from klrl.base.seeds import derived_seed
from klrl.config import LanguageConfig
from klrl.kl.estimators import estimate_kl, masked_mean
from klrl.language.data.batch import (
    ATTENTION,
    LOG_PROBS,
    make_batch,
    on_full,
    on_response,
    prompt_length,
    response_mask,
    set_scores,
)
from klrl.language.data.prompts import Prompt, PromptBatch, PromptStream
from klrl.language.data.rewards import Drawn, response_texts
from klrl.language.data.tasks import Task
from klrl.language.model.causal_lm import head, model_device, weights_cast_once
from klrl.language.model.vocabulary import NextTokens, response_log_probs
from klrl.language.run.load import Policy
from klrl.language.run.sampler import CacheSampler, Decoding
from klrl.language.run.scoring import ScoringLayout
from klrl.runs.metrics import Row

#: The hidden states that the responses were drawn from [B, R, D], and pi_ref's of the same tokens.
STATES = ("old", "states")
REF_STATES = ("ref", "states")
#: The gold score [B, 1, 1], where the reward is another function.
GOLD = ("next", "gold")
#: By label the scores [B, 1, 1] of which the reward is the weighted sum, where there are several.
PARTS = ("next", "reward_parts")


def make_sampler(policy: Policy) -> CacheSampler:
    """The sampler of training."""
    return CacheSampler(policy.model, policy.special, keep_states=True)


def decoding_of(config: LanguageConfig, *, greedy: bool = False) -> Decoding:
    """The decoding of training, or a greedy one of responses as long."""
    return Decoding(config.collector.max_new_tokens, config.collector.temperature, greedy)


@dataclass(eq=False)
class PromptRollout:
    """Samples responses to the next prompts and scores them.

    Attributes:
        config: the job.
        policy: the live policy.
        sampler: of the policy.
        task: has the reward.
        prompts: of training.
        iteration: of the next call; seeds its samples, so that a resumed run draws the same ones.
        phase: takes the name of the phase that begins.
        scored_prompts, responses: the latest rollout's, B of each.
        built: parts of TorchRL's that it is made of.
    """

    config: LanguageConfig
    policy: Policy
    sampler: CacheSampler
    task: Task
    prompts: PromptStream
    iteration: int
    phase: Callable[[str], None] = field(default=lambda name: None)
    scored_prompts: list[Prompt] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    built: tuple[object, ...] = ()

    def collect(self) -> TensorDictBase:
        """The next rollout [B], scored."""
        batch = self.respond(self.prompts.take(self.config.collector.prompts))
        self.score(batch)
        return batch

    def respond(self, prompts: PromptBatch) -> TensorDict:
        """A batch [B] of this iteration's responses to prompts."""
        seed = derived_seed(self.config.seed, "sample", self.iteration)
        self.iteration += 1
        group_size = self.config.collector.group_size
        self.scored_prompts = [prompt for prompt in prompts.prompts for _ in range(group_size)]
        batch = sample(self.policy, self.sampler, prompts, self.config, seed)
        self.responses = texts_of(self.policy, batch)
        return batch

    def score(self, batch: TensorDictBase) -> None:
        """Write scores, the parts of which they are the sum, and gold scores."""
        self.phase("reward")
        samples = (self.scored_prompts, self.responses, drawn_of(batch))
        parts = self.task.reward.parts(*samples)
        set_scores(batch, self.task.reward.total(parts).to(batch.device))
        extra: dict[tuple[str, ...], Tensor] = {}
        if len(parts) > 1:
            extra = {(*PARTS, name): part for name, part in parts.items()}
        if self.task.gold is not None:
            extra[GOLD] = self.task.gold(*samples)
        for key, scores in extra.items():
            batch[key] = scores.to(batch.device).reshape(-1, 1, 1)

    def close(self) -> None:
        """Do nothing: nothing is open."""


def sample(
    policy: Policy, sampler: CacheSampler, prompts: PromptBatch, config: LanguageConfig, seed: int
) -> TensorDict:
    """A batch [B] of responses to prompts as in training, without scores."""
    generator = torch.Generator(model_device(policy.model)).manual_seed(seed)
    return respond(sampler, prompts, config.collector.group_size, decoding_of(config), generator)


def respond(
    sampler: CacheSampler,
    prompts: PromptBatch,
    group_size: int,
    decoding: Decoding,
    generator: torch.Generator,
) -> TensorDict:
    """A batch [B] of responses; with ("old", "states") where the sampler keeps them."""
    ids, mask = prompts.ids.to(generator.device), prompts.mask.to(generator.device)
    with weights_cast_once(generator.device):
        responses = sampler(ids, mask, group_size, decoding, generator)
    batch = make_batch(ids, mask, responses, group_size)
    if responses.states is not None:
        batch[STATES] = responses.states
    return batch


def texts_of(policy: Policy, batch: TensorDictBase) -> list[str]:
    """B responses without the EOS that ended them."""
    return response_texts(policy.causal.tokenizer, ids_of(batch)[1], policy.special.eos)


def drawn_of(batch: TensorDictBase) -> Drawn:
    """What a reward function may ask for of B responses, beside their texts."""
    truncated = batch["next", "truncated"].flatten().tolist()
    return Drawn(truncated, *ids_of(batch), batch.device or torch.device("cpu"))


def ids_of(batch: TensorDictBase) -> tuple[list[list[int]], list[list[int]]]:
    """The real tokens of B prompts, and those of their responses."""
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
    batch: TensorDictBase, model: nn.Module, layout: ScoringLayout, prompts: int, temperature: float
) -> Row:
    """Write states and log-probs of a rollout anew, as they are scored.

    Args:
        batch: [B], sampled from the model as it is.
        model: the policy.
        layout: how it is scored.
        prompts: at a time.
        temperature: of sampling.

    Returns:
        :func:`rounding` of the two.
    """
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    sampled = on_response(batch, LOG_PROBS)
    batch[STATES] = layout.rollout_states(model, batch, prompts)
    scored = response_log_probs(NextTokens(batch[STATES], head(model), temperature), tokens, mask)
    batch[LOG_PROBS] = on_full(batch, scored)
    return rounding(sampled, scored, mask)


def rounding(sampled: Tensor, scored: Tensor, mask: Tensor) -> Row:
    """How far two ways to compute the same log-probs are apart.

    Args:
        sampled: log pi of the tokens while they were sampled [B, R], nats.
        scored: the same by scoring.
        mask: [B, R] bool.

    Returns:
        ``kl/ref/floor``, the KL of the first way from the second by k3 (their true KL is 0), and
        ``policy/gap``, the largest difference of two log-probs.
    """
    sampled, scored = sampled.double(), scored.double()
    floor = masked_mean(estimate_kl(sampled, scored, "k3", mask), mask)
    gap = (sampled - scored).masked_fill(~mask, 0.0).abs().max()
    return {"kl/ref/floor": float(floor), "policy/gap": float(gap)}
