"""The parts of a control run; the algorithm is :meth:`klrl.train.loop.Training.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torchrl.envs import EnvBase

from klrl.base.seeds import derived_seed
from klrl.config import CheckpointReferenceConfig, Config, KLPENConfig, factory
from klrl.control.actor import make_agent
from klrl.control.env import make_copies
from klrl.control.evaluate import evaluate_policy
from klrl.control.kl import ReferenceKL, make_reference_kl
from klrl.control.load import load_agent, load_reference
from klrl.control.record import make_row
from klrl.control.rollout import RolloutContext, make_rollout
from klrl.control.step_learner import Learner
from klrl.kl.measure import AnnotatedReference, annotate, measure_reference_kl
from klrl.kl.reference import OTHER_RUN, THE_POLICY, freeze, memory_bytes
from klrl.runs.checkpoint import Counters
from klrl.runs.machine import device_of
from klrl.runs.metrics import Row
from klrl.train.learner import Learned
from klrl.train.loop import Parts, Rollout


class ControlParts(Parts):
    """Everything that one control run needs, built from its settings.

    Args:
        config: the job.
        before: on resume, the run's manifest; see :class:`klrl.train.loop.Training`.

    Raises:
        ConfigError: an environment, a policy or a reference cannot be built.
    """

    kl: ReferenceKL | None
    learner: Learner

    def __init__(self, config: Config, before: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, device_of(config.device))
        self.config = config
        torch.manual_seed(derived_seed(config.seed, "torch"))
        # The copies that the run will collect from; one to see the specs where workers have them.
        self._copies = make_copies(
            config.env, seed=0, num_envs=1 if config.collector.elsewhere else None
        )
        self.agent = make_agent(
            config.actor,
            self._copies,
            normalize=config.env.normalize_observation,
            separate=config.loss.separate_losses,
        )
        if config.actor.init is not None and before is None:
            load_agent(config.actor.init, self.agent)
        described = before.get("reference") if before else None
        self.reference, self.described = self._make_reference(described)
        self.agent.modules.to(self.device)
        self.reference.to(self.device)
        kl = make_reference_kl(config.kl, self.agent.actor, AnnotatedReference(self.reference))
        self.kl = None if kl is None else kl.to(self.device)
        self.estimate_advantage = factory("advantage", config.advantage, config.domain)(
            config.advantage, self.agent.critic, config.env.reward_scale
        )
        estimator = None if self.kl is None else self.kl.loss_estimator
        # Kept on resume: with more frames, auto might choose another.
        mode = (before or {}).get("compile") or config.learner.compile
        self.learner = factory("learner", config.learner, config.domain)(
            config, self.agent, estimator, mode
        )

    # ------------------------------------------------------------------------------ the steps

    def charge_kl(self, batch: TensorDictBase) -> dict[str, torch.Tensor]:
        """Charge KL(policy||reference) to the reward, once, and measure it by every estimator."""
        if self.kl is None:
            return {}
        annotate(batch, self.reference, self.agent.family)
        if self.kl.transform is not None and not self.kl.online:
            self.kl.transform(batch)
        return measure_reference_kl(batch, self.agent.family)

    def move_reference(self, iteration: int) -> None:
        """The anchor after this iteration, by its rule."""
        self.reference_rule.update(self.reference, self.agent.actor, iteration)

    def move_normalizer(self, batch: TensorDictBase) -> None:
        """Take the rollout into the observation statistics, after the update that used it."""
        if self.agent.normalizer is not None:
            self.agent.normalizer.update(batch.get("observation"))

    def row(
        self,
        counters: Counters,
        batch: TensorDictBase,
        measured: Mapping[str, torch.Tensor],
        learned: Learned,
        seconds: float,
    ) -> Row:
        """One line of ``metrics.jsonl``."""
        klpen = isinstance(self.config.loss, KLPENConfig)
        return make_row(counters, batch, self.kl, measured, learned, klpen, seconds)

    def evaluation(self) -> Row:
        """Deterministic episodes in fresh environments."""
        result = evaluate_policy(
            self.agent,
            self.config.env,
            episodes=self.config.eval.episodes,
            seed=derived_seed(self.config.seed, "eval"),
            device=self.device,
        )
        return {"eval/return": result.mean, "eval/return_std": result.std}

    def reference_bytes(self) -> int:
        """A copy of the policy: its parameters and normaliser."""
        return memory_bytes(self.reference)

    # --------------------------------------------------------------------------------- parts

    def rollout(self, iteration: int, say: Callable[[str], None] = print) -> Rollout:
        """The collector, whose environments are seeded for this iteration."""
        seed = derived_seed(self.config.seed, "train", iteration)
        online = (self.kl.transform,) if self.kl and self.kl.transform and self.kl.online else ()
        copies: EnvBase | None = self._copies
        if self.config.collector.elsewhere:
            self._copies.close()
            copies = None
        else:
            self._copies.seed_first_reset(seed)
        context = RolloutContext(self.config, copies, self.agent, self.device, seed, online, say)
        return make_rollout(context)

    def components(self) -> dict[str, Any]:
        """Networks, optimiser, and the reference where there is one."""
        components = {"agent": self.agent.modules, "optimizer": self.learner.optimizer}
        if self.kl is not None:
            components["reference"] = self.reference
        return components

    def _make_reference(
        self, described: Mapping[str, Any] | None
    ) -> tuple[ProbabilisticTensorDictSequential, Mapping[str, Any] | None]:
        """pi_ref, and how to build it again on resume: the policy as it is now needs no telling."""
        source, config = self.reference_rule.source, self.config.reference
        if source == OTHER_RUN:
            assert isinstance(config, CheckpointReferenceConfig)
            return load_reference(config.path, config.which, self.agent, self._copies, described)
        assert source == THE_POLICY, source
        return freeze(self.agent.actor), None
