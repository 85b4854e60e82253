"""How a language policy is played: one response to each prompt of its evaluation split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from klrl.config import LanguageConfig
from klrl.domains import LANGUAGE
from klrl.language.batch import make_batch
from klrl.language.load import trained_policy
from klrl.language.model import prompt_limit
from klrl.language.policy import Policy
from klrl.language.prompts import PromptBatch
from klrl.language.rollout import decoding_of, texts_of
from klrl.language.sampler import CacheSampler
from klrl.language.tasks import Task, make_task
from klrl.train.evaluate import Evaluation, Scores, evaluation

#: Prompts answered at a time.
AT_A_TIME = 256


def evaluate_policy(
    config: LanguageConfig,
    policy: Policy,
    task: Task,
    *,
    episodes: int,
    limit: int | None,
    sampled: bool = False,
    seed: int = 0,
) -> Evaluation:
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
    how = f"sampled at temperature {config.collector.temperature:g}" if sampled else "greedy"
    return evaluation(_scores(config, policy, task, episodes, limit, sampled, seed), LANGUAGE, how)


def _scores(
    config: LanguageConfig,
    policy: Policy,
    task: Task,
    episodes: int,
    limit: int | None,
    sampled: bool,
    seed: int,
) -> Iterator[Scores]:
    """Of :data:`AT_A_TIME` responses at a time."""
    prompts = task.stream(policy.causal.tokenizer, limit, "eval")
    left = min(episodes, task.evaluations or episodes)
    device = next(policy.model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    while left:
        taken = prompts.take(min(left, AT_A_TIME))
        left -= len(taken.prompts)
        answers = _answers(config, policy, taken, generator, sampled)
        rewards = task.reward(taken.prompts, answers).tolist()
        gold = () if task.gold is None else task.gold(taken.prompts, answers).tolist()
        yield Scores(rewards, gold)


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


def evaluate_trained(
    folder: Path,
    config: LanguageConfig,
    *,
    episodes: int,
    sampled: bool,
    which: str,
    seed: int,
    device: torch.device,
) -> Evaluation:
    """:func:`klrl.train.evaluate.evaluate_run` of a language run; ``config`` names the task."""
    task = make_task(config.env, config.seed)
    policy = trained_policy(folder, which, str(device))
    longest, setting = config.collector.max_new_tokens, "collector.max_new_tokens"
    return evaluate_policy(
        config,
        policy,
        task,
        episodes=episodes,
        limit=prompt_limit(policy.causal.context, longest, setting),
        sampled=sampled,
        seed=seed,
    )
