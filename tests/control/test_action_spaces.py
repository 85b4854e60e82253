"""Every served action space: what the environment is given, and its distribution's numbers."""

import itertools
import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.envs import TransformedEnv, check_env_specs

from klrl.api import compose
from klrl.base.errors import ConfigError
from klrl.control.env.contract import require_supported
from klrl.control.env.copies import VectorGymEnv
from klrl.control.policy.distributions import EXCLUDED, Bernoulli, MultiCategorical
from klrl.control.run.job_checks import check_job
from klrl.kl import KLConstrainedTransform, KLRewardTransform
from tests.agents import agent_of, apart
from tests.control.toys import ACTIONS

DOUBLE, CPU = torch.float64, torch.device("cpu")
COUNTS = (3, 2, 4)
ID = "tests.control.toys:klrl-test/Copying-v0"


def made(action: str, num_envs: int = 2) -> VectorGymEnv:
    return VectorGymEnv(ID, num_envs, kwargs={"action": action}, seed=3)


def logits(seed: int, size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"logits": 2 * torch.randn(5, size, generator=generator, dtype=DOUBLE)}


# ----------------------------------------------------------------------------- distributions


@pytest.mark.parametrize(
    ("family", "size", "counts"),
    [(MultiCategorical(COUNTS), sum(COUNTS), COUNTS), (Bernoulli(3), 3, (2, 2, 2))],
    ids=["multi_categorical", "bernoulli"],
)
def test_sums_over_joint_actions_are_enumerated_ones(family, size, counts) -> None:
    """The js does not add up over factors; KL and entropy do (test_distributions)."""
    p, q = logits(2, size), logits(3, size)
    joint = torch.tensor(list(itertools.product(*map(range, counts))))
    log_p, log_q = (
        torch.stack([family.log_prob(x, a.expand(5, -1)) for a in joint], -1) for x in (p, q)
    )
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(5, dtype=DOUBLE))
    middle = ((log_p.exp() + log_q.exp()) / 2).log()
    js = (log_p.exp() * (log_p - middle) + log_q.exp() * (log_q - middle)).sum(-1) / 2
    torch.testing.assert_close(family.divergence("js", p, q), js)


def test_an_excluded_action_adds_nothing_to_any_sum_or_gradient() -> None:
    """0 log 0 = 0: the numbers are those of the categoricals without it."""
    family, smaller = MultiCategorical((3, 2)), MultiCategorical((2, 2))
    p, q = (torch.randn(4, 5, dtype=torch.float32) for _ in range(2))
    p[:, 2] = q[:, 2] = EXCLUDED
    kept = [0, 1, 3, 4]
    p.requires_grad_()
    few = p.detach()[:, kept].requires_grad_()
    for whole, part in (
        (
            family.kl({"logits": p}, {"logits": q}),
            smaller.kl({"logits": few}, {"logits": q[:, kept]}),
        ),
        (family.entropy({"logits": p}), smaller.entropy({"logits": few})),
        *(
            (
                family.divergence(name, {"logits": p}, {"logits": q}),
                smaller.divergence(name, {"logits": few}, {"logits": q[:, kept]}),
            )
            for name in ("forward", "js")
        ),
    ):
        torch.testing.assert_close(whole, part)
        gradient, expected = (
            torch.autograd.grad(y.sum(), x)[0] for y, x in ((whole, p), (part, few))
        )
        torch.testing.assert_close(gradient[:, kept], expected)
        assert not gradient[:, 2].any()
    assert float(family.factors({"logits": p.detach()}).softmax(-1)[:, 0, 2].max()) == 0.0


@pytest.mark.parametrize("family", [MultiCategorical(COUNTS), Bernoulli(3)], ids=lambda f: f.name)
def test_noise_draws_from_the_distribution(family) -> None:
    """The frequency of each factor's last action is its probability, within 5 standard errors."""
    torch.manual_seed(0)
    count = 20_000
    size = sum(COUNTS) if family.name == "multi_categorical" else 3
    params = {"logits": logits(4, size)["logits"][:1].float()}
    probabilities = family.factors(params).softmax(-1)[0]
    expected = torch.stack([p[k - 1] for p, k in zip(probabilities, family.counts, strict=True)])
    draws = {
        "act": family.act(params, family.act_noise((count,), size)),
        "sample": family.sample(params, count)[:, 0],
    }
    for name, drawn in draws.items():
        share = (drawn == torch.tensor(family.counts) - 1).float().mean(0)
        error = (expected * (1 - expected) / count).sqrt()
        assert ((share - expected).abs() < 5 * error).all(), name


# ------------------------------------------------------------------------------ environments


@pytest.mark.parametrize("action", ACTIONS)
def test_the_environment_gets_an_action_of_its_space(action: str) -> None:
    """The policy repeats what it is shown, counted from 0; the environment pays 1 for each."""
    env = made(action)
    check_env_specs(env)
    env.set_seed(3)
    shown = env.reset_native()
    for _ in range(8):
        seen = shown.reshape(2, -1).astype(np.float32)
        flat = seen if env.action_spec.dtype.is_floating_point else seen.astype(np.int64)
        flat = flat[:, 0] if isinstance(ACTIONS[action], spaces.Discrete) else flat
        shown, reward, *_ = env.step_native(flat)
        np.testing.assert_allclose(reward, 1.0, atol=1e-6)
    given = env.simulators.envs[0].unwrapped.given[-1]
    assert np.shape(given) == ACTIONS[action].shape
    assert np.asarray(given).dtype == ACTIONS[action].dtype


def test_bounds_of_a_box_of_two_dimensions_are_kept() -> None:
    env = made("box")
    env.reset_native()
    env.step_native(np.full((2, 6), 7.0, np.float32))
    np.testing.assert_array_equal(
        env.simulators.envs[1].unwrapped.given[-1], np.ones((2, 3), np.float32)
    )


@pytest.mark.parametrize("action", ["multi_discrete", "multi_binary", "from_five", "box"])
def test_the_transforms_charge_the_families_kl(action: str) -> None:
    """``kl=legacy`` (k1) and the exact KL of TorchRL's path against the closed form."""
    torch.manual_seed(0)
    env = made(action)
    agent = agent_of(env)
    _, reference = apart(agent.actor)
    k1 = KLRewardTransform(reference, 0.4, kl_key="kl")
    exact = KLConstrainedTransform(reference, 0.4, kl_key="kl", estimator="exact")
    with torch.no_grad():
        batch = TransformedEnv(env, k1).rollout(10, agent.actor, break_when_any_done=False)
        plain = batch.exclude(("next", "kl"))
        charged = exact(plain.clone())
    family = agent.family
    p = {key: batch.get(key) for key in family.param_keys}
    scored = reference.get_dist_params(batch.select("observation"))
    q = {key: scored.get(key) for key in family.param_keys}
    ratio = family.log_prob(p, batch["action"]) - family.log_prob(q, batch["action"])
    torch.testing.assert_close(batch["next", "kl"][..., 0], ratio, atol=1e-5, rtol=1e-4)
    kl = family.kl(p, q)
    assert float(kl.min()) > 0
    torch.testing.assert_close(charged["next", "kl"][..., 0], kl, atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.Box(0, 5, (2,), np.int64), "its actions are int64 of shape"),
        (spaces.Text(4), "its action space is Text; only Box, Discrete, MultiDiscrete"),
        (spaces.Dict(a=spaces.Discrete(2)), "its action space is Dict"),
    ],
)
def test_other_spaces_are_refused(space: gymnasium.Space, named: str) -> None:
    with pytest.raises(ConfigError, match=f"env.id=X: {named}") as refused:
        require_supported("env.id=X", space)
    assert "\n" not in str(refused.value)


def test_a_js_over_too_many_joint_actions_is_refused(monkeypatch) -> None:
    config = compose(
        "env=gym",
        f"env.id={ID}",
        "env.kwargs.action=multi_discrete",
        "kl.divergence=js",
        "kl.placement=split",
        "kl.estimator=exact",
    )
    check_job(config, frozenset(), resumed=False)
    assert math.prod(COUNTS) == 24
    monkeypatch.setattr("klrl.control.run.job_checks.MOST_JOINT", 23)
    with pytest.raises(ConfigError, match="has 24 joint actions"):
        check_job(config, frozenset(), resumed=False)
