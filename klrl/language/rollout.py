"""Rollouts of a language run: prompts, responses, scores; one TensorDict [B] per iteration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDict, TensorDictBase

from klrl.config import LanguageConfig
from klrl.language.batch import make_batch, response_mask, set_scores
from klrl.language.policy import Policy
from klrl.language.prompts import Prompt, PromptBatch, PromptStream
from klrl.language.rewards import response_texts
from klrl.language.sampler import CacheSampler, Decoding, Sampler
from klrl.language.tasks import Task
from klrl.language.wrapper_sampler import WrapperSampler

#: The hidden states that the responses were drawn from [B, R, D], and pi_ref's of the same tokens.
STATES = ("old", "states")
REF_STATES = ("ref", "states")
#: The gold score [B, 1, 1], where the reward is another function.
GOLD = ("next", "gold")


def make_sampler(config: LanguageConfig, policy: Policy) -> CacheSampler | WrapperSampler:
    """The sampler that ``collector.sampler`` names."""
    if config.collector.sampler == "wrapper":
        return WrapperSampler(policy.model, policy.causal.tokenizer, policy.special)
    return CacheSampler(policy.model, policy.special, keep_states=True)


def decoding_of(config: LanguageConfig, **more: bool) -> Decoding:
    """The decoding of training; evaluation adds ``greedy`` and ``training=False``."""
    collector = config.collector
    return Decoding(collector.max_new_tokens, collector.temperature, **more)


class PromptRollout:
    """Samples responses to the next prompts and scores them.

    Args:
        config: the job.
        policy: the live policy.
        sampler: of the policy.
        task: has the reward.
        prompts: of training.
        seed_at: iteration -> seed of its samples, so that a resumed run draws the same ones.
        iteration: of the first call.
    """

    def __init__(
        self,
        config: LanguageConfig,
        policy: Policy,
        sampler: Sampler,
        task: Task,
        prompts: PromptStream,
        seed_at: Callable[[int], int],
        iteration: int = 0,
    ) -> None:
        self.config, self.policy, self.sampler, self.task = config, policy, sampler, task
        self.prompts, self._seed_at, self._iteration = prompts, seed_at, iteration
        #: The latest rollout's B prompts and B responses, as texts.
        self.scored_prompts: list[Prompt] = []
        self.responses: list[str] = []

    def collect(self) -> TensorDictBase:
        """The next rollout [B], scored.

        Raises:
            ConfigError: a prompt is too long for the model.
            RewardError: the reward function failed.
        """
        prompts = self.prompts.take(self.config.collector.prompts)
        batch = sample(
            self.policy, self.sampler, prompts, self.config, self._seed_at(self._iteration)
        )
        self._iteration += 1
        self.scored_prompts = prompts.repeat(self.config.collector.group_size).prompts
        self.responses = texts_of(self.policy, batch)
        set_scores(batch, self.task.reward(self.scored_prompts, self.responses).to(batch.device))
        if self.task.gold is not None:
            gold = self.task.gold(self.scored_prompts, self.responses).to(batch.device)
            batch[GOLD] = gold.reshape(-1, 1, 1)
        return batch

    def close(self) -> None:
        """Do nothing: nothing is open."""


def sample(
    policy: Policy, sampler: Sampler, prompts: PromptBatch, config: LanguageConfig, seed: int
) -> TensorDict:
    """A batch [B] of responses to prompts, with ("old", "states") and without scores."""
    device = next(policy.model.parameters()).device
    ids, mask = prompts.ids.to(device), prompts.mask.to(device)
    size = config.collector.group_size
    generator = torch.Generator(device).manual_seed(seed)
    responses = sampler(ids, mask, size, decoding_of(config), generator)
    batch = make_batch(ids, mask, responses, size)
    assert responses.states is not None
    batch[STATES] = responses.states
    return batch


def texts_of(policy: Policy, batch: TensorDictBase) -> list[str]:
    """B responses without the EOS that ended them."""
    tokens = batch["tokens", "response"]
    return response_texts(policy.causal.tokenizer, tokens, response_mask(batch), policy.special.eos)
