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
from dataclasses import dataclass, fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
from klrl.control.kl import KL_KEY
from klrl.control.mlp import PolicyNet, ValueNet
from klrl.control.networks import Networks
from klrl.control.parts import ControlParts
from klrl.control.step import Columns, Problem, loss_terms
from klrl.control.update import ControlSteps
from klrl.domains import domain_of
from klrl.language import batch as layout
from klrl.language.advantage import make_token_advantage
from klrl.language.kl import CHARGED, make_reference_kl
from klrl.language.parts import LanguageParts
from klrl.language.policy import Policy
from klrl.language.rollout import STATES
from klrl.language.scoring import Layout
from klrl.language.update import LanguageSteps
from klrl.language.value_head import ValueHead
from klrl.losses.policy import LossTerms
from klrl.runs.checkpoint import Counters
from klrl.train.learner import Coefficients, Learned, Learner
from klrl.train.loop import Parts, Training

DOUBLE, CPU = torch.float64, torch.device("cpu")
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

COEF, BETA, LR, GRAD_NORM = 0.3, 0.7, 3e-4, 2.0
#: KL(old||new) after an update, for the rule that moves beta: above 1.5 times dtarg = 0.01.
FAR = 0.03


def chosen(table: Tensor) -> Tensor:
    """The entries of a table [D, V] for every row, [B]."""
    return table[CONTEXT, CHOSEN]


# --------------------------------------------------------------------------- the closed form


def known(table: dict[str, Any], group: str, name: str) -> Any:
    """What this file says of a choice."""
    if name not in table:
        pytest.fail(f"{group}={name} is compared nowhere: write its closed form in this file")
    return table[name]


def log_p(logits: Tensor) -> Tensor:
    return logits - logits.logsumexp(-1, keepdim=True)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """sum_a p(a) log(p(a) / q(a)) of logits [D, V], [D]."""
    return (log_p(p).exp() * (log_p(p) - log_p(q))).sum(-1)


def entropy(p: Tensor) -> Tensor:
    """-sum_a p(a) log p(a) of logits [D, V], [D]."""
    return -(log_p(p).exp() * log_p(p)).sum(-1)


def mean(table: Tensor) -> Tensor:
    """Over rows of a table [D, V]: the expectation under pi_old, contexts alike."""
    return (COUNTS * table).sum() / B


#: What an estimator gives for every choice [D, V], from its log-ratio [D, V] and the exact KL [D].
ESTIMATE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda ratio, exact: ratio,
    "k2": lambda ratio, exact: ratio * ratio / 2,
    "k3": lambda ratio, exact: 1 / ratio.exp() - 1 + ratio,
    "exact": lambda ratio, exact: exact[:, None].expand_as(ratio),
}


@dataclass(frozen=True)
class Charge:
    """Where a placement charges the KL of the only step.

    ``to_go``: whether an advantage without a critic, which reads the score, is charged with it.
    """

    reward: bool
    loss: bool
    to_go: bool


PLACED = {
    "reward": Charge(reward=True, loss=False, to_go=True),
    "loss": Charge(reward=False, loss=True, to_go=False),
    "split": Charge(reward=True, loss=True, to_go=False),
}
#: kl -> (estimator, placement); None where there is no reference.
REFERENCE: dict[str, Callable[[Any], tuple[str, str] | None]] = {
    "none": lambda c: None,
    "legacy": lambda c: ("k1", "reward"),
    "retrieve": lambda c: (c.estimator, c.placement),
}


def charge_of(config: JobConfig) -> tuple[str | None, Charge]:
    """(the estimator, None for kl=none; where it is charged)."""
    pair = known(REFERENCE, "kl", config.kl.name)(config.kl)
    if pair is None:
        return None, Charge(reward=False, loss=False, to_go=False)
    return pair[0], known(PLACED, "kl.placement", pair[1])


def gae(c: Any, reward: Tensor, kl_to_go: Tensor) -> Tensor:
    """r - V(s): the step is terminated, so neither gamma nor lambda counts."""
    return reward - OLD_VALUE[:, None]


def group(c: Any, reward: Tensor, kl_to_go: Tensor) -> Tensor:
    """Against the scores of the context's G rows; then the KL to go."""
    average = (COUNTS * SCORE).sum(-1, keepdim=True) / G
    if c.baseline == "leave_one_out":
        return SCORE - (G * average - SCORE) / (G - 1) - COEF * kl_to_go
    variance = (COUNTS * (SCORE - average) ** 2).sum(-1, keepdim=True) / (G - 1)
    return (SCORE - average) / variance.sqrt() - COEF * kl_to_go


ADVANTAGE = {"gae": gae, "group": group}


def rollout_numbers(config: JobConfig) -> Numbers:
    """What pi_old's choices are worth: reward and advantage of each, tables [D, V]; the KLs."""
    estimator, charge = charge_of(config)
    ratio, exact = log_p(OLD) - log_p(REF), kl(OLD, REF)
    applied = known(ESTIMATE, "kl.estimator", estimator or "k1")(ratio, exact)
    reward = SCORE - COEF * applied * charge.reward
    advantage = known(ADVANTAGE, "advantage", config.advantage.name)
    numbers = {
        "reward": reward,
        "advantage": advantage(config.advantage, reward, applied * charge.to_go),
    }
    if config.advantage.name == "gae":
        numbers |= {"value_target": reward, "state_value": OLD_VALUE[:, None].expand(D, V)}
    if estimator is not None:
        numbers["ref_log_prob"] = log_p(REF)
        for name, estimate in ESTIMATE.items():
            numbers[f"measured/{name}"] = mean(estimate(ratio, exact))
    if charge.reward:
        numbers["applied"] = applied
    return numbers


def klpen_gain(c: Any, w: Tensor, advantage: Tensor, kl_old: Tensor) -> Tensor:
    return w * advantage - BETA * kl_old[:, None]


def clip_gain(c: Any, w: Tensor, advantage: Tensor, kl_old: Tensor) -> Tensor:
    near = w.clamp(1 - c.clip_epsilon, 1 + c.clip_epsilon)
    return torch.where(near * advantage < w * advantage, near * advantage, w * advantage)


#: loss -> what is gained by every choice [D, V].
GAIN = {"klpen": klpen_gain, "klpen_held": klpen_gain, "clip": clip_gain}
DISTANCE: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": lambda x: x.abs(),
    "l2": lambda x: x * x,
    "smooth_l1": lambda x: torch.where(x.abs() < 1, x * x / 2, x.abs() - 0.5),
}


def critic_distance(c: Any, value: Tensor, target: Tensor) -> Tensor:
    """[D, V], of values [D] and targets [D, V]; the larger one where ``clip_value`` is set."""
    distance = known(DISTANCE, "loss.loss_critic_type", c.loss_critic_type)
    far = distance(value[:, None] - target)
    if c.clip_value is None:
        return far
    near = OLD_VALUE + (value - OLD_VALUE).clamp(-c.clip_value, c.clip_value)
    near = distance(near[:, None] - target)
    return torch.where(near > far, near, far)


def reference_kl(estimator: str, theta: Tensor) -> Tensor:
    """What the loss charges: the estimator's expectation, with the gradient of the KL itself.

    E_old[w k(r)] = E_theta[k(r)] is the KL for k1 and k3, but not for k2.
    """
    exact, ratio = kl(theta, REF), log_p(theta) - log_p(REF)
    number = (log_p(theta).exp() * ESTIMATE[estimator](ratio, exact)).sum(-1).mean()
    return number.detach() + exact.mean() - exact.mean().detach()


def loss_numbers(config: JobConfig, advantage: Tensor, target: Tensor) -> Numbers:
    """The loss of a minibatch of all rows, its terms and its gradients."""
    c, (estimator, charge) = config.loss, charge_of(config)
    theta, value = THETA.clone().requires_grad_(), VALUE.clone().requires_grad_()
    if c.normalize_advantage:
        spread = (COUNTS * (advantage - mean(advantage)) ** 2).sum() / (B - 1)
        advantage = (advantage - mean(advantage)) / spread.sqrt()
    w, kl_old = (log_p(theta) - log_p(OLD)).exp(), kl(OLD, theta)
    terms = dict.fromkeys(("objective", "critic", "entropy", "kl_ref"), torch.zeros(()).to(DOUBLE))
    terms["objective"] = -mean(known(GAIN, "loss", c.name)(c, w, advantage, kl_old))
    terms["entropy"] = -c.entropy_coeff * entropy(theta).mean()
    if config.advantage.name == "gae":
        terms["critic"] = c.critic_coeff * mean(critic_distance(c, value, target))
    if estimator is not None and charge.loss:
        terms["kl_ref"] = COEF * reference_kl(estimator, theta)
    total = torch.stack(list(terms.values())).sum()
    of_logits, of_values = torch.autograd.grad(total, [theta, value], allow_unused=True)
    numbers = {f"loss/{name}": term for name, term in terms.items()}
    numbers |= {"loss/total": total, "gradient/logits": of_logits}
    if of_values is not None:
        numbers["gradient/values"] = of_values
    numbers |= {"kl_old/minibatch": kl_old.mean(), "kl_old/rollout": kl_old.mean()}
    return numbers | {"policy_entropy": entropy(theta).mean()}


#: loss -> (beta, beta after an iteration that ended at FAR, line search, dtarg, target_kl).
TRUST_REGION = {
    "klpen": (BETA, 2 * BETA, "none", 0.01, None),
    "klpen_held": (BETA, BETA * math.sqrt(FAR / 0.01), "both", 0.01, None),
    "clip": (0.0, 0.0, "none", math.inf, None),
}


def trust_region(
    beta: float, after: float, line_search: str, dtarg: float, target_kl: float | None
) -> Numbers:
    """What holds an update near pi_old, as numbers."""
    numbers = {"beta": beta, "beta_after": after, "dtarg": dtarg, "target_kl": target_kl or -1.0}
    numbers["line_search"] = float(["none", "back", "both"].index(line_search))
    return {f"trust/{name}": torch.tensor(n, dtype=DOUBLE) for name, n in numbers.items()}


def row_numbers(config: JobConfig, numbers: Numbers) -> Numbers:
    """The line of metrics.jsonl: the same numbers under their names."""
    estimator, charge = charge_of(config)
    row = {
        "iteration": 1,
        "reward/episode": mean(SCORE),
        "reward/episode_length": 1,
        "reward/episodes": B,
        "reward/raw": mean(SCORE),
        "reward/shaped": mean(numbers["reward"]),
        "kl/ref/coef": 0 if estimator is None else COEF,
        "kl/ref/penalty": COEF * mean(numbers["applied"]) if charge.reward else 0,
        "kl/old/exact": numbers["kl_old/rollout"],
        "policy/entropy": numbers["policy_entropy"],
        "learner/grad_norm": GRAD_NORM,
        "learner/lr": LR,
        "learner/epochs": 1,
    }
    terms = ["objective", "critic", "entropy", *(["kl_ref"] if charge.loss else [])]
    row |= {f"loss/{name}": numbers[f"loss/{name}"] for name in terms}
    if estimator is not None:
        row |= {f"kl/ref/{name}": numbers[f"measured/{name}"] for name in ESTIMATE}
    if numbers["trust/beta"]:
        row |= {"kl/old/beta": numbers["trust/beta"], "learner/alpha": 1}
    return {f"row/{name}": torch.as_tensor(n, dtype=DOUBLE) for name, n in row.items()}


def closed_form(config: JobConfig) -> Numbers:
    """Every number of the problem, by enumeration of its D x V choices."""
    numbers = rollout_numbers(config)
    numbers |= loss_numbers(config, numbers["advantage"], numbers["reward"])
    numbers |= trust_region(*known(TRUST_REGION, "loss", config.loss.name))
    numbers |= row_numbers(config, numbers)
    per_row = {name for name, n in numbers.items() if n.ndim == 2 and "gradient" not in name}
    numbers |= {name: chosen(numbers[name]) for name in per_row}
    return {name: n.detach() for name, n in numbers.items()}


# ---------------------------------------------------------------- what both domains hand over


def learned(numbers: Numbers) -> Learned:
    """What a learner tells of an update that ends at THETA."""
    names = ("objective", "critic", "entropy", "kl_ref")
    terms = {name: float(numbers[f"loss/{name}"]) for name in names}
    return Learned(
        **terms,
        policy_entropy=float(numbers["policy_entropy"]),
        kl_old=float(numbers["kl_old/rollout"]),
        alpha=1.0,
        beta=float(numbers["trust/beta"]),
        grad_norm=GRAD_NORM,
        lr=LR,
        epochs=1,
    )


def minibatch(learner: Learner, terms: LossTerms, mask: Tensor | None, kl_old: float) -> Numbers:
    """The terms of a minibatch as a learner tells them; KL(old||new) of the whole rollout."""
    loss = learner.loss
    measured = loss.measure(tuple(value.detach() for value in terms.measured), mask)
    means = dict(zip(loss.measures, measured.tolist(), strict=True))
    weighted = loss.weighted(means, COEF)
    numbers = {"policy_entropy": weighted.pop("policy_entropy")}
    numbers |= {f"loss/{name}": value for name, value in weighted.items()}
    numbers |= {"loss/total": float(terms.total.detach())}
    numbers |= {"kl_old/minibatch": means["kl_old"], "kl_old/rollout": kl_old}
    return {name: torch.tensor(value, dtype=DOUBLE) for name, value in numbers.items()}


def trust_region_of(learner: Learner) -> Numbers:
    """The same of a learner's loss and rule; beta moves."""
    loss, rule = learner.loss, learner.beta_rule
    beta = rule.beta
    return trust_region(beta, rule.update(FAR), loss.line_search, loss.dtarg, loss.target_kl)


def row_of(parts: Any, batch: TensorDict, measured: Any, numbers: Numbers, *own: str) -> Numbers:
    """A line of metrics.jsonl without its times and what only this domain records."""
    training = Training.__new__(Training)
    training.config, training.parts, training.domain = parts.config, parts, domain_of(parts.config)
    training.counters = Counters()
    training.counters.iteration, training.counters.frames = 1, B
    row = training.make_row(batch, measured, learned(numbers), seconds=1.0)
    both = {k: v for k, v in row.items() if not k.startswith("time/") and k not in own}
    return {f"row/{name}": torch.tensor(value, dtype=DOUBLE) for name, value in both.items()}


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
    Parts.__init__(parts, config, CPU)
    parts.config, parts.agent = config, control_agent()
    heads = parts.agent.policy_net.head, parts.agent.value_net.head
    load(*heads, REF, VALUE)
    parts.reference = parts._make_reference(None)
    parts.kl = parts._make_kl()
    parts.estimate_advantage = factory("advantage", config.advantage, CONTROL)(
        config.advantage, parts.agent.critic, config.env.reward_scale
    )
    estimator = None if parts.kl is None else parts.kl.loss_estimator
    parts.learner = Learner(config, ControlSteps(config, parts.agent, estimator))
    load(*heads, OLD, OLD_VALUE)
    return parts


def control_loss(parts: ControlParts, batch: TensorDict) -> Numbers:
    """One minibatch of all rows.

    A run packs a minibatch into float32 (``Columns``), and a step gives float32 metrics. The loss
    is taken where its type is free: of the frames as they are before they are packed.
    """
    steps, agent = parts.learner.steps, parts.agent
    heads = agent.policy_net.head, agent.value_net.head
    load(*heads, THETA, VALUE)
    frames = steps.lay_out(batch)
    if steps.loss.kl_old == "sampled":
        frames["old_sample"] = CHOSEN[:, None]  # for the draws of pi_old, its own choices
    problem = Problem(agent, steps.loss, steps.optimizer.settings, columns=Columns({}))
    coefficients = torch.tensor([LR, parts.learner.beta_rule.beta, COEF], dtype=DOUBLE)
    terms = loss_terms(problem, Networks(agent)(frames["observation"]), frames, coefficients)
    gradients = torch.autograd.grad(terms.total, [head.weight for head in heads])
    return minibatch(parts.learner, terms, None, steps.kl_old(frames)) | {
        "gradient/logits": gradients[0].T,
        "gradient/values": gradients[1][0],
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
        if parts.kl.charges_reward:
            numbers["applied"] = batch["next", KL_KEY]
    numbers = {name: value.flatten() for name, value in numbers.items()}
    numbers |= {f"measured/{name}": value for name, value in measured.items()}
    numbers |= control_loss(parts, batch) | trust_region_of(parts.learner)
    return numbers | row_of(parts, batch, measured, numbers, "frames")


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
    Parts.__init__(parts, config, CPU)
    model = OneHotLM()
    critic = ValueHead(model) if config.advantage.name == "gae" else None
    parts.config, parts.policy = config, Policy(SimpleNamespace(model=model), None, critic)
    load(model.head, None, REF, VALUE)
    parts.reference = parts._make_reference(None)
    if parts.reference is not None and fill is not None:
        # Of pi_ref alone: NaN in the learning policy's states would reach its weights by itself.
        parts.reference.module.base_model.of_token[:V] = fill
    padded = Layout(G, shared=False, reason="")
    parts.layouts = SimpleNamespace(policy=padded, reference=padded)
    parts.kl = make_reference_kl(config.kl)
    parts.estimate_advantage = make_token_advantage(config, parts.policy, parts.kl)
    estimator = None if parts.kl is None else parts.kl.loss_estimator
    steps = LanguageSteps(config, parts.policy, padded, parts.reference, estimator)
    parts.learner = Learner(config, steps)
    load(model.head, None if critic is None else critic.linear, OLD, OLD_VALUE)
    return parts


def language_loss(parts: LanguageParts, batch: TensorDict) -> Numbers:
    """One minibatch of all rows."""
    steps, policy = parts.learner.steps, parts.policy
    critic = None if policy.value_head is None else policy.value_head.linear
    batch = steps.lay_out(batch)
    load(policy.model.head, critic, THETA, VALUE)
    terms = steps.loss_terms(batch, Coefficients(LR, parts.learner.beta_rule.beta, COEF))
    heads = [policy.model.head] if critic is None else [policy.model.head, critic]
    gradients = torch.autograd.grad(terms.total, [head.weight for head in heads])
    mask = layout.response_mask(batch)
    numbers = minibatch(parts.learner, terms, mask, steps.kl_old(batch))
    if critic is not None:
        numbers["gradient/values"] = gradients[1][0]
    return numbers | {"gradient/logits": gradients[0].T}


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
        if parts.kl.charges_reward:
            numbers["applied"] = batch[CHARGED][:, 0]
    numbers = {name: value.flatten() for name, value in numbers.items()}
    per_response = {f"{name}_seq" for name in ESTIMATORS}  # of one token: the same again
    for name in per_response & set(measured):
        assert close(measured[name], measured[name.removesuffix("_seq")])
    numbers |= {f"measured/{k}": v for k, v in measured.items() if k not in per_response}
    numbers |= language_loss(parts, batch) | trust_region_of(parts.learner)
    own = {f"kl/ref/{name}" for name in per_response} | {"samples", "reward/truncated"}
    return numbers | row_of(parts, batch, measured, numbers, *own)


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
    words += [f"advantage={advantage}", *known(ADVANTAGE_WORDS, "advantage", advantage)[settings]]
    return checked_config([*words, *SHARED[settings], *kl.split(), *more], COMPOSER, None)


NUMBERS: dict[str, Callable[[JobConfig], Numbers]] = {CONTROL: control, LANGUAGE: language}


def domains(**chosen: str) -> list[str]:
    """Those that have all of these choices."""
    return [d for d in JOB if all(name in choices_for(g, d) for g, name in chosen.items())]


def close(a: Tensor, b: Tensor) -> bool:
    """Within the bound everywhere; a NaN never is."""
    return a.shape == b.shape and bool(((a == b) | ((a - b).abs() < BOUND)).all())


def assert_same(numbers: Numbers, expected: Numbers) -> None:
    """The same names and numbers."""
    assert set(numbers) == set(expected)
    wrong = [name for name in numbers if not close(numbers[name], expected[name])]
    far = {name: float((numbers[name] - expected[name]).abs().max()) for name in wrong}
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
    numbers = {domain: NUMBERS[domain](config) for domain, config in jobs.items()}
    for domain in having:
        assert_same(numbers[domain], closed_form(jobs[domain]))
    if len(having) == 2:
        assert_same(numbers[CONTROL], numbers[LANGUAGE])


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
    for domain, logits in {CONTROL: THETA, LANGUAGE: OLD}.items():
        config = job(domain, loss, "kl=none", "gae", "plain", "loss.entropy_coeff=0")
        numbers = NUMBERS[domain](config)
        assert close(numbers["policy_entropy"], entropy(logits).mean()), domain
        assert numbers["loss/entropy"] == 0


def test_a_choice_without_a_closed_form_is_named() -> None:
    config = job(CONTROL, "clip", "kl=none", "gae", "plain")
    spo = replace(config, loss=replace(config.loss, name="spo"))
    with pytest.raises(pytest.fail.Exception, match="loss=spo is compared nowhere"):
        closed_form(spo)
