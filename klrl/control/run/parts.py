"""The parts of a control run; the algorithm is :meth:`klrl.train.loop.Training.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential

from klrl.base.seeds import derived_seed, seed_generators
from klrl.config import (
    CheckpointReferenceConfig,
    Config,
    CustomReferenceConfig,
    DemonstrationsConfig,
    factory,
)
from klrl.config.own import has_state_dict
from klrl.control.env.make import make_copies, transformed
from klrl.control.policy.acting import acts_in_numpy
from klrl.control.policy.actor import make_agent, range_notes
from klrl.control.run.advantage import OwnAdvantage, RewardNormalizer
from klrl.control.run.kl import (
    RAW_REWARD_KEY,
    AnnotatedReference,
    annotate,
    charge,
    make_reference_kl,
    measure,
    preflight_checks,
)
from klrl.control.run.rollout import RunningEpisodes
from klrl.control.run.update import ControlSteps
from klrl.kl.charge import KL_KEY, ReferenceKL
from klrl.kl.reference import FrozenReference, Loaded
from klrl.runs.machine import device_of
from klrl.runs.metrics import Row
from klrl.runs.state import Component
from klrl.train.learner import Learner
from klrl.train.loop import Parts, Rewards, Rollout
from klrl.train.scores import Evaluation, EvaluationPlan, Size, Starts

if TYPE_CHECKING:
    from klrl.control.run.demonstrations import Demonstrations


class ControlParts(Parts):
    """The parts of a control run, built from its settings."""

    kl: ReferenceKL | None

    def __init__(self, config: Config, before: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, device_of(config.device))
        self.config = config
        seed_generators(derived_seed(config.seed, "torch"))
        copies = 1 if config.collector.imitates else None
        self._copies = make_copies(config.env, seed=0, num_envs=copies)
        self.longest_episode = self._copies.longest_episode
        self._episodes = RunningEpisodes()
        mixed = config.learner.dtype == "mixed"
        self.agent = make_agent(
            config.actor,
            self._copies,
            normalize=config.env.normalize_observation,
            separate=config.loss.separate_losses,
            mixed=mixed,
        )
        if config.actor.init is not None and before is None:
            from klrl.control.run.load import load_agent

            load_agent(config.actor.init, config.actor.init_which, self.agent)
        self.data: Demonstrations | None = None
        if isinstance(config.collector, DemonstrationsConfig):
            make_data = factory("collector", config.collector, config.domain)
            self.data = make_data(config, self.agent, self._copies)
            if before is None and config.actor.init is None and self.agent.normalizer is not None:
                self.agent.normalizer.update(self.data.frames["observation"])
        self.reference = self._make_reference(before.get("reference") if before else None)
        self.agent.to(self.device)
        self.kl = None
        if self.reference is not None:
            reference = AnnotatedReference(self.reference.module.to(self.device))
            self.kl = make_reference_kl(config.kl, self.agent.actor, reference)
        self.preflight = [
            *self._copies.notes,
            *(() if self.data is None else (self.data.note,)),
            *preflight_checks(self.agent, self.reference, self._copies, fresh=before is None),
            *(range_notes(config.actor, self.agent, self._copies) if before is None else ()),
        ]
        if mixed and self.device.type == "cpu":
            from klrl.control.policy.encoders import cpu_has_bfloat16

            if not cpu_has_bfloat16():
                why = "this processor has no bfloat16 instructions, so the CNN computes in float32"
                self.preflight.append(f"learner.dtype=mixed: {why}")
        self._reward_normalizer: RewardNormalizer | None = None
        if config.env.normalize_reward:
            self._reward_normalizer = RewardNormalizer(config.advantage.gamma)
        make_advantage = factory("advantage", config.advantage, config.domain)
        given = (self.agent.critic, config.env.reward_scale, self._reward_normalizer, self.agent)
        self.estimate_advantage = make_advantage(config.advantage, *given)
        # A resumed run keeps its mode: with more frames, auto might choose a different mode.
        mode = (before or {}).get("compile") or config.learner.compile
        steps = ControlSteps(config, self.agent, self.kl, mode)
        self.learner: Learner = factory("learner", config.learner, config.domain)(config, steps)

    # ------------------------------------------------------------------------------ the steps

    def charge_kl(self, batch: TensorDictBase) -> dict[str, torch.Tensor]:
        """Charge KL(policy||reference) to the reward, once, and measure it by every estimator."""
        if self.reference is None or self.kl is None:
            return {}
        annotate(batch, self.reference.module, self.agent.family, self.kl.divergence)
        charge(batch, self.kl)
        return measure(batch, self.agent.family)

    @property
    def actor(self) -> ProbabilisticTensorDictSequential:
        """The policy in training."""
        return self.agent.actor

    def update_normalizer(self, batch: TensorDictBase) -> None:
        """Add the rollout to the observation statistics, after the update that used it."""
        if self.data is None and self.agent.normalizer is not None:
            self.agent.normalizer.update(batch.get("observation"))
        elif self.data is not None and self._reward_normalizer is not None:
            self._reward_normalizer.begin_episodes()  # the next rows continue no earlier ones

    @property
    def reward_norm(self) -> float:
        """The factor of ``env.normalize_reward``."""
        return 1.0 if self._reward_normalizer is None else self._reward_normalizer.scale

    def rewards(self, batch: TensorDictBase) -> Rewards:
        """Compute the reward metrics of a rollout, after the KL charge."""
        if self.data is not None:  # the rollout has demonstrations, not the policy's episodes
            mean = _mean(batch["next", "reward"])
            return Rewards(mean, mean, 0.0)
        return rewards_of(batch, self.kl, self._reward_normalizer)

    def held_out(self) -> Row:
        """Return metrics of held-out demonstrations; none without demonstrations."""
        return {} if self.data is None else self.data.held_out()

    def evaluation(self, starts: Starts, size: Size) -> Evaluation:
        """Play episodes in fresh environments."""
        from klrl.control.run.evaluate import evaluate_policy

        frozen: Any = None if self.reference is None else self.reference.module
        reference = None if frozen is None else frozen[0].module
        plan = EvaluationPlan(starts, size, self.config.eval.sampled, self.device)
        return evaluate_policy(self.agent, self.config.env, plan, reference)

    # --------------------------------------------------------------------------------- parts

    def rollout(self, iteration: int, say: Callable[[str], None] = print) -> Rollout:
        """Make the collector; replay loaded episodes, or seed new ones by ``iteration``."""
        if self.data is not None:
            self.data.iteration = iteration
            return self.data
        seed = derived_seed(self.config.seed, "train", iteration)
        online = (self.kl.transform,) if self.kl and self.kl.transform and self.kl.online else ()
        self._episodes.check_repeatable(self._copies, say)
        env = transformed(self._copies, online)
        reseed = partial(self._copies.seed_episodes, seed)
        reseed()
        collector = factory("collector", self.config.collector, self.config.domain)
        rollout = collector(env, self.agent, self.config.collector.steps, self.device)
        self._episodes.begin(iteration, rollout, reseed, say)
        if self._episodes.new and self._reward_normalizer is not None:
            self._reward_normalizer.begin_episodes()
        return rollout

    @property
    def collecting(self) -> str:
        """How rollouts are collected, in words."""
        config, device = self.config.collector, self.device
        if isinstance(config, DemonstrationsConfig):
            return f"collector={config.name}, read from {config.data}"
        acts = "numpy" if acts_in_numpy(self.agent, device) else "torch"
        acts = "TorchRL's modules" if config.name == "torchrl" else acts
        return f"collector={config.name}, {self._copies.stepped}, policy in {acts}"

    @property
    def resume(self) -> dict[str, str]:
        """Manifest entries that say whether a resume continues the running episodes."""
        return super().resume if self.data is not None else self._episodes.manifest

    def components(self) -> dict[str, Component]:
        """Return what checkpoints save: networks, optimiser, rollout and the optional parts."""
        components = {
            "agent": self.agent.modules,
            "optimizer": self.learner.steps.optimizer,
            "rollout": self._episodes if self.data is None else self.data,
        }
        if self.reference is not None:
            components["reference"] = self.reference.module
        if self._reward_normalizer is not None:
            components["reward_normalizer"] = self._reward_normalizer
        if isinstance(own := self.estimate_advantage, OwnAdvantage) and has_state_dict(own.part):
            components["advantage"] = own.part
        return components

    def _make_reference(self, described: Mapping[str, Any] | None) -> FrozenReference | None:
        """Make pi_ref. ``described``: on resume, the stored description of its networks, if any."""
        if not self.config.has_reference:
            return None

        def load_other() -> Loaded:
            config = self.config.reference
            if isinstance(config, CustomReferenceConfig):
                from klrl.control.policy.own_reference import own_reference

                return own_reference("reference", config, self.agent), None
            assert isinstance(config, CheckpointReferenceConfig)
            from klrl.control.run.load import load_reference

            return load_reference(config.path, config.which, self.agent, self._copies, described)

        return FrozenReference.start(self.reference_rule, self.agent.actor, load_other)


def rewards_of(
    batch: TensorDictBase, kl: ReferenceKL | None, normalizer: RewardNormalizer | None = None
) -> Rewards:
    """Compute metrics of a rollout's rewards, after the KL charge, and of its ended episodes."""
    after = batch.get("next")
    shaped, own = _mean(after.get("reward")), _episodes(after)
    if normalizer is not None:
        own["learner/reward_norm"] = normalizer.scale
    if kl is None or not kl.charges_reward:
        return Rewards(shaped, shaped, 0.0, own)
    return Rewards(_mean(after.get(RAW_REWARD_KEY)), shaped, _mean(after.get(KL_KEY)), own)


def _mean(value: torch.Tensor) -> float:
    """Average in float64, so that mean shaped = mean raw - mean penalty up to float32 rounding."""
    return float(value.double().mean())


def _episodes(after: TensorDictBase) -> Row:
    """Compute metrics of the episodes that ended in a rollout; only their number if none ended."""
    ended = after.get("done")
    if not ended.any():
        return {"reward/episodes": 0}
    return {
        "reward/episode": _mean(after.get("episode_reward")[ended]),
        "reward/episode_length": _mean(after.get("step_count")[ended]),
        "reward/episodes": int(ended.sum()),
    }
