"""Declares settings of both domains: advantage, policy loss, learner, optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from klrl.config.choices import registered
from klrl.config.fields import ChoiceConfig, OwnPart, added, choice, number, own_part, setting
from klrl.config.objectives import BASELINES
from klrl.config.types import Part, Switch


@registered(
    "advantage", "gae", control="control.run.advantage:gae", language="language.run.advantage:gae"
)
class AdvantageConfig(ChoiceConfig):
    """Generalised advantage estimation, once per rollout."""

    gamma: float = number(0.99, ge=0, le=1)  # discount per frame
    #: GAE's lambda: 0 = one-step returns, 1 = returns of the whole episode
    lmbda: float = number(0.95, ge=0, le=1)
    #: for the learner only: factor on the reward, not on the penalty; 0: learn from the penalty
    reward_weight: float = added(number(ge=0), 1.0)


@registered("advantage", "custom", control="control.run.advantage:custom")
class CustomAdvantageConfig(OwnPart, AdvantageConfig):
    """An advantage of your own: advantage.target=package.module:Name."""


@registered("advantage", "group", language="language.run.advantage:group")
class GroupConfig(ChoiceConfig):
    """The score relative to the other responses to the prompt; then the KL is subtracted."""

    #: normalized: (score - mean) / std; normalized_shaped: the same, and KL / std; mean: score -
    #: mean; leave_one_out: score - mean of the others
    baseline: str = choice(*BASELINES, declared_in="klrl/config/objectives.py")
    #: factor on the score after the baseline, not on the penalty; 0: learn from the penalty
    reward_weight: float = added(number(ge=0), 1.0)


@dataclass
class LossConfig(ChoiceConfig):
    """The settings that all policy losses share."""

    entropy_bonus: bool = setting(True)  # subtract entropy_coeff * entropy from the loss
    entropy_coeff: float = number(0.0, ge=0)  # weight of the entropy (TorchRL's default 0.01)
    samples_mc_entropy: int = number(1, ge=1)  # samples per state for tanh_normal's entropy
    critic_coeff: float = number(0.5, ge=0)  # weight of the critic's loss (TorchRL's default 1.0)
    loss_critic_type: str = choice("l1", "l2", "smooth_l1", value="l2")  # TorchRL has smooth_l1
    #: a number: since the rollout, the critic's value of a state may change by at most this
    clip_value: Optional[float] = number(None, gt=0)
    normalize_advantage: bool = setting(True)  # within each minibatch (TorchRL's default false)
    separate_losses: bool = setting(False)  # true: the critic's loss does not reach a shared trunk
    #: mean or sum; language: token (mean over all tokens), response (mean of the responses' means)
    #: or sequence (mean of the responses' sums)
    reduction: str = choice("mean", "sum", "token", "response", "sequence")
    #: language, true: truncated responses are left out of the loss (DAPO: overlong filtering)
    mask_truncated: bool = added(field(), False)


@registered(
    "loss",
    "klpen_held",
    "KLPEN that holds KL(old||new) at its target",
    both="losses.policy:KLPENLoss",
    values={
        **{"beta_rule": "proportional", "line_search": "both"},
        **{"dtarg": 0.0035, "dtarg_per": "action"},
    },
)
@registered("loss", "klpen", both="losses.policy:KLPENLoss")
class KLPENConfig(LossConfig):
    """PPO with a penalty beta * KL(old||new); beta follows a rule, once per iteration."""

    dtarg: float = number(0.01, gt=0)  # target of KL(old||new) after an iteration, nats per unit
    #: a number: dtarg changes linearly to this value by the end of the run
    dtarg_end: Optional[float] = added(number(gt=0), None)
    #: step (control), token (mean) or sequence (sum over a response); null = step or token
    unit: Optional[str] = added(choice("step", "token", "sequence", optional=True), None)
    #: state, or action: dtarg is per dimension of an action; a categorical head is one dimension
    dtarg_per: str = added(choice("state", "action"), "state")
    beta: float = number(1.0, ge=0)  # coefficient of KL(old||new) to start from
    increment: float = number(2.0, ge=1)  # factor on beta when KL > 1.5 dtarg; >= 1
    decrement: float = number(0.5, gt=0, le=1)  # factor on beta when KL < dtarg / 1.5; <= 1
    #: doubling (TorchRL's documented rule), proportional, forward (TorchRL's code, which changes
    #: beta in each minibatch) or custom
    beta_rule: str = choice("doubling", "proportional", "forward", "custom")
    gain: float = number(0.5, gt=0)  # proportional: beta *= (KL / dtarg)^gain, a factor 1/4 .. 4
    #: none; back: shorten a step if KL > 1.5 dtarg; both: also lengthen a step if KL < dtarg / 1.5
    line_search: str = choice("none", "back", "both")
    max_alpha: float = added(number(ge=1), 2.0)  # line_search=both: largest factor on a step
    beta_min: float = number(1e-4, gt=0)  # beta never falls below this
    beta_max: float = number(1e4, gt=0)  # beta never rises above this
    kl_old: str = choice("exact", "sampled")  # KL(old||new): exact (closed form) or sampled
    samples_mc_kl: int = number(1, ge=1)  # kl_old=sampled: samples per state
    own_beta_rule: Part = own_part()  # beta_rule=custom: own_beta_rule.target=package.module:Name


@registered("loss", "clip", both="losses.policy:ClipLoss")
class ClipConfig(LossConfig):
    """PPO with a clipped probability ratio."""

    clip_epsilon: float = number(0.2, gt=0)  # the ratio is clipped to 1 +- clip_epsilon
    #: a number: the upper limit of the ratio is 1 + clip_epsilon_high (DAPO: 0.28)
    clip_epsilon_high: Optional[float] = added(number(gt=0), None)
    #: a number: stop the epochs once the batch's KL(old||new) is above 1.5 target_kl; nats per unit
    target_kl: Optional[float] = number(None, gt=0)
    #: step (control), token (mean) or sequence (sum over a response); null = step or token
    unit: Optional[str] = added(choice("step", "token", "sequence", optional=True), None)


@registered("loss", "trpo", control="losses.policy:TRPOLoss")
class TRPOConfig(LossConfig):
    """TRPO: one natural-gradient step of the policy per iteration, with KL(old||new) = dtarg."""

    dtarg: float = number(0.01, gt=0)  # KL(old||new) of each iteration, nats per unit of dtarg_per
    #: a number: dtarg changes linearly to this value by the end of the run
    dtarg_end: Optional[float] = number(None, gt=0)
    #: state, or action: dtarg is per dimension of an action; a categorical head is one dimension
    dtarg_per: str = choice("state", "action", value="action")
    cg_steps: int = number(15, ge=1)  # steps of conjugate gradients, each a pass over the rollout
    damping: float = number(0.1, ge=0)  # added to the Fisher matrix's diagonal


@registered("loss", "nll", both="losses.policy:LikelihoodLoss")
class LikelihoodConfig(LossConfig):
    """Negative log-likelihood of the data's actions (tokens): behaviour cloning, SFT."""

    normalize_advantage: bool = setting(False)  # unused: the likelihood has no advantage


@registered("loss", "custom", both="losses.policy:custom")
class CustomLossConfig(OwnPart, LossConfig):
    """A policy loss of your own: loss.target=package.module:Name."""


@registered("learner", "ppo", both="train.learner:Learner")
class LearnerConfig(ChoiceConfig):
    """Several epochs over each rollout, in shuffled minibatches."""

    epochs: int = number(10, ge=1)  # passes over the rollout
    minibatches: int = number(16, ge=1)  # per pass; divides a rollout's frames (language: prompts)
    #: auto (aot for a long run or a cached package, else false), false (eager), jit, aot
    compile: Switch = choice("auto", "false", "jit", "aot")
    #: float32 or mixed (arithmetic in bfloat16), for language and actor=cnn; null: mixed for
    #: actor.dtype=bfloat16 without LoRA, else float32
    dtype: Optional[str] = added(choice("float32", "mixed", optional=True), None)
    #: language: most prompts, with all responses, in one forward pass; null = a whole minibatch
    micro_batch: Optional[int] = added(number(ge=1), None)


@registered("optim", "adam", control="control.run.step:adam", language="language.run.update:adam")
class OptimConfig(ChoiceConfig):
    """Gradient clipping, Adam, learning rate annealed to a floor."""

    lr: float = number(3e-4, gt=0)  # learning rate at the start
    lr_floor: float = number(0.0, ge=0)  # learning rate at the end, with rate=linear
    #: linear: from lr to lr_floor; kl_adaptive (rsl_rl): after a minibatch, lr / 1.5 if its
    #: KL(old||new) > 2 kl_target, lr * 1.5 if < kl_target / 2, within lr_min .. lr_max
    rate: str = added(choice("linear", "kl_adaptive"), "linear")
    kl_target: float = added(number(gt=0), 0.01)  # kl_adaptive: KL target, nats per step or token
    lr_min: float = added(number(gt=0), 1e-5)  # kl_adaptive: smallest learning rate
    lr_max: float = added(number(gt=0), 1e-2)  # kl_adaptive: largest learning rate
    eps: float = number(1e-5, gt=0)  # Adam's epsilon
    max_grad_norm: float = number(0.5, gt=0)  # the gradient is scaled down to this Euclidean norm


@registered(
    "optim", "adamw", control="control.run.step:adamw", language="language.run.update:adamw"
)
class AdamWConfig(OptimConfig):
    """Adam with decoupled weight decay."""

    weight_decay: float = number(0.01, ge=0)  # decoupled weight decay
