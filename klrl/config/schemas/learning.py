"""Declares settings of both domains: advantage, policy loss, learner, optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from klrl.config.choices import registered
from klrl.config.fields import (
    ChoiceConfig,
    Compile,
    Count,
    NonNegative,
    Number,
    OwnPart,
    Part,
    Positive,
    Share,
    Unit,
    one_of,
    setting,
)
from klrl.config.objectives import BASELINES

#: A factor that never shortens.
Factor = Annotated[Number, Field(ge=1)]


@registered(
    "advantage", "gae", control="control.run.advantage:gae", language="language.run.advantage:gae"
)
class AdvantageConfig(ChoiceConfig):
    """Generalised advantage estimation, once per rollout."""

    gamma: Share = 0.99  # discount per frame
    #: GAE's lambda: 0 = one-step returns, 1 = returns of the whole episode
    lmbda: Share = 0.95
    #: for the learner only: factor on the reward, not on the penalty; 0: learn from the penalty
    reward_weight: NonNegative = setting(1.0, added=True)


@registered("advantage", "custom", control="control.run.own_advantage:custom")
class CustomAdvantageConfig(OwnPart, AdvantageConfig):
    """A custom advantage: advantage.target=package.module:Name."""


@registered("advantage", "group", language="language.run.advantage:group")
class GroupConfig(ChoiceConfig):
    """The score relative to the other responses to the prompt; then the KL is subtracted."""

    #: normalized: (score - mean) / std; normalized_shaped: the same, and KL / std; mean: score -
    #: mean; leave_one_out: score - mean of the others
    baseline: Annotated[str, one_of(BASELINES, "klrl/config/objectives.py")] = BASELINES[0]
    #: factor on the score after the baseline, not on the penalty; 0: learn from the penalty
    reward_weight: NonNegative = setting(1.0, added=True)


@dataclass
class LossConfig(ChoiceConfig):
    """The settings that all policy losses share."""

    entropy_bonus: bool = True  # subtract entropy_coeff * entropy from the loss
    entropy_coeff: NonNegative = 0.0  # weight of the entropy (TorchRL's default 0.01)
    samples_mc_entropy: Count = 1  # samples per state for tanh_normal's entropy
    critic_coeff: NonNegative = 0.5  # weight of the critic's loss (TorchRL's default 1.0)
    loss_critic_type: Literal["l1", "l2", "smooth_l1"] = "l2"  # TorchRL has smooth_l1
    #: a number: since the rollout, the critic's value of a state may change by at most this
    clip_value: Positive | None = None
    normalize_advantage: bool = True  # within each minibatch (TorchRL's default false)
    separate_losses: bool = False  # true: the critic's loss does not reach a shared trunk
    #: mean or sum; language: token (mean over all tokens), response (mean of the responses' means)
    #: or sequence (mean of the responses' sums)
    reduction: Literal["mean", "sum", "token", "response", "sequence"] = "mean"
    #: language, true: truncated responses are left out of the loss (DAPO: overlong filtering)
    mask_truncated: bool = setting(False, added=True)
    #: weight w = pi_old / sampler: truncate (min(w, cap)), mask (w within low .. high); language:
    #: mask_response (the response's product, up to cap), mask_geometric (its geometric mean in
    #: low .. high)
    sampler_weight: Literal["truncate", "mask", "mask_response", "mask_geometric"] | None = setting(
        None, added=True
    )
    sampler_cap: Positive | None = setting(None, added=True)  # null: truncate 2, mask_response 3
    #: null: mask .5, mask_geometric .99
    sampler_low: Positive | None = setting(None, added=True)
    #: null: mask 5, mask_geometric 1.01
    sampler_high: Positive | None = setting(None, added=True)


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

    dtarg: Positive = 0.01  # target of KL(old||new) after an iteration, nats per unit
    #: a number: dtarg changes linearly to this value by the end of the run
    dtarg_end: Positive | None = setting(None, added=True)
    #: step (control), token (mean) or sequence (sum over a response); null = step or token
    unit: Unit | None = setting(None, added=True)
    #: state, or action: dtarg is per dimension of an action; a categorical head is one dimension
    dtarg_per: Literal["state", "action"] = setting("state", added=True)
    beta: NonNegative = 1.0  # coefficient of KL(old||new) to start from
    increment: Factor = 2.0  # factor on beta when KL > 1.5 dtarg; >= 1
    #: factor on beta when KL < dtarg / 1.5; <= 1
    decrement: Annotated[Number, Field(gt=0, le=1)] = 0.5
    #: doubling (TorchRL's documented rule), proportional, forward (TorchRL's code, which changes
    #: beta in each minibatch) or custom
    beta_rule: Literal["doubling", "proportional", "forward", "custom"] = "doubling"
    gain: Positive = 0.5  # proportional: beta *= (KL / dtarg)^gain, a factor 1/4 .. 4
    #: none; back: shorten a step if KL > 1.5 dtarg; both: also lengthen a step if KL < dtarg / 1.5
    line_search: Literal["none", "back", "both"] = "none"
    #: line_search=both: largest factor on a step
    max_alpha: Factor = setting(2.0, added=True)
    beta_min: Positive = 1e-4  # beta never falls below this
    beta_max: Positive = 1e4  # beta never rises above this
    kl_old: Literal["exact", "sampled"] = "exact"  # KL(old||new): exact (closed form) or sampled
    samples_mc_kl: Count = 1  # kl_old=sampled: samples per state
    #: beta_rule=custom: own_beta_rule.target=package.module:Name
    own_beta_rule: Part = setting(None, added=True, own=True)


@registered("loss", "clip", both="losses.policy:ClipLoss")
class ClipConfig(LossConfig):
    """PPO with a clipped probability ratio."""

    clip_epsilon: Positive = 0.2  # the ratio is clipped to 1 +- clip_epsilon
    #: a number: the upper limit of the ratio is 1 + clip_epsilon_high (DAPO: 0.28)
    clip_epsilon_high: Positive | None = setting(None, added=True)
    #: a number: stop the epochs once the batch's KL(old||new) is above 1.5 target_kl; nats per unit
    target_kl: Positive | None = None
    #: step (control), token (mean) or sequence (sum over a response); null = step or token
    unit: Unit | None = setting(None, added=True)
    #: the ratio's denominator: old (the policy before the update) or sampler; null =
    #: sampler if collector.staleness >= 1 and loss.sampler_weight=null, else old
    anchor: Literal["old", "sampler"] | None = setting(None, added=True)


@registered("loss", "dppo", language="losses.policy:DPPOLoss")
class DPPOConfig(LossConfig):
    """DPPO (arXiv:2602.04879): a trust region around the sampler, by a divergence per token."""

    #: the divergence from the sampler: of the sampled token against all others (tv, kl), or over
    #: the whole vocabulary (tv_exact, kl_exact)
    measure: Literal["tv", "kl", "tv_exact", "kl_exact"] = "tv"
    delta: Positive = 0.1  # a token with a larger divergence is not pushed further
    log2_coef: NonNegative = 0.0  # coefficient of (log pi - log sampler)^2 (prime-rl: .001)


@registered("loss", "trpo", control="losses.policy:TRPOLoss")
class TRPOConfig(LossConfig):
    """TRPO: one natural-gradient step of the policy per iteration, with KL(old||new) = dtarg."""

    dtarg: Positive = 0.01  # KL(old||new) of each iteration, nats per unit of dtarg_per
    #: a number: dtarg changes linearly to this value by the end of the run
    dtarg_end: Positive | None = None
    #: state, or action: dtarg is per dimension of an action; a categorical head is one dimension
    dtarg_per: Literal["state", "action"] = "action"
    cg_steps: Count = 15  # steps of conjugate gradients, each a pass over the rollout
    damping: NonNegative = 0.1  # added to the Fisher matrix's diagonal


@registered("loss", "nll", both="losses.policy:LikelihoodLoss")
class LikelihoodConfig(LossConfig):
    """Negative log-likelihood of the data's actions (tokens): behaviour cloning, SFT."""

    normalize_advantage: bool = False  # unused: the likelihood has no advantage


@registered("loss", "custom", both="losses.policy:custom")
class CustomLossConfig(OwnPart, LossConfig):
    """A custom policy loss: loss.target=package.module:Name."""


@registered("learner", "ppo", both="train.learner:Learner")
class LearnerConfig(ChoiceConfig):
    """Several epochs over each rollout, in shuffled minibatches."""

    epochs: Count = 10  # passes over the rollout
    minibatches: Count = 16  # per pass; divides a rollout's frames (language: prompts)
    #: auto (kernel, aot or false, by the settings), false (eager), jit, aot, kernel
    compile: Compile = "auto"
    #: float32 or mixed (arithmetic in bfloat16), for language and actor=cnn; null: mixed for
    #: actor.dtype=bfloat16 without LoRA, else float32
    dtype: Literal["float32", "mixed"] | None = setting(None, added=True)
    #: language: most prompts, with all responses, in one forward pass; null = a whole minibatch
    micro_batch: Count | None = setting(None, added=True)
    #: language: most tokens, with padding, in one forward pass: packed rows of similar lengths, at
    #: least one; null = whole prompts
    tokens_per_batch: Count | None = setting(None, added=True)


@registered("optim", "adam", control="control.run.step:adam", language="language.run.update:adam")
class OptimConfig(ChoiceConfig):
    """Gradient clipping, Adam, learning rate annealed to a floor."""

    lr: Positive = 3e-4  # learning rate at the start
    lr_floor: NonNegative = 0.0  # learning rate at the end, with rate=linear
    #: linear: from lr to lr_floor; kl_adaptive (rsl_rl): after a minibatch, lr / 1.5 if its
    #: KL(old||new) > 2 kl_target, lr * 1.5 if < kl_target / 2, within lr_min .. lr_max
    rate: Literal["linear", "kl_adaptive"] = setting("linear", added=True)
    #: kl_adaptive: KL target, nats per step or token
    kl_target: Positive = setting(0.01, added=True)
    lr_min: Positive = setting(1e-5, added=True)  # kl_adaptive: smallest learning rate
    lr_max: Positive = setting(1e-2, added=True)  # kl_adaptive: largest learning rate
    eps: Positive = 1e-5  # Adam's epsilon
    max_grad_norm: Positive = 0.5  # the gradient is scaled down to this Euclidean norm


@registered(
    "optim", "adamw", control="control.run.step:adamw", language="language.run.update:adamw"
)
class AdamWConfig(OptimConfig):
    """Adam with decoupled weight decay."""

    weight_decay: NonNegative = 0.01  # decoupled weight decay
