"""The steps of a control run; the algorithm is :meth:`klrl.train.loop.Training.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential

from klrl.base.processor import instructions
from klrl.base.seeds import derived_seed
from klrl.config import Config
from klrl.control.run import build
from klrl.control.run.kl import annotate, charge, measure
from klrl.control.run.rollout import RunningEpisodes, described, make_rollout
from klrl.kl.charge import KL_KEY, RAW_REWARD_KEY, ReferenceKL
from klrl.runs.machine import device_of
from klrl.runs.metrics import Row
from klrl.runs.state import Component
from klrl.train.loop import Parts, Rewards, Rollout
from klrl.train.scores import Evaluation, EvaluationPlan, Size, Starts

if TYPE_CHECKING:
    from klrl.control.run.stale import StaleFrames


class ControlParts(Parts):
    """The parts of a control run, built from its settings. ``before``: on resume, the manifest."""

    kl: ReferenceKL | None

    def __init__(self, config: Config, before: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, device_of(config.device))
        self.config, fresh, before = config, before is None, before or {}
        self._episodes = RunningEpisodes()
        self.task = build.task(config)
        self.longest_episode = self.task.simulators.longest_episode
        self.agent = build.policy(config, self.task, fresh=fresh)
        self.data = build.data(config, self.task, self.agent, fresh=fresh)
        self.reference = build.reference(
            config, self.task, self.agent, self.reference_rule, before.get("reference")
        )
        self.agent.to(self.device)
        self.kl = build.kl(config, self.agent, self.reference, self.device)
        self.preflight = [
            *self.task.notes,
            *(self.agent.notes if fresh else ()),
            *(() if self.data is None else (self.data.note,)),
            *(build.preflight(config, self.task, self.agent, self.reference) if fresh else ()),
            *build.mixed_note(config, self.device),
        ]
        advantage = build.advantage(config, self.agent)
        self.estimate_advantage, self._reward_normalizer, self._saved = advantage
        self._stale: StaleFrames | None = None
        if config.reads_sampler:
            from klrl.control.run.stale import StaleFrames, room

            self._stale = StaleFrames(config, self.agent)
            self.preflight += room(config, self.agent, self.device)
        # A resumed run keeps its mode: with more frames, auto might choose a different mode.
        mode = before.get("compile") or config.learner.compile
        if before.get("compile") == "kernel" and self.device.type == "cpu":
            from klrl.control.run.kernel import same_library

            self.preflight += same_library(instructions(), before.get("library"))
        self.learner = build.learner(config, self.agent, self.kl, mode)

    # ------------------------------------------------------------------------------ the steps

    def charge_kl(self, batch: TensorDictBase) -> dict[str, torch.Tensor]:
        """Charge KL(policy||reference) to the reward, once, and measure it by every estimator."""
        if self.reference is None or self.kl is None:
            return {}
        annotate(batch, self.reference.module, self.agent, self.kl.divergence)
        charge(batch, self.kl)
        weight = None if self._stale is None else self._stale.charge(batch, self.kl)
        return measure(batch, self.agent, weight)

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
        scale = None if self._reward_normalizer is None else self._reward_normalizer.scale
        rewards = rewards_of(batch, self.kl, scale)
        rewards.own.update({} if self._stale is None else self._stale.row(batch))
        return rewards

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
        self._episodes.check_repeatable(self.task, say)
        reseed = partial(self.task.seed_episodes, seed)
        reseed()
        rollout = make_rollout(self.config, self.task, self.agent, online, self.device)
        self._episodes.begin(iteration, rollout, reseed, say)
        if self._stale is None:
            return rollout
        self._stale.rollout, self._stale.updates = rollout, iteration
        return self._stale

    @property
    def collecting(self) -> str:
        """How rollouts are collected, in words."""
        return described(self.config.collector, self.task, self.agent, self.device)

    @property
    def resume(self) -> dict[str, str]:
        """Manifest entries that say whether a resume continues the running episodes."""
        return super().resume if self.data is not None else self._episodes.manifest

    def components(self) -> dict[str, Component]:
        """Return what checkpoints save: networks, optimiser, rollout and the optional parts."""
        components: dict[str, Component] = {
            "agent": self.agent.modules,
            "optimizer": self.learner.steps.optimizer,
            "rollout": self._episodes if self.data is None else self.data,
            **self._saved,
        }
        if self._stale is not None:
            components["rollouts"] = self._stale
        if self.reference is not None:
            components["reference"] = self.reference.module
        return components


def rewards_of(
    batch: TensorDictBase, kl: ReferenceKL | None, scale: float | None = None
) -> Rewards:
    """Compute metrics of a rollout's rewards, after the KL charge, and of its ended episodes.

    ``scale``: the factor of ``env.normalize_reward``, if set.
    """
    after = batch.get("next")
    shaped, own = _mean(after.get("reward")), _episodes(after)
    if scale is not None:
        own["learner/reward_norm"] = scale
    if kl is None or not kl.charges_reward:
        return Rewards(shaped, shaped, 0.0, own, _mean(after.get("reward").abs()))
    raw = after.get(RAW_REWARD_KEY)
    return Rewards(_mean(raw), shaped, _mean(after.get(KL_KEY)), own, _mean(raw.abs()))


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
