"""Builds what :meth:`klrl.train.loop.Training.train` needs for a language run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from klrl.base.errors import ConfigError, RewardError
from klrl.base.seeds import derived_seed, generators_kept, seed_generators
from klrl.config import GroupConfig, LanguageConfig, LegacyKLConfig, factory
from klrl.language.data.prompts import PromptBatch
from klrl.language.data.tasks import make_task
from klrl.language.model import pretrained as model
from klrl.language.model.causal_lm import head, in_low_precision
from klrl.language.model.vocabulary import NextTokens
from klrl.language.run.answers import answer_ids, answered, held_out
from klrl.language.run.checks import PROMPTS, preflight_checks
from klrl.language.run.evaluate import Player, places
from klrl.language.run.kl import (
    Reference,
    annotate,
    charge,
    checkpointed,
    measure,
)
from klrl.language.run.load import BaseDigest, Weights, load_reference, within_contexts
from klrl.language.run.record import ShownSamples, rewards_of
from klrl.language.run.rollout import (
    REF_STATES,
    STATES,
    PromptRollout,
    extras_of,
    make_sampler,
    rescore,
    texts_of,
)
from klrl.language.run.update import LanguageSteps, prompts_at_a_time
from klrl.runs.checkpoint import load_component
from klrl.runs.find import find_run
from klrl.runs.machine import device_of
from klrl.runs.metrics import Row
from klrl.train.callbacks import Callback
from klrl.train.learner import Learner
from klrl.train.loop import Parts, Rewards
from klrl.train.scores import CLOSING, IN_RUN, Evaluation, Size, Starts

_say = partial(print, flush=True)


class LanguageParts(Parts):
    """Everything that one language run needs, built from its settings and checked.

    Args:
        config: the job.
        before: on resume, the run's manifest; see :class:`klrl.train.loop.Training`.
    """

    reference: Reference | None
    #: Metrics that :func:`rescore` returned for the last rollout; empty if it was not called.
    _rounding: Mapping[str, float] = {}
    longest_episode = 1  # a response is one sample

    def __init__(self, config: LanguageConfig, before: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, device_of(config.device))
        self.config = config
        self.task = make_task(config.env, config.seed)
        seed_generators(derived_seed(config.seed, "torch"))
        make_policy = factory("actor", config.actor, config.domain)
        self.policy = make_policy(config, chat=self.task.chat, say=_say)
        self.kl = factory("kl", config.kl, config.domain)(config.kl)
        kept = checkpointed(self.reference_rule, config)
        # A checkpoint depends on the base weights if it contains only adapters, or if the reference
        # is made from the base weights.
        needed = config.actor.lora.r or (self.kl is not None and not kept)
        base = BaseDigest(self.policy.model, config.actor.model) if needed else None
        self.weights = Weights(self.policy.model, self.policy.value_head, base=base)
        if config.actor.init is not None and before is None:
            run = find_run(config.actor.init, "actor.init")
            load_component(run, config.actor.init_which, "agent", self.weights, self.device)
        # The manifest describes a reference that is another run's policy or another model.
        described = before.get("reference") if before else None
        self.reference = None
        if self.kl is not None:
            self.reference = Reference.start(
                self.reference_rule,
                self.policy.model,
                lambda: load_reference(config, self.policy, described),
                checkpointed=kept,
            )
            self.policy = within_contexts(self.policy, self.reference.module)
        tokenizer = self.policy.causal.tokenizer
        limit = self.policy.causal.prompt_limit(config.collector.max_new_tokens)
        notes = self.task.check(tokenizer, limit)
        if config.collector.imitates:
            answer_ids(self.task.checked, self.policy, config)
        self.prompts = self.task.stream(tokenizer, limit)
        if n := self.task.evaluations:
            self.starts = len(places(IN_RUN, n, n)), len(places(CLOSING, n, n))
        if isinstance(config.kl, LegacyKLConfig) and config.kl.apply == "step":
            from klrl.language.run.chat import in_environment

            assert self.kl is not None
            assert self.reference is not None
            self.kl = in_environment(self.kl, config, self.policy, self.reference)
        self.sampler = make_sampler(self.policy)
        if sum(p.nbytes for p in self.policy.model.parameters()) > model.LARGE:
            _say("preflight: testing the run's ways to sample and score on a few responses")
        few = self.task.trial_batch(tokenizer, limit, PROMPTS)
        self.layout, self.reference_layout, self.preflight = preflight_checks(
            *(config, self.policy, self.reference, self.sampler, few),
            partial(self._try_rewards, few),
            fresh=before is None,
        )
        self.preflight = [*self.task.notes, *notes, *self.preflight, *_zero_advantages(config)]
        self.estimate_advantage = factory("advantage", config.advantage, config.domain)(
            config, self.policy, self.kl
        )
        steps = LanguageSteps(config, self.policy, self.layout, self.reference, self.kl)
        self.learner: Learner = factory("learner", config.learner, config.domain)(config, steps)

    def _try_rewards(self, few: PromptBatch, batch: TensorDictBase) -> None:
        """Refuse reward functions that fail on a few samples, before anything is written."""
        if self.config.collector.imitates:  # it scores the data's answers
            batch = answered(self.policy, few, self.config)
        prompts = [each for each in few.prompts for _ in range(len(batch) // len(few.prompts))]
        samples = (prompts, texts_of(self.policy, batch), extras_of(batch))
        try:
            with generators_kept():
                self.task.reward(*samples)
        except RewardError as error:
            raise ConfigError(f"{error}; fix it, or choose another env.reward") from error

    # ------------------------------------------------------------------------------ the steps

    def charge_kl(self, batch: TensorDictBase) -> dict[str, torch.Tensor]:
        """Compute pi_ref's log-probs and the KL of a rollout; write every token's reward."""
        measured, model = {}, self.policy.model
        temperature, at_a_time = self.config.collector.temperature, prompts_at_a_time(self.config)
        if in_low_precision(model):
            self._rounding = rescore(batch, model, self.layout, at_a_time, temperature)
        if self.reference is not None:
            states = self.reference.states(batch, self.reference_layout, at_a_time)
            batch[REF_STATES] = states
            policy = NextTokens(batch[STATES], head(model), temperature)
            assert self.kl is not None
            reference = self.reference.next_tokens(states, temperature)
            annotate(batch, policy, reference, self.kl.divergence)
            measured = measure(batch)
        charge(batch, self.kl)
        return measured

    @property
    def actor(self) -> nn.Module:
        """The model that is trained."""
        return self.policy.model

    def rewards(self, batch: TensorDictBase) -> Rewards:
        """Summarise the rewards of a charged rollout for the metrics."""
        rewards = rewards_of(batch, self.kl)
        if self.config.collector.imitates:  # the responses come from the data, not from the policy
            return replace(rewards, own={})
        return replace(rewards, own={**rewards.own, **self._rounding})

    def held_out(self) -> Row:
        """Measure the evaluation answers' negative log-likelihood, if the run imitates answers."""
        imitates = self.config.collector.imitates
        return held_out(self.policy, self.task, self.config) if imitates else {}

    def evaluation(self, starts: Starts, size: Size) -> Evaluation:
        """Evaluate the policy on prompts of the evaluation split."""
        player = Player(self.config, self.policy, self.task, self.sampler)
        sampled = self.config.eval.sampled
        return player.evaluate(starts, size, sampled=sampled, reference=self.reference)

    def callbacks(self) -> Sequence[Callback]:
        """Return the callback that records some responses as samples."""
        return (ShownSamples(self.config),)

    # --------------------------------------------------------------------------------- parts

    def rollout(self, iteration: int, say: Callable[[str], None] = print) -> PromptRollout:
        """Make the collector; its first rollout is that of iteration ``iteration``."""
        make_rollout = factory("collector", self.config.collector, self.config.domain)
        if self.kl is not None and self.kl.online:
            from klrl.language.run.chat import ChatRollout

            make_rollout = partial(ChatRollout, transform=self.kl.transform)
        self.collector: PromptRollout = make_rollout(
            self.config, self.policy, self.sampler, self.task, self.prompts, iteration
        )
        self.collector.phase = self.phase
        return self.collector

    @property
    def collecting(self) -> str:
        """The collector's name, and TorchRL's ChatEnv if it charges the KL."""
        online = self.kl is not None and self.kl.online
        return f"collector={self.config.collector.name}" + ", TorchRL's ChatEnv" * online

    @property
    def built(self) -> Sequence[object]:
        """The collector's TorchRL objects, if any, and the transforms that charge the KL."""
        return (*self.collector.built, *super().built)

    def components(self) -> dict[str, Any]:
        """Return name -> object to checkpoint."""
        components: dict[str, Any] = {
            "agent": self.weights,
            "optimizer": self.learner.steps.optimizer,
            "prompts": self.prompts,
        }
        if self.reference is not None and self.reference.checkpointed:
            components["reference"] = Weights(self.reference.module, whole=True)
        return components


def _zero_advantages(config: LanguageConfig) -> list[str]:
    """Return a line if a custom loss imitates with advantages that are all 0; else []."""
    own = config.loss.name == "custom" and config.collector.imitates
    if not own or not isinstance(config.advantage, GroupConfig):
        return []
    zero = "a row has one answer, so advantage=group gives 0; advantage=gae does not"
    return [f"loss=custom: {zero}"]
