"""Rewards of a language policy on its evaluation split."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from klrl.config import LanguageConfig
from klrl.language.batch import make_batch
from klrl.language.load import trained_policy
from klrl.language.model import prompt_limit
from klrl.language.policy import Policy
from klrl.language.prompts import PromptBatch
from klrl.language.rollout import decoding_of, texts_of
from klrl.language.sampler import CacheSampler
from klrl.language.tasks import Task, make_task
from klrl.runs.machine import device_of
from klrl.runs.metrics import Row
from klrl.train.evaluate import RESPONSES

#: Prompts answered at a time.
AT_A_TIME = 256


@dataclass(frozen=True)
class LanguageEvaluation:
    """Scores of one response to each prompt.

    Attributes:
        returns: the reward of each.
        gold: the gold score of each, where it is not the reward.
        how: greedy, or sampled at a temperature.
    """

    returns: list[float]
    gold: list[float] | None = None
    how: str = "greedy"

    @property
    def row(self) -> Row:
        """``eval/return``, ``eval/return_std`` (population), ``eval/gold`` where there is one."""
        spread = statistics.pstdev(self.returns)
        row = {"eval/return": statistics.fmean(self.returns), "eval/return_std": spread}
        return row if self.gold is None else {**row, "eval/gold": statistics.fmean(self.gold)}

    @property
    def told(self) -> str:
        """For a person to read."""
        row = self.row
        gold = f", gold {row['eval/gold']:.3f}" if "eval/gold" in row else ""
        return (
            f"reward {row['eval/return']:.3f}{gold} over {len(self.returns)} {self.how} responses"
        )


def evaluate_language(
    config: LanguageConfig,
    policy: Policy,
    task: Task,
    *,
    episodes: int,
    limit: int | None,
    sampled: bool = False,
    seed: int = 0,
) -> LanguageEvaluation:
    """Answer the first prompts of the evaluation split, once each.

    Args:
        config: the job: longest response, temperature.
        policy: answers.
        task: asks and scores.
        episodes: prompts; no more than there are in a file.
        limit: most tokens of a prompt.
        sampled: from softmax(logits / temperature), as in training; else the likeliest tokens.
        seed: of the samples.

    Raises:
        RewardError: the reward function failed.
    """
    prompts = task.stream(policy.causal.tokenizer, limit, "eval")
    left = min(episodes, task.evaluations or episodes)
    device = next(policy.model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    rewards: list[float] = []
    gold: list[float] = []
    while left:
        taken = prompts.take(min(left, AT_A_TIME))
        left -= len(taken.prompts)
        answers = _answers(config, policy, taken, generator, sampled)
        rewards += task.reward(taken.prompts, answers).tolist()
        if task.gold is not None:
            gold += task.gold(taken.prompts, answers).tolist()
    how = f"sampled at {config.collector.temperature:g}" if sampled else "greedy"
    return LanguageEvaluation(rewards, gold or None, how)


def _answers(
    config: LanguageConfig,
    policy: Policy,
    prompts: PromptBatch,
    generator: torch.Generator,
    sampled: bool,
) -> list[str]:
    ids, mask = prompts.ids.to(generator.device), prompts.mask.to(generator.device)
    decoding = decoding_of(config, greedy=not sampled, training=False)
    # One response a prompt shares nothing.
    sampler = CacheSampler(policy.model, policy.special, shared=False)
    found = sampler(ids, mask, 1, decoding, generator)
    return texts_of(policy, make_batch(ids, mask, found, 1))


def evaluate_language_run(
    folder: Path,
    config: LanguageConfig,
    *,
    episodes: int | None,
    sampled: bool,
    which: str,
    seed: int,
    device: str,
) -> LanguageEvaluation:
    """:func:`klrl.train.evaluate.evaluate_run` of a language run; ``config`` names the task."""
    task = make_task(config.env, config.seed)
    policy = trained_policy(folder, which, str(device_of(device)))
    longest, setting = config.collector.max_new_tokens, "collector.max_new_tokens"
    return evaluate_language(
        config,
        policy,
        task,
        episodes=episodes or RESPONSES,
        limit=prompt_limit(policy.causal.context, longest, setting),
        sampled=sampled,
        seed=seed,
    )
