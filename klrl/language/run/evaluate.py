"""How a language policy is played: one response to each prompt of its evaluation split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from klrl.base.errors import ConfigError
from klrl.base.seeds import derived_seed
from klrl.config import LanguageConfig
from klrl.domains import LANGUAGE
from klrl.language.data.tasks import Task, make_task
from klrl.language.model.causal_lm import model_device
from klrl.language.model.pretrained import prompt_limit
from klrl.language.run.checks import PROMPTS, more_padding
from klrl.language.run.load import check_place, language_config, trained_policy
from klrl.language.run.policy import Policy
from klrl.language.run.rollout import decoding_of, drawn_of, make_sampler, respond, texts_of
from klrl.language.run.sampler import CacheSampler
from klrl.train.evaluate import CLOSING, IN_RUN, Evaluation, Scores, Starts, evaluation
from klrl.train.schedule import Size

#: Prompts answered at a time.
AT_A_TIME = 256
#: Between two sets of prompts of an endless task; no evaluation is longer.
_APART = 10**9


def evaluate_policy(
    config: LanguageConfig,
    policy: Policy,
    task: Task,
    sampler: CacheSampler,
    *,
    starts: Starts,
    size: Size,
    sampled: bool = False,
    chosen: bool = False,
) -> Evaluation:
    """Answer prompts of the evaluation split, once each.

    Args:
        config: the job: longest response, temperature.
        policy: answers.
        task: asks and scores.
        sampler: of the policy, as the preflight settled it.
        starts: which prompts, see :func:`places`; its seed is that of the samples too.
        size: how many; no more than there are in a file.
        sampled: from softmax(logits / temperature), as in training; else the likeliest tokens.
        chosen: evaluations during the run chose this policy; their prompts are left out.
    """
    limit = prompt_limit(policy.causal.context, config.collector.max_new_tokens)
    asked_for = size.episodes if size.steps is None else min(size.episodes, size.steps)
    place = places(starts, asked_for, task.evaluations, chosen)
    prompts = task.stream(policy.causal.tokenizer, limit, "eval")
    prompts.served = place.start
    sampler = sampler.without_states()
    decoding = decoding_of(config, greedy=not sampled)
    generator = torch.Generator(model_device(policy.model))
    generator.manual_seed(derived_seed(starts.seed, starts.use))

    def scores() -> Iterator[Scores]:
        """Of :data:`AT_A_TIME` responses at a time."""
        left = len(place)
        while left:
            asked = prompts.take(min(left, AT_A_TIME))
            left -= len(asked.prompts)
            batch = respond(sampler, asked, 1, decoding, generator)
            samples = (asked.prompts, texts_of(policy, batch), drawn_of(batch))
            rewards = task.reward(*samples).tolist()
            gold = () if task.gold is None else task.gold(*samples).tolist()
            yield Scores(rewards, gold)

    how = f"sampled at temperature {decoding.temperature:g}" if sampled else "greedy"
    return evaluation(scores(), LANGUAGE, how, starts)


def places(starts: Starts, count: int, among: int | None, chosen: bool = False) -> range:
    """The numbers of an evaluation's prompts.

    Of a file, evaluations during a run take the first half, the closing one the second half, and
    ``klrl evaluate`` begins at the first, whatever its seed; it too takes the second half for the
    best checkpoint, which the first chose. A file of one prompt has no halves.

    Args:
        starts: which set.
        count: most prompts.
        among: prompts in the file; None for an endless task.
        chosen: the policy is the best of evaluations on the first half.
    """
    if among is None:
        known = {IN_RUN: 0, CLOSING: 1}
        first = known.get(starts, len(known) + starts.seed) * _APART
        return range(first, first + count)
    half = (among + 1) // 2
    second = min(half, among - 1), among
    first, end = {IN_RUN: (0, half), CLOSING: second}.get(starts, second if chosen else (0, among))
    return range(first, min(first + count, end))


def evaluate_trained(
    folder: Path,
    config: LanguageConfig,
    *,
    starts: Starts,
    size: Size,
    sampled: bool,
    which: str,
    device: torch.device,
) -> Evaluation:
    """:func:`klrl.train.evaluate.evaluate_run` of a language run.

    ``config`` names the task, and where the base model is now.
    """
    task, stored = make_task(config.env, config.seed), language_config(folder)
    check_place(config, "actor.model=FOLDER")
    model = config.actor.model
    model = None if model == stored.actor.model else model
    policy = trained_policy(folder, which, str(device), model=model)
    chosen = which == "best" and config.env == stored.env
    sampler = settled_sampler(config, policy, task)
    return evaluate_policy(
        config, policy, task, sampler, starts=starts, size=size, sampled=sampled, chosen=chosen
    )


def settled_sampler(config: LanguageConfig, policy: Policy, task: Task) -> CacheSampler:
    """The sampler that a run with this policy takes."""
    limit = prompt_limit(policy.causal.context, config.collector.max_new_tokens)
    few = more_padding(task.few(policy.causal.tokenizer, limit, PROMPTS, "eval"))
    device, sampler = model_device(policy.model), make_sampler(policy)
    try:
        sampler.self_check(few.ids.to(device), few.mask.to(device), config.collector.group_size)
    except ValueError as error:
        raise ConfigError(f"actor.model={config.actor.model}: {error}") from error
    return sampler
