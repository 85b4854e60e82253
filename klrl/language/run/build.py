"""Builds the parts of a language run, a function each; :class:`LanguageParts` calls them in order.

The order is part of a run's numbers: ``make_policy`` seeds torch, and new adapters draw first.
``make_weights`` reads ``actor.init`` before ``make_reference`` copies the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tensordict import TensorDictBase

from klrl.base.errors import ConfigError, RewardError
from klrl.base.seeds import derived_seed, generators_kept, seed_generators
from klrl.config import GroupConfig, LanguageConfig, LegacyKLConfig, factory
from klrl.kl.charge import ReferenceKL
from klrl.kl.reference import ReferenceRule
from klrl.language.data import tasks
from klrl.language.data.prompts import PromptBatch, PromptStream
from klrl.language.data.tasks import Task
from klrl.language.model import pretrained
from klrl.language.run.advantage import Advantage
from klrl.language.run.answers import answer_ids, answered
from klrl.language.run.kl import Reference, checkpointed
from klrl.language.run.load import BaseDigest, Policy, Weights, load_reference
from klrl.language.run.preflight import PROMPTS, preflight_checks
from klrl.language.run.rollout import exact_every, extras_of, texts_of
from klrl.language.run.sampler import CacheSampler
from klrl.language.run.scoring import ScoringLayout
from klrl.language.run.update import LanguageSteps
from klrl.runs.checkpoint import load_component
from klrl.runs.find import find_run
from klrl.runs.machine import device_of
from klrl.train.learner import Learner

Say = Callable[[str], None]


def make_task(config: LanguageConfig) -> Task:
    """Make the task: prompts and rewards."""
    return tasks.make_task(config.env, config.seed)


def make_policy(config: LanguageConfig, task: Task, say: Say) -> Policy:
    """Seed torch, then load the model, with any new adapters and value head."""
    seed_generators(derived_seed(config.seed, "torch"))
    return factory("actor", config.actor, config.domain)(config, chat=task.chat, say=say)


def make_weights(
    config: LanguageConfig, policy: Policy, rule: ReferenceRule, *, fresh: bool
) -> Weights:
    """Return the weights that checkpoints contain; in a fresh run, load those of ``actor.init``."""
    # A checkpoint depends on the base weights if it contains only adapters, or if the reference is
    # made from the base weights.
    needed = config.actor.lora.r or (config.has_reference and not checkpointed(rule, config))
    base = BaseDigest(policy.model, config.actor.model) if needed else None
    weights = Weights(policy.model, policy.value_head, base=base)
    if config.actor.init is not None and fresh:
        run, which = find_run(config.actor.init, "actor.init"), config.actor.init_which
        load_component(run, which, "agent", weights, device_of(config.device))
    return weights


def make_reference(
    config: LanguageConfig,
    policy: Policy,
    rule: ReferenceRule,
    described: Mapping[str, Any] | None,
) -> Reference | None:
    """Make pi_ref; None for ``kl=none``.

    On resume, ``described`` is the manifest's description of a reference that is another run's
    policy or another model.
    """
    if not config.has_reference:
        return None
    load = partial(load_reference, config, policy, described)
    return Reference.start(rule, policy.model, load, checkpointed=checkpointed(rule, config))


def make_kl(
    config: LanguageConfig, policy: Policy, reference: Reference | None
) -> ReferenceKL | None:
    """Make KL(policy||reference), charged in TorchRL's environment if ``kl.apply=step``."""
    kl: ReferenceKL | None = factory("kl", config.kl, config.domain)(config.kl)
    if isinstance(config.kl, LegacyKLConfig) and config.kl.apply == "step":
        from klrl.language.run.chat import in_environment

        assert kl is not None
        assert reference is not None
        return in_environment(kl, config, policy, reference)
    return kl


def make_prompts(config: LanguageConfig, task: Task, policy: Policy) -> PromptStream:
    """Return the stream of training prompts, after a check of all prompts of a file."""
    tokenizer = policy.causal.tokenizer
    limit = policy.causal.prompt_limit(config.collector.max_new_tokens)
    task.check(tokenizer, limit)
    if config.collector.imitates:
        answer_ids(task.checked, policy, config)
    return task.stream(tokenizer, limit)


def preflight(
    config: LanguageConfig,
    task: Task,
    policy: Policy,
    reference: Reference | None,
    sampler: CacheSampler,
    say: Say,
    *,
    before: Mapping[str, Any] | None,
) -> tuple[ScoringLayout, ScoringLayout, list[str]]:
    """Run the preflight on a few prompts; see :func:`preflight_checks` for what it returns.

    On resume, ``before`` is the run's manifest; its entry ``scoring`` is the layout of the run.
    """
    if sum(p.nbytes for p in policy.model.parameters()) > pretrained.LARGE:
        say("preflight: testing the run's ways to sample and score on a few responses")
    limit = policy.causal.prompt_limit(config.collector.max_new_tokens)
    few = task.trial_batch(policy.causal.tokenizer, limit, PROMPTS)
    score = partial(_try_rewards, config, task, policy, few)
    shared = {"shared": True, "packed": False}.get((before or {}).get("scoring", ""))
    parts = (config, policy, reference, sampler, few, score)
    return preflight_checks(*parts, fresh=before is None, shared_before=shared)


def _try_rewards(
    config: LanguageConfig, task: Task, policy: Policy, few: PromptBatch, batch: TensorDictBase
) -> None:
    """Refuse reward functions that fail on a few samples, before anything is written."""
    if config.collector.imitates:  # it scores the data's answers
        batch = answered(policy, few, config)
    prompts = [each for each in few.prompts for _ in range(len(batch) // len(few.prompts))]
    samples = (prompts, texts_of(policy, batch), extras_of(batch))
    try:
        with generators_kept():
            task.reward(*samples)
    except RewardError as error:
        raise ConfigError(f"{error}; fix it, or choose another env.reward") from error


def make_advantage(
    config: LanguageConfig, policy: Policy, kl: ReferenceKL | None
) -> tuple[Advantage, list[str]]:
    """Make the estimator of advantages; with a line if a custom loss gets advantages of 0."""
    notes = []
    if (
        config.loss.name == "custom"
        and config.collector.imitates
        and isinstance(config.advantage, GroupConfig)
    ):
        zero = "a row has one answer, so advantage=group gives 0; advantage=gae does not"
        notes.append(f"loss=custom: {zero}")
    return factory("advantage", config.advantage, config.domain)(config, policy, kl), notes


def exact_notes(config: LanguageConfig, kl_old: str) -> list[str]:
    """Return a line about rows without exact KLs (``kl.exact``), if there are any.

    Raises:
        ConfigError: ``kl_old`` of a custom loss is exact, which reads the hidden states.
    """
    every = exact_every(config)
    if config.loss.name == "custom" and kl_old == "exact" and config.kl.exact != "always":
        told = "the kl_old of loss=custom is exact, which reads pi_old's hidden states"
        raise ConfigError(f"kl.exact={config.kl.exact}: {told}; use kl.exact=always")
    if every == 1:
        return []
    told = "rows have kl/ref/k3 and kl/old/k3, which controller, loss.target_kl and loss.beta read"
    some = f"rows {every}, {2 * every}, ... also exact KLs" if every else "no row has exact KLs"
    return [f"kl.exact={config.kl.exact}: {told}; {some}"]


def make_learner(config: LanguageConfig, steps: LanguageSteps) -> Learner:
    """Make the learner of these gradient steps."""
    learner: Learner = factory("learner", config.learner, config.domain)(config, steps)
    return learner
