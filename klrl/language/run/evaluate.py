"""Evaluates a language policy with one response per prompt; measures KLs between two policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from klrl.base.errors import ConfigError
from klrl.base.seeds import derived_seed
from klrl.base.text import warn
from klrl.config import LanguageConfig, OwnPart, factory
from klrl.domains import LANGUAGE
from klrl.kl.divergences import MEASURED
from klrl.kl.reference import NO_ADAPTERS
from klrl.language.data.batch import response_mask
from klrl.language.data.prompts import PromptBatch
from klrl.language.data.tasks import Task, evaluated_on, make_task
from klrl.language.model.causal_lm import head, model_device
from klrl.language.model.vocabulary import Against, NextTokens, token_measures
from klrl.language.run.kl import Reference, checkpointed
from klrl.language.run.load import (
    BaseDigest,
    Policy,
    Weights,
    check_base,
    language_config,
    make_policy,
    network_of_reference,
    of_model,
    require_same_tokens,
    trained_policy,
    with_model,
    within_contexts,
)
from klrl.language.run.preflight import PROMPTS
from klrl.language.run.rollout import decoding_of, extras_of, make_sampler, respond, texts_of
from klrl.language.run.sampler import CacheSampler
from klrl.language.run.scoring import ScoringLayout
from klrl.runs.checkpoint import load_component
from klrl.runs.find import is_model
from klrl.train.policy_kl import Parties
from klrl.train.scores import (
    CLOSING,
    IN_RUN,
    REFERENCE_KLS,
    Evaluation,
    EvaluationPlan,
    Scores,
    Size,
    Starts,
    evaluation,
)

#: Layout and number of rows per forward in evaluations: each row contains one response.
LAYOUT, ROWS = ScoringLayout(1, False), 32
#: Batch -> the next-token distributions at its response tokens.
Scored: TypeAlias = Callable[[TensorDictBase], NextTokens]
#: Prompts per call of the sampler.
CHUNK = 256
#: Number of prompts reserved for each evaluation of an endless task; no evaluation uses as many.
_APART = 10**9


@dataclass(frozen=True)
class Player:
    """A policy, and the task whose prompts it answers.

    The sampler has passed its self-check, which chose how it computes.
    """

    config: LanguageConfig
    policy: Policy
    task: Task
    sampler: CacheSampler

    @classmethod
    def of_trained(cls, config: LanguageConfig, policy: Policy, task: Task) -> Player:
        """Make a player for a trained policy, with a sampler that has passed its self-check."""
        limit = policy.causal.prompt_limit(config.collector.max_new_tokens)
        few = task.trial_batch(policy.causal.tokenizer, limit, PROMPTS, "eval")
        device, sampler = model_device(policy.model), make_sampler(policy)
        try:
            sampler.self_check(few.ids.to(device), few.mask.to(device), config.collector.group_size)
        except ValueError as error:
            raise ConfigError(f"actor.model={config.actor.model}: {error}") from error
        return cls(config, policy, task, sampler)

    def evaluate(
        self,
        starts: Starts,
        size: Size,
        *,
        sampled: bool = False,
        chosen: bool = False,
        reference: Reference | None = None,
    ) -> Evaluation:
        """Answer prompts of the evaluation split, each once, and score the responses.

        ``starts`` selects the prompts, see :func:`places`, and seeds the samples. ``sampled``: draw
        tokens as in training; else take the likeliest. ``chosen``: evaluations during the run
        selected the policy, so omit their prompts. With a ``reference``, reverse and forward KL to
        it are measured at the response tokens.
        """
        asked_for = size.episodes if size.steps is None else min(size.episodes, size.steps)
        place = places(starts, asked_for, self.task.evaluations, chosen)
        task, temperature = self.task, self.config.collector.temperature
        own = scored_by(self.policy, temperature)
        other = None if reference is None else scored_by_reference(reference, temperature)

        def scores() -> Iterator[Scores]:
            for asked, batch in self.answers(place, starts, sampled=sampled):
                samples = (asked.prompts, texts_of(self.policy, batch), extras_of(batch))
                rewards = task.reward(*samples).tolist()
                gold = () if task.gold is None else task.gold(*samples).tolist()
                kls = () if other is None else measured(own, other, batch, REFERENCE_KLS)
                yield Scores(rewards, gold, kls=kls)

        how = f"sampled at temperature {temperature:g}" if sampled else "greedy"
        return evaluation(scores(), LANGUAGE, how, starts)

    def answers(
        self, place: range, starts: Starts, *, sampled: bool
    ) -> Iterator[tuple[PromptBatch, TensorDict]]:
        """Yield at most :data:`CHUNK` prompts at a time, and a batch with one response to each."""
        causal, config = self.policy.causal, self.config
        limit = causal.prompt_limit(config.collector.max_new_tokens)
        prompts = self.task.stream(causal.tokenizer, limit, "eval")
        prompts.served = place.start
        decoding, sampler = decoding_of(config, greedy=not sampled), self.sampler.without_states()
        seed = derived_seed(starts.seed, starts.use)
        for begin in range(0, len(place), CHUNK):
            asked = prompts.take(min(CHUNK, len(place) - begin))
            yield asked, respond(sampler, asked, 1, decoding, seed, begin)


def places(starts: Starts, count: int, among: int | None, chosen: bool = False) -> range:
    """Return the indices of an evaluation's prompts.

    Evaluations during a run use the first half of a file, the closing evaluation the second half.
    ``klrl evaluate`` uses the whole file for every seed; for the best checkpoint on the run's own
    file only the second half, since the first half selected that checkpoint. If the file has only
    one prompt, all evaluations use it.

    ``among``: number of prompts in the file; None for an endless task. ``chosen``: whether
    evaluations on the first half selected the policy.
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
    folder: Path, config: LanguageConfig, plan: EvaluationPlan, which: str
) -> Evaluation:
    """Implement :func:`klrl.train.evaluate.evaluate_run` for language runs.

    ``config`` gives the task, and the current folder of the base model.
    """
    task, stored = make_task(config.env, config.seed), language_config(folder)
    check_base(config, "actor.model=FOLDER")
    base = config.actor.model
    relocated = None if base == stored.actor.model else base
    policy = trained_policy(folder, which, str(plan.device), model=relocated)
    chosen = which == "best" and evaluated_on(config.env) == evaluated_on(stored.env)
    reference = None
    if config.has_reference:
        try:
            reference = trained_reference(folder, which, policy, base, str(plan.device))
        except ConfigError as error:
            warn(f"no KL to the reference: {error}")
        else:
            policy = within_contexts(policy, reference.module)
    player = Player.of_trained(config, policy, task)
    return player.evaluate(
        plan.starts, plan.size, sampled=plan.sampled, chosen=chosen, reference=reference
    )


def longest_episode(config: LanguageConfig) -> int:
    """Return 1: an episode is a response, which counts as one sample."""
    return 1


# ------------------------------------------------------------------- between two policies


def distances(
    parties: Parties, config: LanguageConfig, plan: EvaluationPlan
) -> tuple[Iterator[Scores], list[str]]:
    """Implement :func:`klrl.train.policy_kl.kl_between` for language runs.

    ``config`` gives the task, and the temperature at which both policies are measured.
    """
    assert not isinstance(parties.other, OwnPart)  # OwnPart: control only
    assert isinstance(parties.run, Path)
    assert isinstance(parties.on, Path)
    task, temperature = make_task(config.env, config.seed), config.collector.temperature
    config, base = replace(config, device=str(plan.device)), None
    load = partial(trained_policy, which=parties.which, device=config.device)
    if is_model(parties.run):
        policy = other_policy(parties.run, "RUN", config, load)
    else:
        own = config if parties.on == parties.run else language_config(parties.run, "RUN")
        check_base(own, "actor.model=FOLDER")
        base = own.actor.model
        policy = load(parties.run, setting="RUN", model=base)
    known, scorers = {parties.run: policy}, [policy.model]
    if parties.other is None:
        reference = trained_reference(parties.run, parties.which, policy, base, config.device)
        other = scored_by_reference(reference, temperature)
        scorers.append(reference.module)
    else:
        known[parties.other] = other_policy(parties.other, "other", config, load)
        other = scored_by(known[parties.other], temperature)
        scorers.append(known[parties.other].model)
    if parties.on not in known:
        known[parties.on] = other_policy(parties.on, "on", config, load)
    for path, each in known.items():
        require_same_tokens(str(path), each, "RUN", policy, chat=task.chat)
    player = Player.of_trained(config, within_contexts(known[parties.on], *scorers), task)
    place = places(plan.starts, plan.size.episodes, task.evaluations)
    answered = player.answers(place, plan.starts, sampled=True)
    both = scored_by(policy, temperature), other
    scores = (Scores([], kls=measured(*both, batch, MEASURED)) for _, batch in answered)
    notes = [] if temperature == 1 else [f"both policies are softmax(logits / {temperature:g})"]
    return scores, notes


@torch.no_grad()
def measured(
    policy: Scored, other: Scored, batch: TensorDictBase, names: Sequence[str]
) -> list[dict[str, np.ndarray]]:
    """Return for each response: name of a divergence -> values [T] at its tokens, in nats."""
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    against = Against(other(batch), names)
    _, [compared] = token_measures(policy(batch), tokens, mask, [against])
    table = {
        str(name): each.clamp(min=0).double().cpu() for name, each in compared.divergence.items()
    }
    rows = enumerate(mask.cpu())
    return [{name: each[row][real].numpy() for name, each in table.items()} for row, real in rows]


def scored_by(policy: Policy, temperature: float) -> Scored:
    """Return a function that computes a policy's next-token distributions on batches."""
    own = head(policy.model)
    return lambda batch: NextTokens(
        LAYOUT.rollout_states(policy.model, batch, ROWS), own, temperature
    )


def scored_by_reference(reference: Reference, temperature: float) -> Scored:
    """Return a function that computes a reference's next-token distributions on batches."""
    return lambda batch: reference.next_tokens(reference.states(batch, LAYOUT, ROWS), temperature)


def other_policy(
    path: Path, setting: str, config: LanguageConfig, load: Callable[..., Policy]
) -> Policy:
    """Load the policy of another run, or the model in a folder, at the precision of ``config``."""
    if not is_model(path):
        return load(path, setting=setting, compared_with=config)
    policy = make_policy(of_model(config, str(path)), say=lambda _: None, key=setting)
    policy.model.requires_grad_(False).eval()
    return policy


def trained_reference(
    run: Path, which: str, policy: Policy, model: str | None, device: str
) -> Reference:
    """Load a run's reference from its checkpoint, or make it from the run's base model.

    ``reference=adapter_off`` uses the model of the run's policy. ``model`` is the current folder of
    the run's base model.

    Raises:
        ConfigError: the base model is missing, or its weights have changed since the run started.
    """
    config = replace(with_model(language_config(run, "RUN"), model), device=device)
    rule = factory("reference", config.reference, config.domain)(config.reference)
    if rule.source == NO_ADAPTERS:
        return Reference(rule, policy.model, own=False)
    network = make_policy(network_of_reference(run, config), say=lambda _: None).model
    kept = checkpointed(rule, config)
    # A reference that checkpoints do not store has the base model's weights: compare digests.
    weights = Weights(network, whole=True) if kept else BaseDigest(network, model)
    component = "reference" if kept else "agent"
    load_component(run, which, component, weights, torch.device(device), say=lambda _: None)
    return Reference(rule, network)
