"""How a language policy is played: one response to each prompt of its evaluation split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from klrl.config import LanguageConfig
from klrl.domains import LANGUAGE
from klrl.language.causal_lm import model_device
from klrl.language.load import trained_policy
from klrl.language.model import prompt_limit
from klrl.language.policy import Policy
from klrl.language.rollout import decoding_of, respond, texts_of
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
    sampled: bool = False,
    seed: int = 0,
) -> Evaluation:
    """Answer the first prompts of the evaluation split, once each.

    Args:
        config: the job: longest response, temperature.
        policy: answers.
        task: asks and scores.
        episodes: prompts; no more than there are in a file.
        sampled: from softmax(logits / temperature), as in training; else the likeliest tokens.
        seed: of the samples.

    Raises:
        ConfigError: a response may fill the model's context.
        RewardError: the reward function failed.
    """
    limit = prompt_limit(policy.causal.context, config.collector.max_new_tokens)
    prompts = task.stream(policy.causal.tokenizer, limit, "eval")
    # One response a prompt shares nothing.
    sampler = CacheSampler(policy.model, policy.special, shared=False)
    decoding = decoding_of(config, greedy=not sampled)
    generator = torch.Generator(model_device(policy.model)).manual_seed(seed)

    def scores() -> Iterator[Scores]:
        """Of :data:`AT_A_TIME` responses at a time."""
        left = min(episodes, task.evaluations or episodes)
        while left:
            asked = prompts.take(min(left, AT_A_TIME))
            left -= len(asked.prompts)
            answers = texts_of(policy, respond(sampler, asked, 1, decoding, generator))
            rewards = task.reward(asked.prompts, answers).tolist()
            gold = () if task.gold is None else task.gold(asked.prompts, answers).tolist()
            yield Scores(rewards, gold)

    how = f"sampled at temperature {decoding.temperature:g}" if sampled else "greedy"
    return evaluation(scores(), LANGUAGE, how)


def evaluate_trained(
    folder: Path, config: LanguageConfig, *, which: str, device: torch.device, **how: Any
) -> Evaluation:
    """:func:`klrl.train.evaluate.evaluate_run` of a language run; ``config`` names the task.

    ``how`` goes to :func:`evaluate_policy`.
    """
    task = make_task(config.env, config.seed)
    return evaluate_policy(config, trained_policy(folder, which, str(device)), task, **how)
