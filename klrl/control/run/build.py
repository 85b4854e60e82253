"""Build the parts of a control run, a function for each; ``ControlParts`` calls them in order.

The order matters: each function may draw from the global generators, which :func:`task` seeds,
and pi_ref copies the weights and the observation statistics that the policy has by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from klrl.base.seeds import derived_seed, seed_generators
from klrl.config import Config, CustomAdvantageConfig, DemonstrationsConfig, factory
from klrl.config.own import has_state_dict
from klrl.control.env.copies import VectorGymEnv, make_copies
from klrl.control.policy.actor import make_agent, range_notes
from klrl.control.policy.networks import Agent
from klrl.control.run.advantage import RewardNormalizer
from klrl.control.run.kl import AnnotatedReference, make_reference_kl, preflight_checks
from klrl.control.run.update import ControlSteps
from klrl.kl.charge import ReferenceKL
from klrl.kl.reference import FrozenReference, Loaded, ReferenceRule
from klrl.runs.machine import cpu_has_bfloat16
from klrl.runs.state import Component
from klrl.train.learner import Learner

if TYPE_CHECKING:
    from klrl.control.run.demonstrations import Demonstrations


def task(config: Config) -> VectorGymEnv:
    """Seed the global generators, and make the copies of the environment."""
    seed_generators(derived_seed(config.seed, "torch"))
    num_envs = 1 if config.collector.imitates else None
    return make_copies(config.env, seed=0, num_envs=num_envs, device=config.device)


def policy(config: Config, task: VectorGymEnv, *, fresh: bool) -> Agent:
    """Make policy and critic; a fresh run loads the weights of ``actor.init``."""
    policy = make_agent(
        config.actor,
        task,
        normalize=config.env.normalize_observation,
        separate=config.loss.separate_losses,
        mixed=config.learner.dtype == "mixed",
    )
    if config.actor.init is not None and fresh:
        from klrl.control.run.load import load_agent

        load_agent(config.actor.init, config.actor.init_which, policy)
    return policy


def data(
    config: Config, task: VectorGymEnv, policy: Agent, *, fresh: bool
) -> Demonstrations | None:
    """Read the demonstrations; the normaliser of a new policy gets their statistics."""
    if not isinstance(config.collector, DemonstrationsConfig):
        return None
    make = factory("collector", config.collector, config.domain)
    data: Demonstrations = make(config, policy, task)
    if fresh and config.actor.init is None and policy.normalizer is not None:
        policy.normalizer.update(data.frames["observation"])
    return data


def reference(
    config: Config,
    task: VectorGymEnv,
    policy: Agent,
    rule: ReferenceRule,
    described: Mapping[str, Any] | None,
) -> FrozenReference | None:
    """Make pi_ref. ``described``: on resume, the stored description of its networks, if any."""
    if not config.has_reference:
        return None

    def load_other() -> Loaded:
        from klrl.control.run.load import load_reference

        return load_reference(config.reference, policy, task, described)

    return FrozenReference.start(rule, policy.actor, load_other)


def kl(
    config: Config, policy: Agent, reference: FrozenReference | None, device: torch.device
) -> ReferenceKL | None:
    """Make the penalty, and move pi_ref to the policy's device; None for ``kl=none``."""
    if reference is None:
        return None
    annotated = AnnotatedReference(reference.module.to(device))
    return make_reference_kl(config.kl, policy.actor, annotated)


def preflight(
    config: Config, task: VectorGymEnv, policy: Agent, reference: FrozenReference | None
) -> list[str]:
    """Check a fresh run's first KL, and return lines about its policy's actions."""
    return [*preflight_checks(policy, reference), *range_notes(config.actor, policy, task)]


def advantage(
    config: Config, policy: Agent
) -> tuple[
    Callable[[TensorDictBase], TensorDictBase], RewardNormalizer | None, dict[str, Component]
]:
    """Make the advantage's function and the rewards' normaliser; also return what they save."""
    normalizer = RewardNormalizer(config.advantage.gamma) if config.env.normalize_reward else None
    make = factory("advantage", config.advantage, config.domain)
    estimate = make(config.advantage, policy.critic, config.env.reward_scale, normalizer, policy)
    saved: dict[str, Component] = {}
    if normalizer is not None:
        saved["reward_normalizer"] = normalizer
    if isinstance(config.advantage, CustomAdvantageConfig) and has_state_dict(estimate.part):
        saved["advantage"] = estimate.part
    return estimate, normalizer, saved


def learner(config: Config, policy: Agent, kl: ReferenceKL | None, mode: str) -> Learner:
    """Make the learner; ``mode``: that of ``learner.compile``."""
    steps = ControlSteps(config, policy, kl, mode)
    learner: Learner = factory("learner", config.learner, config.domain)(config, steps)
    return learner


def mixed_note(config: Config, device: torch.device) -> list[str]:
    """Return a line if ``learner.dtype=mixed`` has no effect on this machine."""
    if config.learner.dtype != "mixed" or device.type != "cpu" or cpu_has_bfloat16():
        return []
    why = "this processor has no bfloat16 instructions, so the CNN computes in float32"
    return [f"learner.dtype=mixed: {why}"]
