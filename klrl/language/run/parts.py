"""The parts of a language run; the algorithm is :meth:`klrl.train.loop.Training.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from klrl.config import LanguageConfig, factory
from klrl.language.data.batch import (
    LOG_PROBS,
    REF_LOG_PROBS,
    SAMPLER_LOG_PROBS,
    response_mask,
    response_part,
)
from klrl.language.model.causal_lm import head, in_low_precision
from klrl.language.model.vocabulary import NextTokens, States
from klrl.language.run import build
from klrl.language.run.answers import held_out
from klrl.language.run.evaluate import Player, places
from klrl.language.run.kl import (
    DIVERGENCE,
    EXACT,
    FORWARD,
    Reference,
    annotate,
    charge,
    measure,
)
from klrl.language.run.load import Weights, within_contexts
from klrl.language.run.record import ShownSamples, rewards_of
from klrl.language.run.rollout import (
    REF_STATES,
    SAMPLER_STATES,
    STATES,
    PromptRollout,
    exact_every,
    learns_from_states,
    make_sampler,
    rescore,
    rounding,
)
from klrl.language.run.shares import own_rows, share
from klrl.language.run.stale import (
    SAMPLER_KL,
    StaleResponses,
    kl_to,
    room,
    sampler_row,
)
from klrl.language.run.update import LanguageSteps, prompts_at_a_time
from klrl.runs.machine import device_of
from klrl.runs.metrics import Row
from klrl.train.callbacks import Callback
from klrl.train.loop import Parts, Rewards
from klrl.train.scores import CLOSING, IN_RUN, Evaluation, Size, Starts

_say = partial(print, flush=True)
#: The entries that each process of torchrun adds to its own rows, [B, P + R] or [B, R].
_GATHERED = (
    *(LOG_PROBS, SAMPLER_LOG_PROBS, SAMPLER_KL),
    *(REF_LOG_PROBS, EXACT, FORWARD, DIVERGENCE),
)


class LanguageParts(Parts):
    """Everything that one language run needs, built from its settings and checked.

    ``before``: on resume, the run's manifest; see :class:`klrl.train.loop.Training`.
    """

    reference: Reference | None
    #: Metrics of the last rollout's sampler, if any: :func:`sampler_row` or :func:`rescore`.
    _rounding: Mapping[str, float] = {}
    longest_episode = 1  # a response is one sample

    def __init__(self, config: LanguageConfig, before: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, device_of(config.device))
        rule, fresh = self.reference_rule, before is None
        described = (before or {}).get("reference")
        self.config, self.exact_kl = config, exact_every(config) == 1
        self.task = build.make_task(config)
        self.policy = build.make_policy(config, self.task, _say)
        self.weights = build.make_weights(config, self.policy, rule, fresh=fresh)
        self.reference = build.make_reference(config, self.policy, rule, described)
        if self.reference is not None:
            self.policy = within_contexts(self.policy, self.reference.module)
        self.prompts = build.make_prompts(config, self.task, self.policy)
        if n := self.task.evaluations:
            self.starts = len(places(IN_RUN, n, n)), len(places(CLOSING, n, n))
        self.kl = build.make_kl(config, self.policy, self.reference)
        self.sampler = make_sampler(self.policy)
        self.stale = StaleResponses(self.policy.model, config.collector)
        self.layout, self.reference_layout, lines = build.preflight(
            *(config, self.task, self.policy, self.reference, self.sampler, _say), before=before
        )
        self.estimate_advantage, zero = build.make_advantage(config, self.policy, self.kl)
        self.preflight = [*self.task.notes, *lines, *zero, *room(config, self.policy)]
        self.steps = LanguageSteps(config, self.policy, self.layout, self.reference, self.kl)
        self.preflight += build.exact_notes(config, self.steps.loss.kl_old)
        self.learner = build.make_learner(config, self.steps)

    # ------------------------------------------------------------------------------ the steps

    def charge_kl(self, batch: TensorDictBase) -> dict[str, torch.Tensor]:
        """Compute pi_ref's log-probs and the KL of a rollout; write every token's reward."""
        own, config, mask = own_rows(batch, [STATES]), self.config, response_mask(batch)
        sampled, measured = response_part(batch, LOG_PROBS), {}
        exact = own.get(STATES, None) is not None  # else kl.exact has let them go
        scored = in_low_precision(self.policy.model) or config.sampled_elsewhere
        if config.reads_sampler:
            own[SAMPLER_LOG_PROBS] = own[LOG_PROBS]
            own.update({SAMPLER_STATES: own[STATES]} if exact else {})
        if scored:
            how = prompts_at_a_time(config), config.collector.temperature
            rescore(own, self.policy.model, self.layout, *how, keep=exact)
        if config.reads_sampler and exact:
            self._compare_sampler(own)
        if self.reference is not None:
            self._annotate(own)
        share(batch, own, _GATHERED)
        if config.reads_sampler:
            self._rounding = sampler_row(batch, self.stale.lag)
        elif scored:
            self._rounding = rounding(sampled, response_part(batch, LOG_PROBS), mask)
        if self.reference is not None:
            measured = measure(batch)
        charge(batch, self.kl, corrected=config.corrects_sampler)
        if config.kl.exact == "charged" and not learns_from_states(config):
            own.pop(STATES, None)
        return measured

    def _compare_sampler(self, own: TensorDictBase) -> None:
        """Measure this process's responses by KL(mu||policy); mu is the policy that sampled."""
        temperature, now = self.config.collector.temperature, head(self.policy.model)
        mu = NextTokens(own[SAMPLER_STATES], self.stale.head or now, temperature)
        own[SAMPLER_KL] = kl_to(mu, NextTokens(own[STATES], now, temperature), own)
        self.steps.sampler_head = self.stale.head
        if not self.steps.exact_measure:
            del own[SAMPLER_STATES]

    def _annotate(self, own: TensorDictBase) -> None:
        """Score this process's responses by the reference, and measure their KL."""
        assert self.reference is not None
        assert self.kl is not None
        temperature, at_a_time = self.config.collector.temperature, prompts_at_a_time(self.config)
        states: States = self.reference.states(own, self.reference_layout, at_a_time)
        if self.steps.loss.reference_estimator == "exact":
            states = own[REF_STATES] = torch.cat([*states])
        old, policy = own.get(STATES, None), None
        if old is not None:
            policy = NextTokens(old, head(self.policy.model), temperature)
        reference = self.reference.next_tokens(states, temperature)
        annotate(own, policy, reference, self.kl.divergence)

    @property
    def actor(self) -> nn.Module:
        """The model that is trained."""
        return self.policy.model

    def rewards(self, batch: TensorDictBase) -> Rewards:
        """Summarise the rewards of a charged rollout for the metrics."""
        rewards = rewards_of(batch, self.kl, self.config.collector.group_size)
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

    def rollout(
        self, iteration: int, say: Callable[[str], None] = print
    ) -> PromptRollout | StaleResponses:
        """Make the collector; its first rollout is that of iteration ``iteration``."""
        make_rollout = factory("collector", self.config.collector, self.config.domain)
        if self.kl is not None and self.kl.online:
            from klrl.language.run.chat import ChatRollout

            make_rollout = partial(ChatRollout, transform=self.kl.transform)
        self.collector: PromptRollout = make_rollout(
            self.config, self.policy, self.sampler, self.task, self.prompts, iteration
        )
        self.collector.phase = self.phase
        if not self.config.sampled_elsewhere:
            return self.collector
        self.stale.rollout, self.stale.updates = self.collector, iteration
        self.collector.iteration += len(self.stale.waiting)
        return self.stale

    @property
    def collecting(self) -> str:
        """The collector's name, and TorchRL's ChatEnv if it charges the KL."""
        online = self.kl is not None and self.kl.online
        return f"collector={self.config.collector.name}" + ", TorchRL's ChatEnv" * online

    @property
    def resume(self) -> dict[str, str]:
        """The manifest's entries for a resume, with the layout in which the policy scores."""
        return super().resume | {"scoring": "shared" if self.layout.shared else "packed"}

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
        if self.config.collector.staleness:
            components["rollouts"] = self.stale
        if self.reference is not None and self.reference.checkpointed:
            components["reference"] = Weights(self.reference.module, whole=True)
        return components
