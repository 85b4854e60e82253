"""``collector.staleness`` in control: rollouts of a sampler mu that is not the trained policy.

The losses are compared with their formulas, summed over all states and actions under mu, in
float64. The gradient is by hand: a coefficient of d log pi of each action, times onehot - softmax.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from klrl.config import AdvantageConfig, ClipConfig, KLPENConfig, TRPOConfig
from klrl.control.policy.distributions import Categorical
from klrl.control.run.advantage import gae
from klrl.control.run.kl import SAMPLER_LOG_PROB, charge, measure
from klrl.control.run.stale import StaleFrames
from klrl.control.run.step import score
from klrl.kl.charge import KL_KEY, RAW_REWARD_KEY, ReferenceKL
from klrl.losses.policy import ClipLoss, KLPENLoss, Scored, TRPOLoss
from klrl.train import stale
from tests.losses.formula import check_formula

STATES, ACTIONS = 4, 3
PLAIN = {"normalize_advantage": False, "entropy_bonus": False, "critic_coeff": 0.0}
COEF, BETA = 0.3, 0.7


def tables(staleness: int) -> dict[str, torch.Tensor]:
    """Logits [state, action] of theta, old, the reference, and mu: ``staleness`` before old."""
    generator = torch.Generator().manual_seed(5)
    ref, step, drift, old = torch.randn(4, STATES, ACTIONS, generator=generator).double()
    mu = old - 0.2 * staleness * drift
    return {"theta": old + 0.3 * step, "old": old, "mu": mu, "ref": ref}


def advantage_of(state: int, action: int) -> float:
    return math.sin(7.0 * (3 * state + action) + 0.5)


def found(loss, logits) -> tuple[float, torch.Tensor]:
    """Expected loss under mu in equally frequent states, and its gradient in theta's logits."""
    family, theta = Categorical(), logits["theta"].clone().requires_grad_()
    logs = {name: each.log_softmax(-1) for name, each in {**logits, "theta": theta}.items()}
    total, one = torch.zeros((), dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for state in range(STATES):
        for action in range(ACTIONS):
            log_prob = {name: table[state, action].reshape(1) for name, table in logs.items()}
            batch = {
                "action": torch.tensor([action]),
                "logits": logits["old"][state][None],
                "ref_logits": logits["ref"][state][None],
                "action_log_prob": log_prob["old"],
                "ref_log_prob": log_prob["ref"],
                "sampler_log_prob": log_prob["mu"],
                "advantage": one * advantage_of(state, action),
                **dict.fromkeys(("value_target", "state_value"), 0 * one),
            }
            scored = score(loss, family, {"logits": theta[state][None]}, 0 * one, batch)
            chance = math.exp(logs["mu"][state, action]) / STATES
            total = total + chance * loss(scored, BETA * one.sum(), COEF * one.sum()).total
    (gradient,) = torch.autograd.grad(total, theta)
    return total.item(), gradient


def expected(rule, logits, kl_old: float = 0.0, kl_ref: float = 0.0) -> tuple[float, torch.Tensor]:
    """The same by hand; ``rule`` gives an action's gain and its derivative in log pi.

    ``kl_old``, ``kl_ref``: coefficients of KL(old||new) and of KL(policy||reference), exact.
    """
    logs = {name: each.log_softmax(-1).tolist() for name, each in logits.items()}
    soft = logits["theta"].softmax(-1)
    value, gradient = 0.0, torch.zeros_like(soft)
    for state in range(STATES):
        new, old, ref = (logs[name][state] for name in ("theta", "old", "ref"))
        far = sum(math.exp(n) * (n - r) for n, r in zip(new, ref, strict=True))
        for action in range(ACTIONS):
            line = {name: table[state][action] for name, table in logs.items()}
            gain, slope = rule(line, advantage_of(state, action))
            chance = math.exp(line["mu"]) / STATES
            value -= chance * gain
            gradient[state] += chance * slope * soft[state]
            gradient[state, action] -= chance * slope
            p, o = math.exp(new[action]), math.exp(old[action])
            value += kl_old * o * (old[action] - new[action]) / STATES
            gradient[state, action] += kl_old * (p - o) / STATES
            value += kl_ref * p * (new[action] - ref[action]) / STATES
            gradient[state, action] += kl_ref * p * (new[action] - ref[action] - far) / STATES
    return value, gradient


def clipped(anchor, weight=lambda w: 1.0):
    def rule(line, a):
        ratio = math.exp(line["theta"] - line[anchor])
        bounded = min(max(ratio, 0.8), 1.2)
        w = weight(math.exp(line["old"] - line["mu"]))
        moves = ratio * a <= bounded * a
        return w * min(ratio * a, bounded * a), w * ratio * a * moves

    return rule


def surrogate(weight=lambda w: 1.0):
    def rule(line, a):
        gain = weight(math.exp(line["old"] - line["mu"])) * math.exp(line["theta"] - line["old"])
        return gain * a, gain * a

    return rule


def estimated(rule, name: str):
    """COEF q k of the reference in the loss; k2 has no gradient through q."""

    def both(line, a):
        gain, slope = rule(line, a)
        q, r = math.exp(line["theta"] - line["mu"]), line["theta"] - line["ref"]
        k, change = {
            "k1": (r, r + 1),
            "k2": (r * r / 2, r),
            "k3": (math.exp(-r) - 1 + r, r),
        }[name]
        return gain - COEF * q * k, slope - COEF * q * change

    return both


def within(low: float, high: float):
    return lambda w: w if low <= w <= high else 0.0


def clip(anchor: str, **how) -> ClipLoss:
    loss = ClipLoss(ClipConfig(**PLAIN, **how))
    loss.anchor = anchor
    return loss


CASES = {
    "old": lambda: (clip("old"), clipped("old")),
    "sampler": lambda: (clip("sampler"), clipped("mu")),
    "truncate": lambda: (
        clip("old", sampler_weight="truncate"),
        clipped("old", lambda w: min(w, 2.0)),
    ),
    "mask": lambda: (clip("old", sampler_weight="mask"), clipped("old", within(0.5, 5.0))),
    "sharp truncate": lambda: (
        clip("old", sampler_weight="truncate", sampler_cap=1.1),
        clipped("old", lambda w: min(w, 1.1)),
    ),
    "sharp mask": lambda: (
        clip("old", sampler_weight="mask", sampler_low=0.9, sampler_high=1.05),
        clipped("old", within(0.9, 1.05)),
    ),
    "trpo": lambda: (TRPOLoss(TRPOConfig(**PLAIN)), surrogate()),
    "trpo truncate": lambda: (
        TRPOLoss(TRPOConfig(**PLAIN, sampler_weight="truncate", sampler_cap=1.1)),
        surrogate(lambda w: min(w, 1.1)),
    ),
}


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_its_formula_summed_over_all_actions_under_mu(name: str, staleness: int) -> None:
    loss, rule = CASES[name]()
    logits = tables(staleness)
    got = found(loss, logits)
    assert got[1].abs().max() > 1e-3
    true = expected(lambda line, a: (a, a), {**logits, "mu": logits["theta"]})[1]
    check_formula(f"{name}, staleness {staleness}", got, expected(rule, logits), true)


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("weight", [None, "truncate", "mask"])
def test_klpen_weights_its_surrogate_alone(weight: str | None, staleness: int) -> None:
    logits, loss = tables(staleness), KLPENLoss(KLPENConfig(**PLAIN, sampler_weight=weight))
    by_hand = {None: lambda w: 1.0, "truncate": lambda w: min(w, 2.0), "mask": within(0.5, 5.0)}
    value, gradient = found(loss, logits)
    total, slope = expected(surrogate(by_hand[weight]), logits, kl_old=BETA)
    assert value == pytest.approx(total, abs=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=0, atol=1e-9)


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["old", "sampler", "truncate", "trpo"])
def test_an_estimate_in_the_loss_has_the_weight_of_mu_and_the_exact_kl_has_none(
    name: str, estimator: str, staleness: int
) -> None:
    (loss, rule), logits = CASES[name](), tables(staleness)
    loss.reference_estimator = estimator
    value, gradient = found(loss, logits)
    if estimator == "exact":
        by_hand, slope = expected(rule, logits, kl_ref=COEF)
    else:
        by_hand, slope = expected(estimated(rule, estimator), logits)
    assert value == pytest.approx(by_hand, abs=1e-9)
    torch.testing.assert_close(gradient, slope, rtol=0, atol=1e-9)


@pytest.mark.parametrize("weight", ["truncate", "mask"])
def test_a_weight_has_no_gradient(weight: str) -> None:
    log_prob = torch.zeros(3).requires_grad_()
    scored = Scored(*([log_prob] * 5), sampler_log_prob=log_prob - 0.1)
    assert not clip("old", sampler_weight=weight).sampler_weight(scored).requires_grad


# ------------------------------------------------------------------------- the KL in the reward


class Charging(nn.Module):
    """k1 in the reward, of what the batch says."""

    def forward(self, batch):
        kl = (batch["action_log_prob"] - batch["ref", "log_prob"]).unsqueeze(-1)
        batch["next", KL_KEY], batch["next", RAW_REWARD_KEY] = kl, batch["next", "reward"]
        batch["next", "reward"] = batch["next", RAW_REWARD_KEY] - COEF * kl
        return batch


def episodes(logits) -> tuple[TensorDict, torch.Tensor]:
    """All pairs of actions in states 0 and 1, [9, 2], and the chance of each under mu."""
    pairs = torch.cartesian_prod(torch.arange(ACTIONS), torch.arange(ACTIONS))
    logs = {name: each.log_softmax(-1) for name, each in logits.items()}
    of = {name: torch.stack([t[0][pairs[:, 0]], t[1][pairs[:, 1]]], 1) for name, t in logs.items()}
    reward = torch.tensor([[advantage_of(t, int(a)) for t, a in enumerate(x)] for x in pairs])
    last = torch.tensor([False, True]).expand(len(pairs), 2).unsqueeze(-1)
    batch = TensorDict(
        {
            "observation": torch.zeros(len(pairs), 2, 1, dtype=torch.float64),
            "action": pairs,
            "logits": logits["old"][:2].expand(len(pairs), 2, ACTIONS),
            "action_log_prob": of["old"],
            "ref": {"log_prob": of["ref"], "logits": logits["ref"][:2].expand(9, 2, ACTIONS)},
            "sampler": {"log_prob": of["mu"], "logits": logits["mu"][:2].expand(9, 2, ACTIONS)},
            "next": {
                "observation": torch.zeros(len(pairs), 2, 1, dtype=torch.float64),
                "reward": reward.double().unsqueeze(-1),
                **{"done": last, "terminated": last},
            },
        },
        [len(pairs), 2],
    )
    return batch, of["mu"].sum(1).exp()


def charged(batch, *, corrected: bool) -> torch.Tensor:
    """Charge k1 as a run does; return pi_old / mu."""
    kl, collector = ReferenceKL(COEF, "k1", "reward", Charging()), SimpleNamespace(staleness=4)
    charge(batch, kl)
    config = SimpleNamespace(collector=collector, corrects_sampler=corrected)
    return StaleFrames(config, SimpleNamespace()).charge(batch, kl)


def no_critic() -> TensorDictModule:
    return TensorDictModule(lambda x: torch.zeros_like(x), ["observation"], ["state_value"])


@pytest.mark.parametrize("corrected", [True, False])
def test_k1_in_the_reward_charges_the_kl_of_old_once(corrected: bool) -> None:
    """The gradient at theta = old of two steps, in the states that mu visits.

    A later step's k1 is a KL of old. The step's own one has the gradient of a KL of old where the
    loss divides by mu; where it does not, its mean is a KL of old.
    """
    logits = tables(4)
    batch, chance = episodes(logits)
    charged(batch, corrected=corrected)
    scale = 0.5
    gae(AdvantageConfig(1.0, 1.0, name="gae"), no_critic(), scale)(batch)
    log_mu, old, ref = (logits[name][:2].log_softmax(-1) for name in ("mu", "old", "ref"))
    k1, w = old - ref, (old - log_mu).exp()
    later = (old[1].exp() * k1[1]).sum()
    rewards = torch.tensor([[advantage_of(t, a) for a in range(ACTIONS)] for t in range(2)])
    rewards = rewards.double()
    own = (1.0 if corrected else w) * k1
    after = (log_mu[1].exp() * rewards[1]).sum() - COEF * later
    for t, rest in ((0, after), (1, 0.0)):
        for action in range(ACTIONS):
            there = batch["action"][:, t] == action
            share = chance[there] / chance[there].sum()
            seen = (share * batch["advantage"][there, t, 0]).sum()
            by_hand = scale * (rewards[t, action] - COEF * own[t, action] + rest)
            assert float(seen) == pytest.approx(float(by_hand), abs=1e-9)
    # The critic learns the return with a KL of old in each state, whatever the loss corrects.
    target = (chance * batch["value_target"][:, 0, 0]).sum()
    first = (log_mu[0].exp() * rewards[0]).sum() - COEF * (old[0].exp() * k1[0]).sum()
    assert float(target) == pytest.approx(scale * float(first + after), abs=1e-9)
    if corrected:  # q A has the gradient of old's reward minus its KL
        theta = logits["old"][:2].clone().requires_grad_()
        log_p = theta.log_softmax(-1)
        at = torch.stack([log_p[0][batch["action"][:, 0]], log_p[1][batch["action"][:, 1]]], 1)
        q = (at - batch[SAMPLER_LOG_PROB]).exp()
        gain = (chance * q[:, 0] * batch["advantage"][:, 0, 0]).sum()
        exact = (log_p[0].exp() * (rewards[0] - COEF * (log_p[0] - ref[0]))).sum()
        exact = scale * (exact + after * log_p[0].exp().sum())
        slopes = [torch.autograd.grad(x, theta, retain_graph=True)[0][0] for x in (gain, exact)]
        torch.testing.assert_close(*slopes, rtol=0, atol=1e-9)


def test_measured_estimates_are_of_old_and_the_penalty_is_what_is_charged() -> None:
    logits = tables(4)
    batch, chance = episodes(logits)
    weight, agent = charged(batch, corrected=True), SimpleNamespace(family=Categorical())
    # A row per action of state 0, as often as mu draws it.
    means = [
        measure(batch[i : i + 1, :1], agent, weight[i : i + 1, :1])["kl/ref/k1"]
        for i in range(len(batch))
    ]
    old, ref = (logits[name][0].log_softmax(-1) for name in ("old", "ref"))
    exact = float((old.exp() * (old - ref)).sum())
    assert float(chance @ torch.stack(means)) == pytest.approx(exact, abs=1e-9)
    assert float(chance @ batch["next", KL_KEY][:, 0, 0]) == pytest.approx(exact, abs=1e-9)
    assert float(measure(batch, agent, weight)["kl/ref/exact"]) == pytest.approx(
        sum(float((p.exp() * (p - q)).sum()) for p, q in _states(logits, "old", "ref")) / 2
    )
    found = stale.compare(Categorical().kl(batch["sampler"], batch), *batch_logs(batch), 4)
    exact = sum(float((p.exp() * (p - q)).sum()) for p, q in _states(logits, "mu", "old")) / 2
    assert found["kl/sampler/exact"] == pytest.approx(exact, abs=1e-9)
    gap = batch_logs(batch)[0] - batch_logs(batch)[1]
    assert found["kl/sampler/k3"] == pytest.approx(float((gap.neg().exp() - 1 + gap).mean()))
    assert found["kl/sampler/max"] == float(gap.abs().max()) > 0.1


def _states(logits, one: str, other: str):
    pairs = (logits[name][:2].log_softmax(-1) for name in (one, other))
    return list(zip(*pairs, strict=True))


def batch_logs(batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[SAMPLER_LOG_PROB], batch["action_log_prob"]
