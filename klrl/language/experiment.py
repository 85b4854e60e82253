"""The parts of a language run; the algorithm is :meth:`klrl.training.Training.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from klrl.checkpoint import Checkpoints, Counters, load_component
from klrl.config import LanguageConfig
from klrl.kl.controllers import make_controller
from klrl.kl.reference import make_reference_rule
from klrl.language.advantage import make_token_advantage
from klrl.language.causal_lm import head
from klrl.language.charge import annotate, charge, make_token_kl, measure
from klrl.language.evaluate import evaluate_language
from klrl.language.learner import LanguageLearner
from klrl.language.load import prompt_limit
from klrl.language.policy import make_policy
from klrl.language.record import language_row, shown_samples
from klrl.language.reference import AdapterOff, checkpointed, make_reference, needs_base
from klrl.language.rollout import REF_STATES, STATES, PromptRollout, make_sampler
from klrl.language.start import PROMPTS, look
from klrl.language.tasks import make_task
from klrl.language.vocabulary import NextTokens
from klrl.language.weights import Weights, base_digest
from klrl.metrics import Row
from klrl.models.actor import device_of
from klrl.preflight import find_run
from klrl.progress import Progress
from klrl.run_folder import RunFolder
from klrl.seeds import derived_seed
from klrl.training import Training


class LanguageExperiment(Training):
    """Everything that one language run needs, built from its settings and looked at.

    Args:
        config: the job.
        before: on resume, the run's manifest: what a reference from another run was. Weights will
            come from the run's own checkpoint, not ``actor.init``.

    Raises:
        ConfigError: a model, a reference, the prompts or the reward cannot be used, or a check of
            the preflight failed; nothing was recorded.
    """

    config: LanguageConfig
    row_of = staticmethod(language_row)

    def __init__(self, config: LanguageConfig, before: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.device = device_of(config.device)
        self.counters = Counters()
        self.task = make_task(config.env, config.seed)
        torch.manual_seed(derived_seed(config.seed, "torch"))
        self.policy = make_policy(config, chat=self.task.chat)
        longest, setting = config.collector.max_new_tokens, "collector.max_new_tokens"
        self.limit = prompt_limit(self.policy.causal.context, longest, setting)
        self.task.check(self.policy.causal.tokenizer, self.limit)
        self.prompts = self.task.stream(self.policy.causal.tokenizer, self.limit)
        base = base_digest(self.policy.model, config.actor.model) if needs_base(config) else None
        self.weights = Weights(self.policy.model, self.policy.value_head, base=base)
        if config.actor.init is not None and before is None:
            run = find_run(config.actor.init, "actor.init")
            load_component(run, "last", "agent", self.weights, self.device)
        described = before.get("reference") if before else None
        self.reference, self.described = make_reference(config, self.policy, described)
        self.reference_rule = make_reference_rule(config.reference)
        self.sampler = make_sampler(config, self.policy)
        few = self.task.stream(self.policy.causal.tokenizer, self.limit).take(PROMPTS)
        fresh = before is None
        self.ways = look(config, self.policy, self.reference, self.sampler, few, fresh=fresh)
        self.kl = make_token_kl(config.kl)
        coef = 0.0 if self.kl is None else self.kl.coef
        self.controller = make_controller(config.controller, coef, config.frames)
        self.estimate_advantage = make_token_advantage(config, self.policy, self.kl)
        charged = None if self.kl is None else self.kl.loss_estimator
        self.learner = LanguageLearner(
            config, self.policy, self.ways.policy, self.reference, charged
        )

    # ------------------------------------------------------------------------------ the steps

    def charge_kl(self, batch: TensorDictBase) -> dict[str, torch.Tensor]:
        """Score the reference once, measure the KL, charge the reward of every token."""
        measured = {}
        if self.reference is not None:
            temperature = self.config.collector.temperature
            at_a_time = self.learner.prompts_at_a_time
            states = self.reference.states(batch, self.ways.reference, at_a_time)
            batch[REF_STATES] = states
            policy = NextTokens(batch[STATES], head(self.policy.model), temperature)
            annotate(batch, policy, self.reference.next_tokens(states, temperature))
            measured = measure(batch)
        charge(batch, self.kl)
        return measured

    def move_reference(self) -> None:
        """The anchor after this iteration, by its rule."""
        if self.reference is not None and not isinstance(self.reference, AdapterOff):
            iteration = self.counters.iteration
            self.reference_rule.update(self.reference.model, self.policy.model, iteration)

    def evaluation(self) -> Row:
        """Greedy responses to the evaluation split."""
        config = self.config
        found = evaluate_language(
            config, self.policy, self.task, episodes=config.eval.episodes, limit=self.limit
        )
        return found.row

    def pick_samples(self, batch: TensorDictBase) -> Sequence[Mapping[str, Any]]:
        """Some responses: of the first iteration, then every ``collector.samples_every``."""
        every, iteration = self.config.collector.samples_every, self.counters.iteration
        if every == 0 or (iteration % every and iteration != 1):
            return ()
        count, tokenizer = self.config.collector.samples_count, self.policy.causal.tokenizer
        return shown_samples(self.counters, batch, self.rollout, tokenizer, count)

    def _say_where_it_starts(self, progress: Progress, resume: bool) -> None:
        for line in self.ways.lines:
            progress.say(line)
        super()._say_where_it_starts(progress, resume)

    def reference_bytes(self) -> int:
        """0 with ``reference=adapter_off``."""
        return 0 if self.reference is None else self.reference.bytes

    # --------------------------------------------------------------------------------- parts

    def _make_rollout(self, say: Callable[[str], None] = print) -> PromptRollout:
        def seed_at(iteration: int) -> int:
            return derived_seed(self.config.seed, "sample", iteration)

        self.rollout = PromptRollout(
            self.config,
            self.policy,
            self.sampler,
            self.task,
            self.prompts,
            seed_at,
            self.counters.iteration,
        )
        return self.rollout

    def _checkpoints(self, files: RunFolder) -> Checkpoints:
        components: dict[str, Any] = {
            "agent": self.weights,
            "optimizer": self.learner.optimizer,
            "prompts": self.prompts,
            "counters": self.counters,
            "controller": self.controller,
            "beta": self.learner.beta_rule,
        }
        if self.reference is not None and checkpointed(self.config):
            components["reference"] = Weights(self.reference.model, whole=True)
        return Checkpoints(files.checkpoints, components)
