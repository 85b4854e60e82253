"""Both domains: advantage, policy loss, learner, optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from klrl.config.choices import registered
from klrl.config.fields import ChoiceConfig, OwnPart, added, choice, number, own_part, setting
from klrl.config.objectives import BASELINES


@registered(
    "advantage", "gae", control="control.advantage:gae", language="language.run.advantage:gae"
)
@dataclass
class AdvantageConfig(ChoiceConfig):
    """Generalised advantage estimation, once per rollout."""

    gamma: float = number(0.99, ge=0, le=1)  # discount per frame
    #: weight of longer returns: 0 = one step, 1 = the whole episode
    lmbda: float = number(0.95, ge=0, le=1)
    #: of the reward beside the penalty, for the learner alone; 0: learn from the penalty alone
    reward_weight: float = added(number(ge=0), 1.0)


@registered("advantage", "custom", control="control.advantage:custom")
@dataclass
class CustomAdvantageConfig(OwnPart, AdvantageConfig):
    """An advantage of your own: advantage.target=package.module:Name."""


@registered("advantage", "group", language="language.run.advantage:group")
@dataclass
class GroupConfig(ChoiceConfig):
    """The score against the other responses to the same prompt; the KL enters after."""

    #: (s - mean) / std of the group; normalized_shaped: coef * KL over std too; mean: s - mean;
    #: leave_one_out: s - mean of the others
    baseline: str = choice(*BASELINES, declared_in="klrl/config/objectives.py")
    #: of the baselined score beside the penalty; 0: learn from the penalty alone
    reward_weight: float = added(number(ge=0), 1.0)


@dataclass
class LossConfig(ChoiceConfig):
    """The settings that all policy losses share."""

    entropy_bonus: bool = setting(True)  # subtract entropy_coeff * entropy from the loss
    entropy_coeff: float = number(0.0, ge=0)  # weight of the entropy (documented default 0.01)
    #: samples for the entropy where it has no closed form (actor=tanh_normal)
    samples_mc_entropy: int = number(1, ge=1)
    critic_coeff: float = number(0.5, ge=0)  # weight of the critic's loss (documented default 1.0)
    #: l1, l2 or smooth_l1 (documented default smooth_l1)
    loss_critic_type: str = choice("l1", "l2", "smooth_l1", value="l2")
    #: a number clips the critic's move from its value during the rollout
    clip_value: Optional[float] = number(None, gt=0)
    #: zero mean, unit variance over each minibatch (documented default false)
    normalize_advantage: bool = setting(True)
    #: true: a shared trunk learns from the policy's loss only
    separate_losses: bool = setting(False)
    #: mean or sum over the frames; language: token (what mean is there), response (mean over each
    #: one's tokens, then over responses) or sequence (sum per response)
    reduction: str = choice("mean", "sum", "token", "response", "sequence")
    #: language, true: a response that was cut off is no part of the loss (DAPO: overlong filtering)
    mask_truncated: bool = added(field(default=MISSING), False)


@registered(
    "loss",
    "klpen_held",
    "KLPEN that holds KL(old||new) at its target: proportional beta and a line search",
    both="losses.policy:KLPENLoss",
    values={"beta_rule": "proportional", "line_search": "both", "max_alpha": 8.0},
)
@registered(
    "loss",
    "klpen",
    "PPO with a penalty beta * KL(old||new); beta follows the documented rule, once per iteration",
    both="losses.policy:KLPENLoss",
)
@dataclass
class KLPENConfig(LossConfig):
    """PPO with a KL(old||new) penalty whose coefficient beta follows a rule."""

    dtarg: float = number(0.01, gt=0)  # target of KL(old||new) after an iteration, nats per unit
    #: a number: dtarg falls (or rises) linearly to it over the frames
    dtarg_end: Optional[float] = added(number(gt=0), None)
    #: step (control), token (mean over tokens) or sequence (sum over a response); null = step or
    #: token
    unit: Optional[str] = added(choice("step", "token", "sequence", optional=True), None)
    beta: float = number(1.0, ge=0)  # coefficient of KL(old||new) to start from
    increment: float = number(2.0, ge=1)  # factor on beta when KL > 1.5 dtarg; >= 1
    decrement: float = number(0.5, gt=0, le=1)  # factor on beta when KL < dtarg / 1.5; <= 1
    #: doubling (documented), proportional, forward: TorchRL's, every minibatch, or custom:
    #: own_beta_rule
    beta_rule: str = choice("doubling", "proportional", "forward", "custom")
    gain: float = number(0.5, gt=0)  # proportional: beta *= (KL / dtarg)^gain, at most by 4
    #: none; back: shorten steps above 1.5 dtarg; both: lengthen those below dtarg / 1.5 too
    line_search: str = choice("none", "back", "both")
    #: line_search=both: a step becomes at most so many times as long
    max_alpha: float = added(number(ge=1), 2.0)
    beta_min: float = number(1e-4, gt=0)  # beta never falls below
    beta_max: float = number(1e4, gt=0)  # beta never rises above
    #: exact: closed form; sampled: a Monte-Carlo estimate (to compare)
    kl_old: str = choice("exact", "sampled")
    samples_mc_kl: int = number(1, ge=1)  # samples of that estimate
    #: beta_rule=custom: own_beta_rule.target=package.module:Name, own_beta_rule.args.x=1
    own_beta_rule: Any = own_part()


@registered("loss", "clip", both="losses.policy:ClipLoss")
@dataclass
class ClipConfig(LossConfig):
    """PPO with a clipped probability ratio."""

    clip_epsilon: float = number(0.2, gt=0)  # the ratio is clipped to 1 +- clip_epsilon
    #: a number: to at most 1 + this instead (DAPO: 0.28)
    clip_epsilon_high: Optional[float] = added(number(gt=0), None)
    #: a number ends the epochs once KL(old||new) of the batch, nats per unit, exceeds 1.5 times it
    target_kl: Optional[float] = number(None, gt=0)
    #: step (control), token (mean over tokens) or sequence (sum over a response); null = step or
    #: token
    unit: Optional[str] = added(choice("step", "token", "sequence", optional=True), None)


@registered("loss", "custom", both="losses.own:custom")
@dataclass
class CustomLossConfig(OwnPart, LossConfig):
    """A policy loss of your own: loss.target=package.module:Name."""


@registered("learner", "ppo", both="train.learner:Learner")
@dataclass
class LearnerConfig(ChoiceConfig):
    """Several epochs over each rollout, in shuffled minibatches."""

    epochs: int = number(10, ge=1)  # passes over the rollout
    #: minibatches per pass; divides env.num_envs * collector.steps
    minibatches: int = number(16, ge=1)
    # Any: YAML reads a bare false as a boolean.
    #: auto (aot where its package is in the cache or the run is long, else false), false (eager),
    #: jit (torch.compile), aot (a package that is built once and kept)
    compile: Any = choice("auto", "false", "jit", "aot")
    #: language: float32, mixed (weights of float32, arithmetic of bfloat16), or null: mixed where
    #: actor.dtype=bfloat16 has no adapters
    dtype: Optional[str] = added(choice("float32", "mixed", optional=True), None)
    #: language: most prompts, with their groups, in one forward and backward; their gradients are
    #: added up; null = a whole minibatch
    micro_batch: Optional[int] = added(number(ge=1), None)


@registered("optim", "adam", control="control.step:adam", language="language.run.update:adam")
@dataclass
class OptimConfig(ChoiceConfig):
    """Gradient clipping, Adam, learning rate annealed to a floor."""

    lr: float = number(3e-4, gt=0)  # learning rate at the start
    #: learning rate at the end; it falls linearly over the frames
    lr_floor: float = number(0.0, ge=0)
    eps: float = number(1e-5, gt=0)  # Adam's epsilon
    max_grad_norm: float = number(0.5, gt=0)  # the gradient is scaled down to this Euclidean norm


@registered("optim", "adamw", control="control.step:adamw", language="language.run.update:adamw")
@dataclass
class AdamWConfig(OptimConfig):
    """The same with decoupled weight decay."""

    weight_decay: float = number(0.01, ge=0)  # decoupled weight decay
