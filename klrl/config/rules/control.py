"""Rules of a control job."""

from __future__ import annotations

from klrl.base.errors import ConfigError
from klrl.config import Config, CustomActorConfig, LegacyKLConfig, RayCollectorConfig

#: Two layers of it have 4e9 weights between them.
_WIDEST = 65_536


def check_minibatches_of_frames(c: Config) -> None:
    """Minibatches share the frames equally, and an advantage that is normalised has a spread."""
    batch = c.frames_per_iteration
    if batch % c.learner.minibatches:
        raise ConfigError(
            f"learner.minibatches={c.learner.minibatches}: does not divide the rollout of "
            f"env.num_envs x collector.steps = {c.env.num_envs} x {c.collector.steps} = {batch} "
            "frames; choose a divisor"
        )
    if batch // c.learner.minibatches < 2 and c.loss.normalize_advantage:
        raise ConfigError(
            f"learner.minibatches={c.learner.minibatches}: leaves one frame per minibatch, whose "
            "advantage has no spread; choose fewer or loss.normalize_advantage=false"
        )


def check_workers(c: Config) -> None:
    """Ray's workers share the copies equally."""
    if isinstance(c.collector, RayCollectorConfig) and c.env.num_envs % c.collector.workers:
        raise ConfigError(
            f"collector.workers={c.collector.workers}: does not divide env.num_envs="
            f"{c.env.num_envs}, and every worker steps equally many copies; choose a divisor"
        )


def check_window(c: Config) -> None:
    """A window for each copy, closed with the copies of an evaluation, would end the run."""
    if c.env.kwargs.get("render_mode") == "human":
        raise ConfigError(
            "env.kwargs.render_mode=human: training opens no windows; drop it, "
            "klrl evaluate RUN --video films the trained policy"
        )


def check_ray_step(c: Config) -> None:
    """A KL that Ray's workers cannot compute."""
    ray = isinstance(c.collector, RayCollectorConfig)
    if ray and isinstance(c.kl, LegacyKLConfig) and c.kl.apply == "step":
        raise ConfigError(
            "kl.apply=step: with collector=ray the reference stays with the learner; use "
            "kl.apply=rollout, which gives the same numbers"
        )


def check_hidden(c: Config) -> None:
    """Every layer has a width."""
    if not c.actor.hidden or not all(1 <= width <= _WIDEST for width in c.actor.hidden):
        raise ConfigError(
            f"actor.hidden={c.actor.hidden}: give widths >= 1 (and <= {_WIDEST}), as in [64,64]"
        )


def check_own(c: Config) -> None:
    """Custom networks share nothing."""
    if isinstance(c.actor, CustomActorConfig) and c.actor.share_trunk:
        raise ConfigError(
            "actor.share_trunk=true: networks of your own share nothing; set it to false"
        )
