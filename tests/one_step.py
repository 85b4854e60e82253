"""One step and one token, worked out by enumeration: what a run of either domain must give.

The problem: D contexts (observations, prompts) and V choices (actions, tokens). An episode is one
terminated step, a response one token. The policy samples as pi_old, its gradient steps are taken at
pi_theta, and pi_ref is the reference.

Every choice occurs as often as pi_old takes it: p = counts / 8 and 8 rows a context. So a mean over
rows *is* the expectation under pi_old, and :func:`closed_form` is an enumeration: of the loss's
estimators it asks for the gradient of the KL itself, whichever is charged.

Plain torch: of klrl it reads a job's settings alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from klrl.config import JobConfig

DOUBLE = torch.float64
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


def chosen(table: Tensor) -> Tensor:
    """The entries of a table [D, V] for every row, [B]."""
    return table[CONTEXT, CHOSEN]


# --------------------------------------------------------------------------- the closed form


def known(table: dict[str, Any], group: str, name: str) -> Any:
    """The entry of a choice; a choice without one fails the test by name."""
    if name not in table:
        pytest.fail(
            f"{group}={name} is compared nowhere: write its closed form in tests/one_step.py"
        )
    return table[name]


def log_p(logits: Tensor) -> Tensor:
    return logits - logits.logsumexp(-1, keepdim=True)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """sum_a p(a) log(p(a) / q(a)) of logits [D, V], [D]."""
    return (log_p(p).exp() * (log_p(p) - log_p(q))).sum(-1)


def entropy(p: Tensor) -> Tensor:
    """-sum_a p(a) log p(a) of logits [D, V], [D]."""
    return -(log_p(p).exp() * log_p(p)).sum(-1)


#: KL(old||new) of an update that ends at THETA.
KL_OLD = kl(OLD, THETA).mean()


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


def js(p: Tensor, q: Tensor) -> Tensor:
    """The mean of the KLs of both to their mixture, of logits [D, V], [D]."""
    mixture = ((log_p(p).exp() + log_p(q).exp()) / 2).log()
    return (kl(p, mixture) + kl(q, mixture)) / 2


#: kl.divergence of policy and reference, of logits [D, V], [D].
DIVERGENCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reverse": kl,
    "forward": lambda p, q: kl(q, p),
    "js": js,
}


def divergence_of(config: JobConfig) -> str:
    """What is charged."""
    return getattr(config.kl, "divergence", "reverse")


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
    """Against the scores of the context's G rows, weighted; then the KL to go."""
    weight = c.reward_weight
    average = (COUNTS * SCORE).sum(-1, keepdim=True) / G
    if c.baseline == "leave_one_out":
        return weight * (SCORE - (G * average - SCORE) / (G - 1)) - COEF * kl_to_go
    variance = (COUNTS * (SCORE - average) ** 2).sum(-1, keepdim=True) / (G - 1)
    return weight * (SCORE - average) / variance.sqrt() - COEF * kl_to_go


ADVANTAGE = {"gae": gae, "group": group}


def rollout_numbers(config: JobConfig) -> Numbers:
    """What pi_old's choices are worth: reward and advantage of each, tables [D, V]; the KLs."""
    estimator, charge = charge_of(config)
    ratio, exact = log_p(OLD) - log_p(REF), kl(OLD, REF)
    charged = known(DIVERGENCE, "kl.divergence", divergence_of(config))(OLD, REF)
    applied = known(ESTIMATE, "kl.estimator", estimator or "k1")(ratio, charged)
    penalty = COEF * applied * charge.reward
    learned = config.advantage.reward_weight * SCORE - penalty
    advantage = known(ADVANTAGE, "advantage", config.advantage.name)
    numbers = {
        "reward": SCORE - penalty,
        "advantage": advantage(config.advantage, learned, applied * charge.to_go),
    }
    if config.advantage.name == "gae":
        numbers |= {"value_target": learned, "state_value": OLD_VALUE[:, None].expand(D, V)}
    if estimator is not None:
        numbers["ref_log_prob"] = log_p(REF)
        numbers["row/kl/ref/forward"] = kl(REF, OLD).mean()
        for name, estimate in ESTIMATE.items():
            numbers[f"row/kl/ref/{name}"] = mean(estimate(ratio, exact))
    if divergence_of(config) != "reverse":
        numbers["row/div/ref/charged"] = charged.mean()
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


def reference_kl(estimator: str, divergence: str, theta: Tensor) -> Tensor:
    """What the loss charges: the estimator's expectation, with the gradient of the KL itself.

    E_old[w k(r)] = E_theta[k(r)] is the KL for k1 and k3, but not for k2.
    """
    exact, ratio = DIVERGENCE[divergence](theta, REF), log_p(theta) - log_p(REF)
    number = (log_p(theta).exp() * ESTIMATE[estimator](ratio, exact)).sum(-1).mean()
    return number.detach() + exact.mean() - exact.mean().detach()


def loss_terms(config: JobConfig, theta: Tensor, value: Tensor, rollout: Numbers) -> Numbers:
    """The terms of the loss of a minibatch of all rows, as they are minimised."""
    c, (estimator, charge) = config.loss, charge_of(config)
    advantage, spread = rollout["advantage"], 1.0
    if c.normalize_advantage:
        spread = ((COUNTS * (advantage - mean(advantage)) ** 2).sum() / (B - 1)).sqrt()
        advantage = (advantage - mean(advantage)) / spread
    gain = known(GAIN, "loss", c.name)
    w = (log_p(theta) - log_p(OLD)).exp()
    terms = {
        "objective": -mean(gain(c, w, advantage, kl(OLD, theta))),
        "critic": torch.zeros((), dtype=DOUBLE),
        "entropy": -c.entropy_coeff * entropy(theta).mean(),
    }
    if config.advantage.name == "gae":
        distance = critic_distance(c, value, rollout["value_target"])
        terms["critic"] = c.critic_coeff * mean(distance)
    if estimator is not None and charge.loss:
        terms["kl_ref"] = COEF / spread * reference_kl(estimator, divergence_of(config), theta)
    return terms


def loss_numbers(config: JobConfig, rollout: Numbers) -> Numbers:
    """The loss at THETA, its terms, and its gradients by the tables of logits and values."""
    theta, value = THETA.clone().requires_grad_(), VALUE.clone().requires_grad_()
    terms = loss_terms(config, theta, value, rollout)
    total = torch.stack(list(terms.values())).sum()
    by_table = torch.autograd.grad(total, [theta, value], allow_unused=True)
    names = ("gradient/logits", "gradient/values")
    gradients = {n: g for n, g in zip(names, by_table, strict=True) if g is not None}
    # Weights over one-hot contexts are the table itself; a bias adds up over contexts.
    squares = [g.square().sum() + g.sum(0).square().sum() for g in gradients.values()]
    return {
        **{f"row/loss/{name}": term for name, term in terms.items()},
        **gradients,
        "loss": total,
        "kl_old/minibatch": KL_OLD,
        "row/kl/old/exact": KL_OLD,
        "row/policy/entropy": entropy(theta).mean(),
        "row/learner/grad_norm": torch.stack(squares).sum().sqrt(),
    }


def doubling(c: Any) -> float:
    """Beta after an update that ended at KL_OLD (Schulman et al. 2017, sec. 4)."""
    ratio = float(KL_OLD) / c.dtarg
    if ratio > 1.5:
        return c.beta * c.increment
    return c.beta * c.decrement if ratio < 1 / 1.5 else c.beta


def proportional(c: Any) -> float:
    """Beta after it where it moves by (KL / dtarg)^gain, at most by 4."""
    return c.beta * min(max((float(KL_OLD) / c.dtarg) ** c.gain, 1 / 4), 4)


#: loss -> (beta before, beta after), of a loss without a beta 0.
BETAS: dict[str, Callable[[Any], tuple[float, float]]] = {
    "klpen": lambda c: (BETA, doubling(c)),
    "klpen_held": lambda c: (BETA, proportional(c)),
    "clip": lambda c: (0.0, 0.0),
}


def epochs(config: JobConfig) -> int:
    """Passes until KL(old||new) exceeds 1.5 target_kl; here the first pass ends at KL_OLD."""
    target = getattr(config.loss, "target_kl", None)
    return 1 if target and float(KL_OLD) > 1.5 * target else config.learner.epochs


def row_numbers(config: JobConfig, rollout: Numbers) -> Numbers:
    """What else the line of metrics.jsonl says, and where beta ends."""
    estimator, charge = charge_of(config)
    beta, beta_after = known(BETAS, "loss", config.loss.name)(config.loss)
    row = {
        "iteration": 1,
        "reward/episode": mean(SCORE),
        "reward/episode_length": 1,
        "reward/episodes": B,
        "reward/raw": mean(SCORE),
        "reward/shaped": mean(rollout["reward"]),
        "kl/ref/coef": 0 if estimator is None else COEF,
        "kl/ref/penalty": COEF * mean(rollout["applied"]) if charge.reward else 0,
        "learner/lr": LR,
        "learner/epochs": epochs(config),
    }
    if beta:
        row |= {"kl/old/beta": beta, "learner/alpha": 1}
    if getattr(config.loss, "dtarg_per", "state") == "action":  # a categorical has one dimension
        row["kl/old/target"] = config.loss.dtarg
    numbers = {f"row/{name}": torch.as_tensor(n, dtype=DOUBLE) for name, n in row.items()}
    return numbers | {"beta_after": torch.tensor(beta_after, dtype=DOUBLE)}


def closed_form(config: JobConfig) -> Numbers:
    """Every number of the problem, by enumeration of its D x V choices.

    ``row/NAME`` is the metric NAME; a number per row is [B]. No line search is due.
    """
    rollout = rollout_numbers(config)
    numbers = rollout | loss_numbers(config, rollout) | row_numbers(config, rollout)
    per_row = {name for name, n in numbers.items() if n.ndim == 2 and "gradient" not in name}
    numbers |= {name: chosen(numbers[name]) for name in per_row}
    return {name: n.detach() for name, n in numbers.items()}
