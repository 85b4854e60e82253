"""Control and language are one program: on one step and one token they give the same numbers.

The problem: D contexts (observations, prompts) and V choices (actions, tokens). An episode is one
terminated step, a response one token; both domains get the same logits of pi_old, pi_theta and
pi_ref, the same values and the same scores, in float64, from the settings that a user types. What
they charge, measure, estimate, minimise (with its gradient) and record is compared with each other
and with :func:`closed_form`, which is written here in plain torch and knows nothing of klrl.

Every choice occurs as often as pi_old takes it: p = counts / 8 and 8 rows a context. So a mean over
rows *is* the expectation under pi_old, and the closed form is an enumeration: of the loss's
estimators it asks for the gradient of the KL itself, whichever is charged.

The parameters are all that the registry and the table of placements hold. What is added there fails
here, by name, until its closed form is written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from klrl.control.step_learner import Learner
from klrl.language.step import LanguageLearner
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.nn.functional import one_hot

from klrl.config import CHOICES, CONTROL, LANGUAGE, JobConfig, choices_for, factory
from klrl.config.compose import Composer, checked_config
from klrl.config.placement import ESTIMATORS, PLACEMENTS, VERDICTS, Gradient
from klrl.control.actor import Agent
from klrl.control.distributions import Categorical
from klrl.control.kl import KL_KEY, make_reference_kl
from klrl.control.mlp import PolicyNet, ValueNet
from klrl.control.networks import Networks
from klrl.control.parts import ControlParts
from klrl.control.step import Columns, Problem, loss_terms
from klrl.kl.measure import AnnotatedReference
from klrl.kl.reference import freeze
from klrl.language import batch as layout
from klrl.language.advantage import make_token_advantage
from klrl.language.kl import CHARGED, make_token_kl
from klrl.language.parts import LanguageParts
from klrl.language.policy import Policy
from klrl.language.reference import CopiedReference
from klrl.language.rollout import STATES
from klrl.language.scoring import Layout
from klrl.language.value_head import ValueHead
from klrl.runs.checkpoint import Counters
from klrl.train.learner import Learned

DOUBLE = torch.float64
BOUND = 1e-12
Numbers = dict[str, Tensor]

# ------------------------------------------------------------------------------- the problem

#: How often each choice occurs in each context [D, V]: pi_old = COUNTS / G.
COUNTS = torch.tensor([[1, 2, 3, 2], [4, 1, 1, 2], [2, 2, 1, 3]])
D, V = COUNTS.shape
G = int(COUNTS[0].sum())
B = D * G
CONTEXT = torch.arange(D).repeat_interleave(G)
CHOSEN = torch.cat([torch.arange(V).repeat_interleave(row) for row in COUNTS])

_generator = torch.Generator().manual_seed(0)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator, dtype=DOUBLE)


#: Logits [D, V], a score for every choice in every context [D, V], and values [D].
OLD = COUNTS.to(DOUBLE).log()
THETA = OLD + 0.4 * _random(D, V)
REF = OLD + 0.5 * _random(D, V)
SCORE = _random(D, V)
OLD_VALUE = _random(D)
VALUE = OLD_VALUE + torch.tensor([0.05, -0.3, 0.2], dtype=DOUBLE)

COEF, BETA, LR = 0.3, 0.7, 3e-4
#: KL(old||new) after an update, for the rule that moves beta: above 1.5 times dtarg = 0.01.
FAR = 0.03


def chosen(table: Tensor) -> Tensor:
    """The entries of a table [D, V] for every row, [B]."""
    return table[CONTEXT, CHOSEN]


# --------------------------------------------------------------------------- the closed form


def the(table: dict[str, Any], group: str, name: str) -> Any:
    """What this test knows of a choice."""
    if name not in table:
        pytest.fail(f"{group}={name} is compared nowhere: write its closed form in this file")
    return table[name]


def log_p(logits: Tensor) -> Tensor:
    return logits - logits.logsumexp(-1, keepdim=True)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """sum_a p(a) log(p(a) / q(a)) of logits [D, V], [D]."""
    return (log_p(p).exp() * (log_p(p) - log_p(q))).sum(-1)


#: The estimators, of every choice [D, V], from the log-ratio [D, V] and the exact KL [D].
APPLIED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda r, exact: r,
    "k2": lambda r, exact: r * r / 2,
    "k3": lambda r, exact: 1 / r.exp() - 1 + r,
    "exact": lambda r, exact: exact[:, None].expand_as(r),
}
#: Whether the own step's KL stands in the reward, and whether in the loss.
CHARGES = {"reward": (True, False), "loss": (False, True), "split": (True, True)}
#: What of the own step's KL an advantage without a critic is charged with.
TO_GO = {"reward": 1.0, "loss": 0.0, "split": 0.0}
#: (estimator, placement); None where there is no reference.
REFERENCE: dict[str, Callable[[Any], tuple[str, str] | None]] = {
    "none": lambda c: None,
    "legacy": lambda c: ("k1", "reward"),
    "retrieve": lambda c: (c.estimator, c.placement),
}


def klpen_gain(c: Any, w: Tensor, advantage: Tensor, kl_old: Tensor) -> Tensor:
    return w * advantage - BETA * kl_old[:, None]


def clip_gain(c: Any, w: Tensor, advantage: Tensor, kl_old: Tensor) -> Tensor:
    near = w.clamp(1 - c.clip_epsilon, 1 + c.clip_epsilon)
    return torch.where(near * advantage < w * advantage, near * advantage, w * advantage)


#: loss -> what is gained by every choice [D, V].
GAIN = {"klpen": klpen_gain, "klpen_held": klpen_gain, "clip": clip_gain}
#: loss -> (beta, beta after an iteration that ended at FAR, line search, dtarg, target_kl).
TRUST = {
    "klpen": (BETA, 2 * BETA, "none", 0.01, None),
    "klpen_held": (BETA, BETA * math.sqrt(FAR / 0.01), "both", 0.01, None),
    "clip": (0.0, 0.0, "none", math.inf, None),
}
DISTANCE: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": lambda x: x.abs(),
    "l2": lambda x: x * x,
    "smooth_l1": lambda x: torch.where(x.abs() < 1, x * x / 2, x.abs() - 0.5),
}


def critic_distance(c: Any, value: Tensor, target: Tensor) -> Tensor:
    """[D, V], of values [D] and targets [D, V]; pessimistic where ``clip_value`` is set."""
    distance = the(DISTANCE, "loss.loss_critic_type", c.loss_critic_type)
    far = distance(value[:, None] - target)
    if c.clip_value is None:
        return far
    near = OLD_VALUE + (value - OLD_VALUE).clamp(-c.clip_value, c.clip_value)
    near = distance(near[:, None] - target)
    return torch.where(near > far, near, far)


def gae(c: Any, reward: Tensor, kl_to_go: Tensor) -> Tensor:
    """r - V(s): the step is terminated, so neither gamma nor lambda is seen."""
    return reward - OLD_VALUE[:, None]


def group(c: Any, reward: Tensor, kl_to_go: Tensor) -> Tensor:
    """Against the scores of the context's G rows; the KL to go after that."""
    mean = (COUNTS * SCORE).sum(-1, keepdim=True) / G
    if c.baseline == "leave_one_out":
        return SCORE - (G * mean - SCORE) / (G - 1) - COEF * kl_to_go
    variance = (COUNTS * (SCORE - mean) ** 2).sum(-1, keepdim=True) / (G - 1)
    return (SCORE - mean) / variance.sqrt() - COEF * kl_to_go


ADVANTAGE = {"gae": gae, "group": group}


def closed_form(config: JobConfig) -> Numbers:
    """Every number of the problem, by enumeration of its D x V choices."""
    c, critic = config.loss, config.advantage.name == "gae"
    share = COUNTS.to(DOUBLE) / B  # of the rows: a sum over [D, V] with it is a mean over rows

    def mean(table: Tensor) -> Tensor:
        return (share * table).sum()

    # the rollout: pi_old acts
    ratio, exact = log_p(OLD) - log_p(REF), kl(OLD, REF)
    charged = the(REFERENCE, "kl", config.kl.name)(config.kl)
    estimator, placement = charged or ("k1", "loss")
    applied = the(APPLIED, "kl.estimator", estimator)(ratio, exact)
    in_reward, in_loss = the(CHARGES, "kl.placement", placement)
    reward = SCORE - COEF * applied if in_reward else SCORE
    to_go = the(TO_GO, "kl.placement", placement) * applied
    advantage = the(ADVANTAGE, "advantage", config.advantage.name)(config.advantage, reward, to_go)
    numbers = {"reward": chosen(reward), "advantage": chosen(advantage)}
    if critic:
        numbers |= {"value_target": chosen(reward), "state_value": OLD_VALUE[CONTEXT]}
    measured = {}
    if charged:
        numbers |= {"ref_log_prob": chosen(log_p(REF))}
        if in_reward:
            numbers |= {"applied": chosen(applied)}
        measured = {name: mean(of(ratio, exact)) for name, of in APPLIED.items()}

    # the loss: pi_theta learns
    theta, value = THETA.clone().requires_grad_(), VALUE.clone().requires_grad_()
    if c.normalize_advantage:
        spread = (COUNTS * (advantage - mean(advantage)) ** 2).sum() / (B - 1)
        advantage = (advantage - mean(advantage)) / spread.sqrt()
    w, kl_old = (log_p(theta) - log_p(OLD)).exp(), kl(OLD, theta)
    beta, beta_after, line_search, dtarg, target_kl = the(TRUST, "loss", c.name)
    entropy = -(log_p(theta).exp() * log_p(theta)).sum(-1)
    terms = {
        "objective": -mean(the(GAIN, "loss", c.name)(c, w, advantage, kl_old)),
        "critic": torch.zeros((), dtype=DOUBLE),
        "entropy": -c.entropy_coeff * entropy.mean(),
        "kl_ref": torch.zeros((), dtype=DOUBLE),
    }
    if critic:
        distance = critic_distance(c, value, reward)
        terms["critic"] = c.critic_coeff * mean(distance)
    if charged and in_loss:
        # E_old[w k(r)] = E_theta[k(r)], the KL itself but for k2; the gradient is the KL's for all.
        exact_now = kl(theta, REF)
        number = mean(w * APPLIED[estimator](log_p(theta) - log_p(REF), exact_now)).detach()
        if estimator == "exact":
            number = exact_now.mean().detach()
        terms["kl_ref"] = COEF * (number + exact_now.mean() - exact_now.mean().detach())
    total = torch.stack(list(terms.values())).sum()
    gradients = torch.autograd.grad(total, [theta, value], allow_unused=True)
    numbers |= {f"loss/{name}": term for name, term in terms.items()}
    numbers |= {"loss/total": total, "gradient/logits": gradients[0]}
    if critic:
        numbers |= {"gradient/values": gradients[1]}
    numbers |= {
        "policy_entropy": entropy.mean(),
        "kl_old/minibatch": kl_old.mean(),
        "kl_old/rollout": kl_old.mean(),
    }
    numbers |= {f"measured/{name}": value for name, value in measured.items()}
    rule = {"beta": beta, "beta_after": beta_after, "dtarg": dtarg}
    rule |= {"target_kl": -1.0 if target_kl is None else target_kl}
    rule |= {"line_search": float(["none", "back", "both"].index(line_search))}
    numbers |= {
        f"trust/{name}": torch.tensor(number, dtype=DOUBLE) for name, number in rule.items()
    }

    # the row
    row = {
        "iteration": 1,
        "reward/episode": mean(SCORE),
        "reward/episode_length": 1,
        "reward/episodes": B,
        "reward/raw": mean(SCORE),
        "reward/shaped": mean(reward),
        "kl/ref/coef": COEF if charged else 0,
        "kl/ref/penalty": COEF * mean(applied) if charged and in_reward else 0,
        "kl/old/exact": kl_old.mean(),
        "policy/entropy": entropy.mean(),
        "learner/grad_norm": 2,
        "learner/lr": LR,
        "learner/epochs": 1,
        **{f"kl/ref/{name}": value for name, value in measured.items()},
        **{f"loss/{name}": terms[name] for name in ("objective", "critic", "entropy")},
    }
    if charged and in_loss:
        row["loss/kl_ref"] = terms["kl_ref"]
    if beta:
        row |= {"kl/old/beta": beta, "learner/alpha": 1}
    numbers |= {f"row/{k}": torch.as_tensor(v, dtype=DOUBLE) for k, v in row.items()}
    return {name: value.detach() for name, value in numbers.items()}


def in_row(row: dict[str, float], *own: str) -> Numbers:
    """A line of metrics.jsonl without its times and what only this domain records."""
    both = {k: v for k, v in row.items() if not k.startswith("time/") and k not in own}
    return {f"row/{name}": torch.tensor(value, dtype=DOUBLE) for name, value in both.items()}


def learned(numbers: Numbers) -> Learned:
    """What a learner would have told of an update that ends at THETA."""
    names = ("objective", "critic", "entropy", "kl_ref")
    terms = {name: float(numbers[f"loss/{name}"]) for name in names}
    return Learned(
        **terms,
        policy_entropy=float(numbers["policy_entropy"]),
        kl_old=float(numbers["kl_old/rollout"]),
        alpha=1.0,
        beta=float(numbers["trust/beta"]),
        grad_norm=2.0,
        lr=LR,
        epochs=1,
    )


def trust(learner: Any) -> Numbers:
    """What holds an update near pi_old, from a learner's loss and its rule."""
    loss, rule = learner.loss, learner.beta_rule
    numbers = {"beta": rule.beta, "dtarg": loss.dtarg, "target_kl": loss.target_kl or -1.0}
    numbers |= {"line_search": float(["none", "back", "both"].index(loss.line_search))}
    numbers |= {"beta_after": rule.update(FAR)}
    return {f"trust/{name}": torch.tensor(number, dtype=DOUBLE) for name, number in numbers.items()}


def counters() -> Counters:
    counted = Counters()
    counted.iteration, counted.frames = 1, B
    return counted


@torch.no_grad()
def load(
    policy_head: nn.Linear, value_head: nn.Linear | None, logits: Tensor, value: Tensor
) -> None:
    """Set the heads over one-hot features, so that their weights are the numbers themselves."""
    policy_head.weight.copy_(logits.T)
    if value_head is not None:
        value_head.weight.copy_(value[None])


# ------------------------------------------------------------------ control: what calls which


def control_agent() -> Agent:
    """Linear policy and critic over one-hot observations [D]; the trunk is the identity."""
    trunk = nn.Sequential(nn.Linear(D, D, bias=False))
    nn.init.eye_(trunk[0].weight)
    policy = PolicyNet(nn.Identity(), trunk, V, None).to(DOUBLE)
    value = ValueNet(nn.Identity(), trunk).to(DOUBLE)
    family = Categorical()
    sampler = ProbabilisticTensorDictModule(
        in_keys=list(family.param_keys),
        out_keys=["action"],
        distribution_class=family.distribution,
        return_log_prob=True,
    )
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(policy, ["observation"], list(family.param_keys)), sampler
    )
    critic = TensorDictModule(value, ["observation"], ["state_value"])
    return Agent(actor, critic, family, None)


def control_batch() -> TensorDict:
    """B episodes of one step [B, 1]."""
    ones, observation = torch.ones(B, 1, 1, dtype=torch.bool), one_hot(CONTEXT, D).to(DOUBLE)
    return TensorDict(
        {
            "observation": observation[:, None],
            "logits": OLD[CONTEXT][:, None],
            "action": CHOSEN[:, None],
            "action_log_prob": chosen(log_p(OLD))[:, None],
            "next": {
                "observation": torch.full((B, 1, D), 7.0, dtype=DOUBLE),
                "reward": chosen(SCORE)[:, None, None],
                "done": ones,
                "terminated": ones,
                "truncated": ~ones,
                "episode_reward": chosen(SCORE)[:, None, None],
                "step_count": ones.long(),
            },
        },
        [B, 1],
    )


def control_parts(config: Any) -> ControlParts:
    """The parts of a run as ControlParts builds them, but for the environment."""
    parts = ControlParts.__new__(ControlParts)
    parts.config, parts.agent = config, control_agent()
    heads = parts.agent.policy_net.head, parts.agent.value_net.head
    load(*heads, REF, VALUE)
    parts.reference = freeze(parts.agent.actor)
    parts.kl = make_reference_kl(config.kl, parts.agent.actor, AnnotatedReference(parts.reference))
    parts.estimate_advantage = factory("advantage", config.advantage, CONTROL)(
        config.advantage, parts.agent.critic, config.env.reward_scale
    )
    estimator = None if parts.kl is None else parts.kl.loss_estimator
    parts.learner = Learner(config, parts.agent, estimator)
    load(*heads, OLD, OLD_VALUE)
    return parts


def control_loss(parts: ControlParts, batch: TensorDict) -> Numbers:
    """One minibatch of all rows.

    A run packs a minibatch into float32 (``Columns``), and a step gives float32 metrics. The loss
    is taken where its type is free: of the frames as they are before they are packed.
    """
    learner, agent = parts.learner, parts.agent
    heads = agent.policy_net.head, agent.value_net.head
    load(*heads, THETA, VALUE)
    frames = learner._flatten(batch)
    if "old_sample" in learner.loss.draw(frames):
        frames["old_sample"] = CHOSEN[:, None]  # for the draws of pi_old, its own choices
    problem = Problem(agent, learner.loss, learner.optimizer.settings, columns=Columns({}))
    coefficients = torch.tensor([LR, learner.beta_rule.beta, COEF], dtype=DOUBLE)
    outputs = Networks(agent)(frames["observation"])
    terms = loss_terms(problem, outputs, frames, coefficients)
    gradients = torch.autograd.grad(terms.total, [head.weight for head in heads])
    means = [float(frame.detach().mean()) for frame in terms.frames]
    named = dict(zip(learner.loss.measures, means, strict=True))
    weighted = learner.loss.weighted(named, B, COEF)
    entropy = torch.tensor(weighted.pop("policy_entropy"), dtype=DOUBLE)
    return {
        **{f"loss/{k}": torch.tensor(v, dtype=DOUBLE) for k, v in weighted.items()},
        "loss/total": terms.total.detach(),
        "gradient/logits": gradients[0].T,
        "gradient/values": gradients[1][0],
        "policy_entropy": entropy,
        "kl_old/minibatch": torch.tensor(named["kl_old"], dtype=DOUBLE),
        "kl_old/rollout": torch.tensor(learner.kl_old(frames), dtype=DOUBLE),
    }


def control(config: JobConfig) -> Numbers:
    """The numbers of a control job."""
    parts, batch = control_parts(config), control_batch()
    measured = parts.charge_kl(batch)
    parts.estimate_advantage(batch)
    numbers = {"reward": batch["next", "reward"]}
    for key in ("advantage", "value_target", "state_value"):
        numbers[key] = batch[key]
    if parts.kl is not None:
        numbers["ref_log_prob"] = batch["ref", "log_prob"]
        if parts.kl.transform is not None:
            numbers["applied"] = batch["next", KL_KEY]
    numbers = {name: value.flatten() for name, value in numbers.items()}
    numbers |= {f"measured/{name}": value for name, value in measured.items()}
    numbers |= control_loss(parts, batch) | trust(parts.learner)
    row = parts.row(counters(), batch, measured, learned(numbers), seconds=1.0)
    return numbers | in_row(row, "frames")


# ----------------------------------------------------------------- language: what calls which


class OneHotStates(nn.Module):
    """After a prompt's last token, V + context, the one-hot context; elsewhere garbage: padding."""

    def __init__(self) -> None:
        super().__init__()
        garbage = torch.full((V, D), 1e3, dtype=DOUBLE)
        self.register_buffer("of_token", torch.cat([garbage, torch.eye(D, dtype=DOUBLE)]))

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.of_token[input_ids])


class OneHotLM(nn.Module):
    """A causal LM whose next token depends on the last one alone."""

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=D))

    def __init__(self) -> None:
        super().__init__()
        self.base_model = OneHotStates()
        self.head = nn.Linear(D, V, bias=False, dtype=DOUBLE)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def language_batch(fill: float | None) -> TensorDict:
    """B responses of one token; where ``fill`` is given, a second position holds it as padding."""
    width = 1 if fill is None else 2
    prompt = torch.stack([torch.zeros(D, dtype=torch.long), V + torch.arange(D)], 1)
    tokens = torch.full((B, width), V - 1)
    tokens[:, 0] = CHOSEN
    real = torch.zeros(B, width, dtype=torch.bool)
    real[:, 0] = True
    log_probs = torch.zeros(B, width, dtype=DOUBLE)
    log_probs[:, 0] = chosen(log_p(OLD))
    done = torch.zeros(B, dtype=torch.bool)
    responses = layout.Responses(tokens, real, log_probs, truncated=done)
    batch = layout.make_batch(prompt, torch.ones_like(prompt), responses, G)
    layout.set_scores(batch, chosen(SCORE))
    states = torch.zeros(B, width, D, dtype=DOUBLE)
    states[:, 0] = one_hot(CONTEXT, D)
    batch[STATES] = states
    return batch


def spoil(batch: TensorDict, fill: float | None) -> None:
    """Put ``fill`` wherever a number stands behind a response's only token."""
    if fill is None:
        return
    for key in batch.keys(include_nested=True, leaves_only=True):
        value = batch[key]
        if value.is_floating_point() and value.ndim > 1 and value.shape[1] > 1:
            value[:, -1] = fill


def language_parts(config: Any, fill: float | None) -> LanguageParts:
    """The parts of a run as LanguageParts builds them, but for the files and the preflight."""
    parts = LanguageParts.__new__(LanguageParts)
    model = OneHotLM()
    critic = ValueHead(model) if config.advantage.name == "gae" else None
    parts.config, parts.policy = config, Policy(SimpleNamespace(model=model), None, critic)
    load(model.head, None, REF, VALUE)
    frozen = freeze(model)
    if fill is not None:
        # Of pi_ref alone: NaN in the learning policy's states would reach its weights by itself.
        frozen.base_model.of_token[:V] = fill
    parts.reference = None if config.kl.name == "none" else CopiedReference(frozen)
    padded = Layout(G, shared=False, reason="")
    parts.ways = SimpleNamespace(policy=padded, reference=padded)
    parts.kl = make_token_kl(config.kl)
    parts.estimate_advantage = make_token_advantage(config, parts.policy, parts.kl)
    estimator = None if parts.kl is None else parts.kl.loss_estimator
    parts.learner = LanguageLearner(config, parts.policy, padded, parts.reference, estimator)
    load(model.head, None if critic is None else critic.linear, OLD, OLD_VALUE)
    return parts


def language_loss(parts: LanguageParts, batch: TensorDict) -> Numbers:
    """One minibatch of all rows."""
    learner, policy = parts.learner, parts.policy
    critic = None if policy.value_head is None else policy.value_head.linear
    learner._old_head = learner._keep_head()  # as an update starts
    load(policy.model.head, critic, THETA, VALUE)
    terms = learner.loss_terms(batch, COEF)
    heads = [policy.model.head] if critic is None else [policy.model.head, critic]
    gradients = torch.autograd.grad(terms["total"], [head.weight for head in heads])
    names = ("total", "objective", "critic", "entropy", "kl_ref")
    numbers = {f"loss/{name}": terms[name].detach() for name in names}
    if critic is not None:
        numbers["gradient/values"] = gradients[1][0]
    return numbers | {
        "gradient/logits": gradients[0].T,
        "policy_entropy": terms["policy_entropy"],
        "kl_old/minibatch": terms["kl_old"],
        "kl_old/rollout": torch.tensor(learner.kl_old(batch), dtype=DOUBLE),
    }


def language(config: JobConfig, fill: float | None = None) -> Numbers:
    """The numbers of a language job; with ``fill`` its rows end in a position of padding."""
    parts, batch = language_parts(config, fill), language_batch(fill)
    spoil(batch, fill)
    measured = parts.charge_kl(batch)
    spoil(batch, fill)
    parts.estimate_advantage(batch)
    spoil(batch, fill)
    numbers = {"reward": batch[layout.REWARD][:, 0], "advantage": batch["advantage"][:, 0]}
    if parts.policy.value_head is not None:
        numbers |= {key: batch[key][:, 0] for key in ("value_target", "state_value")}
    if parts.kl is not None:
        numbers["ref_log_prob"] = layout.on_response(batch, layout.REF_LOG_PROBS)[:, 0]
        if parts.kl.placement != "loss":
            numbers["applied"] = batch[CHARGED][:, 0]
    numbers = {name: value.flatten() for name, value in numbers.items()}
    per_response = {f"{name}_seq" for name in ESTIMATORS}  # of one token: the same again
    for name in per_response & set(measured):
        assert close(measured[name], measured[name.removesuffix("_seq")])
    numbers |= {f"measured/{k}": v for k, v in measured.items() if k not in per_response}
    numbers |= language_loss(parts, batch) | trust(parts.learner)
    row = parts.row(counters(), batch, measured, learned(numbers), seconds=1.0)
    own = {f"kl/ref/{name}" for name in per_response} | {"samples", "reward/truncated"}
    return numbers | in_row(row, *own)


# ------------------------------------------------------------------------------ the settings

COMPOSER = Composer()
JOB = {
    CONTROL: ("env=cartpole", "env.normalize_observation=false", "learner.minibatches=1"),
    LANGUAGE: (
        "experiment=sort_digits",
        f"collector.prompts={D}",
        f"collector.group_size={G}",
        "learner.minibatches=1",
    ),
}
#: Two ways to set all else. On one token ``sequence`` is the mean that ``token`` is.
SHARED = {
    "plain": ("loss.normalize_advantage=false", "loss.entropy_coeff=0.05"),
    "other": ("loss.normalize_advantage=true", "loss.entropy_coeff=0.1"),
}
ADVANTAGE_WORDS = {
    "gae": {
        "plain": ("loss.critic_coeff=0.4", "loss.loss_critic_type=l2"),
        "other": (
            "loss.critic_coeff=0.6",
            "loss.loss_critic_type=smooth_l1",
            "loss.clip_value=0.1",
        ),
    },
    "group": {
        "plain": ("advantage.baseline=normalized",),
        "other": ("advantage.baseline=leave_one_out",),
    },
}
REDUCTION = {
    CONTROL: {"plain": "mean", "other": "mean"},
    LANGUAGE: {"plain": "token", "other": "sequence"},
}


def kl_words() -> Iterator[str]:
    """Every choice of ``kl``, and of kl=retrieve every pair that is not refused."""
    for name in CHOICES["kl"]:
        if name != "retrieve":
            yield f"kl={name}" + (f" kl.coef={COEF}" if name != "none" else "")
            continue
        for placement, estimator in itertools.product(PLACEMENTS, ESTIMATORS):
            verdict = VERDICTS[placement][estimator]
            if verdict is not Gradient.TWICE:
                biased = " kl.allow_biased=true" if verdict is Gradient.WRONG else ""
                pair = f"kl.placement={placement} kl.estimator={estimator}"
                yield f"kl=retrieve kl.coef={COEF} {pair}{biased}"


@cache
def job(domain: str, loss: str, kl: str, advantage: str, settings: str, *more: str) -> JobConfig:
    """A job of these choices, composed and checked as a user's."""
    has = {field.name for field in fields(CHOICES["loss"][loss].schema)}
    words = [*JOB[domain], f"loss={loss}", f"loss.reduction={REDUCTION[domain][settings]}"]
    words += [f"loss.beta={BETA}"] if "beta" in has else []
    words += ["loss.kl_old=sampled"] if "kl_old" in has and settings == "other" else []
    words += [f"advantage={advantage}", *the(ADVANTAGE_WORDS, "advantage", advantage)[settings]]
    return checked_config([*words, *SHARED[settings], *kl.split(), *more], COMPOSER, None)


NUMBERS: dict[str, Callable[[JobConfig], Numbers]] = {CONTROL: control, LANGUAGE: language}


def domains(**chosen: str) -> list[str]:
    """Those that have all of these choices."""
    return [d for d in JOB if all(name in choices_for(g, d) for g, name in chosen.items())]


def close(a: Tensor, b: Tensor) -> bool:
    """Within the bound everywhere; a NaN never is."""
    return a.shape == b.shape and bool(((a == b) | ((a - b).abs() < BOUND)).all())


def assert_same(found: Numbers, expected: Numbers) -> None:
    """The same names and numbers."""
    assert set(found) == set(expected)
    off = [name for name in found if not close(found[name], expected[name])]
    far = {name: float((found[name] - expected[name]).abs().max()) for name in off}
    assert not far, f"largest differences: {far}"


LOSS = pytest.mark.parametrize("loss", CHOICES["loss"])
KL = pytest.mark.parametrize("kl", list(kl_words()))
EITHER = pytest.mark.parametrize("advantage", CHOICES["advantage"])
SETTINGS = pytest.mark.parametrize("settings", SHARED)


@LOSS
@KL
@EITHER
@SETTINGS
def test_control_and_language_give_the_same_numbers(loss, kl, advantage, settings) -> None:
    """Loss, gradient, reward, advantage, measures, row: the closed form's, and each other's."""
    having = domains(loss=loss, kl=kl.split()[0].partition("=")[2], advantage=advantage)
    jobs = {domain: job(domain, loss, kl, advantage, settings) for domain in having}
    found = {domain: NUMBERS[domain](config) for domain, config in jobs.items()}
    for domain in having:
        assert_same(found[domain], closed_form(jobs[domain]))
    if len(having) == 2:
        assert_same(found[CONTROL], found[LANGUAGE])


@LOSS
@KL
@EITHER
@SETTINGS
def test_padding_changes_no_number(loss, kl, advantage, settings) -> None:
    """A response's second position is padding: whatever stands there counts nowhere."""
    config = job(LANGUAGE, loss, kl, advantage, settings)
    expected = closed_form(config)
    for fill in (1e3, math.nan):
        assert_same(language(config, fill), expected)


@LOSS
def test_without_a_bonus_entropies_differ(loss) -> None:
    """Control measures pi_theta's; language pi_old's, which its own tokens give at no cost."""
    expected = {CONTROL: THETA, LANGUAGE: OLD}
    for domain, logits in expected.items():
        config = job(domain, loss, "kl=none", "gae", "plain", "loss.entropy_coeff=0")
        found = NUMBERS[domain](config)
        entropy = -(log_p(logits).exp() * log_p(logits)).sum(-1).mean()
        assert close(found["policy_entropy"], entropy), domain
        assert found["loss/entropy"] == 0


def test_a_choice_without_a_closed_form_is_named() -> None:
    config = job(CONTROL, "clip", "kl=none", "gae", "plain")
    spo = replace(config, loss=replace(config.loss, name="spo"))
    with pytest.raises(pytest.fail.Exception, match="loss=spo is compared nowhere"):
        closed_form(spo)
