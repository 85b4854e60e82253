"""Rules for control jobs."""

from __future__ import annotations

from klrl.base.errors import ConfigError
from klrl.config import Config, CustomActorConfig


def check_minibatches_of_frames(c: Config) -> None:
    """All minibatches have the same number of frames, at least two if advantages are normalised."""
    batch = c.frames_per_iteration
    if batch % c.learner.minibatches:
        raise ConfigError(
            f"learner.minibatches={c.learner.minibatches}: does not divide the rollout of "
            f"env.num_envs x collector.steps = {c.env.num_envs} x {c.collector.steps} = {batch} "
            "frames; choose a divisor"
        )
    if batch // c.learner.minibatches < 2 and c.loss.normalize_advantage:
        raise ConfigError(
            f"learner.minibatches={c.learner.minibatches}: leaves one frame per minibatch, which "
            "cannot be normalised; choose fewer or loss.normalize_advantage=false"
        )


def check_env_threads(c: Config) -> None:
    """A thread has at least one copy of the environment."""
    if (c.env.threads or 0) > c.env.num_envs:
        raise ConfigError(
            f"env.threads={c.env.threads}: more than env.num_envs={c.env.num_envs}; give at most "
            "one thread per copy"
        )


def check_window(c: Config) -> None:
    """Environments open no windows."""
    if c.env.kwargs.get("render_mode") == "human":
        raise ConfigError(
            "env.kwargs.render_mode=human: training opens no windows; drop it "
            "(klrl evaluate RUN --video films the trained policy)"
        )


def check_trpo(c: Config) -> None:
    """With loss=trpo, only the natural-gradient step changes the policy; Adam trains the critic."""
    if c.loss.name != "trpo":
        return
    if c.actor.share_trunk:
        raise ConfigError(
            "actor.share_trunk=true: the critic's steps would move the policy of loss=trpo; "
            "set it to false, or choose loss=klpen"
        )
    if c.optim.name == "adamw":
        raise ConfigError(
            "optim=adamw: its decay would move the policy of loss=trpo; use optim=adam or "
            "loss=klpen"
        )
    if c.optim.rate == "kl_adaptive":
        raise ConfigError(
            "optim.rate=kl_adaptive: loss=trpo moves the policy without optim.lr, "
            "which trains only the critic; use optim.rate=linear or loss=klpen"
        )


def check_stale(c: Config) -> None:
    """klrl's loop samples stale rollouts; weights are of steps, and the kernel reads none."""
    stale, weight = f"collector.staleness={c.collector.staleness}", c.loss.sampler_weight
    if weight not in (None, "truncate", "mask"):
        told = f"loss.sampler_weight={weight}: weighs responses"
        raise ConfigError(f"{told}; choose truncate or mask, which weigh steps")
    if c.sampled_elsewhere and c.collector.name == "torchrl":
        raise ConfigError(f"{stale}: collector=torchrl keeps no rollouts; use collector=vector")
    if c.reads_sampler and c.learner.compile == "kernel":
        setting = stale if c.sampled_elsewhere else "loss.anchor or loss.sampler_weight"
        told = f"does not read the sampler's log-probs of {setting}"
        raise ConfigError(f"learner.compile=kernel: {told}; use learner.compile=aot or false")


def check_share_trunk(c: Config) -> None:
    """Custom networks of policy and critic share no layers."""
    if isinstance(c.actor, CustomActorConfig) and c.actor.share_trunk:
        raise ConfigError("actor.share_trunk=true: custom networks share nothing; set it to false")
