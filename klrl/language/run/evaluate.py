"""How a language policy is played: one response to each prompt of its evaluation split."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict

from klrl.base.errors import ConfigError
from klrl.base.seeds import derived_seed
from klrl.base.text import warn
from klrl.config import LanguageConfig
from klrl.domains import LANGUAGE
from klrl.kl.divergences import MEASURED
from klrl.language.data.prompts import PromptBatch
from klrl.language.data.tasks import Task, make_task
from klrl.language.model.causal_lm import model_device
from klrl.language.model.pretrained import prompt_limit
from klrl.language.run.between import (
    measured,
    other_policy,
    policy_of_run,
    scored_by,
    scored_by_reference,
    trained_reference,
)
from klrl.language.run.checks import PROMPTS, more_padding
from klrl.language.run.kl import Reference
from klrl.language.run.load import check_place, language_config, trained_policy
from klrl.language.run.policy import Policy
from klrl.language.run.rollout import decoding_of, drawn_of, make_sampler, respond, texts_of
from klrl.language.run.sampler import CacheSampler
from klrl.train.evaluate import (
    CLOSING,
    IN_RUN,
    REFERENCE_KLS,
    Evaluation,
    Scores,
    Starts,
    evaluation,
)
from klrl.train.policy_kl import Parties, Visited
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
    reference: Reference | None = None,
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
        reference: both KLs to it are measured at the tokens of the responses.
    """
    asked_for = size.episodes if size.steps is None else min(size.episodes, size.steps)
    place = places(starts, asked_for, task.evaluations, chosen)
    temperature = config.collector.temperature
    both = None
    if reference is not None:
        both = scored_by(policy, temperature), scored_by_reference(reference, temperature)

    def scores() -> Iterator[Scores]:
        """Of :data:`AT_A_TIME` responses at a time."""
        for asked, batch in answers(config, policy, task, sampler, place, starts, sampled=sampled):
            samples = (asked.prompts, texts_of(policy, batch), drawn_of(batch))
            rewards = task.reward(*samples).tolist()
            gold = () if task.gold is None else task.gold(*samples).tolist()
            yield Scores(
                rewards, gold, kls=() if both is None else measured(*both, batch, REFERENCE_KLS)
            )

    how = f"sampled at temperature {temperature:g}" if sampled else "greedy"
    return evaluation(scores(), LANGUAGE, how, starts)


def answers(
    config: LanguageConfig,
    policy: Policy,
    task: Task,
    sampler: CacheSampler,
    place: range,
    starts: Starts,
    *,
    sampled: bool,
) -> Iterator[tuple[PromptBatch, TensorDict]]:
    """The prompts at these places, :data:`AT_A_TIME`, and a response to each."""
    limit = prompt_limit(policy.causal.context, config.collector.max_new_tokens)
    prompts = task.stream(policy.causal.tokenizer, limit, "eval")
    prompts.served = place.start
    decoding, sampler = decoding_of(config, greedy=not sampled), sampler.without_states()
    generator = torch.Generator(model_device(policy.model))
    generator.manual_seed(derived_seed(starts.seed, starts.use))
    for begin in range(0, len(place), AT_A_TIME):
        asked = prompts.take(min(AT_A_TIME, len(place) - begin))
        yield asked, respond(sampler, asked, 1, decoding, generator)


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
    reference = None
    if config.has_reference:
        try:
            base = config.actor.model
            reference = trained_reference(folder, which, policy, base, str(device))
        except ConfigError as error:
            warn(f"no KL to the reference: {error}")
    return evaluate_policy(
        config,
        policy,
        task,
        settled_sampler(config, policy, task),
        starts=starts,
        size=size,
        sampled=sampled,
        chosen=chosen,
        reference=reference,
    )


def longest_episode(config: LanguageConfig) -> int:
    """A response is one sample."""
    return 1


def distances(
    parties: Parties, config: LanguageConfig, *, starts: Starts, size: Size, device: torch.device
) -> tuple[Iterator[Visited], list[str]]:
    """What :func:`klrl.train.policy_kl.kl_between` asks of language.

    ``config`` names the task; both policies are taken at its temperature.
    """
    task, temperature = make_task(config.env, config.seed), config.collector.temperature
    load = partial(trained_policy, which=parties.which, device=str(device))
    policy = policy_of_run(parties, config, load)
    known = {parties.run: policy}
    if parties.other is None:
        on = config if parties.on == parties.run else language_config(parties.run)
        base = on.actor.model
        other = scored_by_reference(
            trained_reference(parties.run, parties.which, policy, base, str(device)), temperature
        )
    else:
        known[parties.other] = other_policy(parties.other, config, load, device)
        other = scored_by(known[parties.other], temperature)
    if parties.on not in known:
        known[parties.on] = load(parties.on, setting="--on")
    for path, each in known.items():
        if each.causal.tokenizer.get_vocab() != policy.causal.tokenizer.get_vocab():
            raise ConfigError(
                f"{path}: its tokens are not those of {parties.run}; compare policies with the "
                "same tokenizer"
            )
    player = known[parties.on]
    sampler = settled_sampler(config, player, task)
    place = places(starts, size.episodes, task.evaluations)
    answered = answers(config, player, task, sampler, place, starts, sampled=True)
    both = scored_by(policy, temperature), other
    visited = (Visited(measured(*both, batch, MEASURED)) for _, batch in answered)
    notes = [] if temperature == 1 else [f"of softmax(logits / {temperature:g}), as they sample"]
    return visited, notes


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
