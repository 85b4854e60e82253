"""Losses and LossModules against TorchRL's, in float64, values and gradients."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torchrl.data
import torchrl.envs.transforms
import torchrl.objectives
from tensordict import TensorDict
from torchrl.modules import TanhNormal
from torchrl.objectives import KLPENPPOLoss

import klrl.objectives
from klrl.config import ClipConfig, KLPENConfig
from klrl.control.run.step import draw, score
from klrl.losses import DoublingBeta
from klrl.losses.beta import ForwardBeta
from klrl.losses.policy import ClipLoss, KLPENLoss
from klrl.losses.terms import critic_loss
from tests.agents import agent_of, gym, make_env, moved

SHARED = {
    "entropy_bonus": True,
    "entropy_coeff": 0.03,
    "samples_mc_entropy": 1,
    "critic_coeff": 0.7,
    "loss_critic_type": "smooth_l1",
    "clip_value": None,
    "normalize_advantage": True,
    "separate_losses": False,
    "reduction": "mean",
}
KLPEN = KLPENConfig(
    name="klpen",
    dtarg=0.01,
    beta=1.5,
    increment=2.0,
    decrement=0.5,
    beta_rule="doubling",
    beta_min=1e-4,
    beta_max=1e4,
    gain=0.5,
    line_search="none",
    kl_old="exact",
    samples_mc_kl=1,
    **SHARED,
)
CLIP = ClipConfig(name="clip", clip_epsilon=0.2, target_kl=None, **SHARED)


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def data(env_id: str, distribution: str):
    """Networks that moved away from the policy that sampled, and its batch of 64 frames."""
    env = make_env(gym(env_id), seed=0)
    agent = agent_of(env, distribution, normalize=False)
    agent.modules.double()
    count = 64
    batch = TensorDict(
        {"observation": torch.randn(count, env.observation_spec["observation"].shape[-1])}, [count]
    )
    with torch.no_grad():
        agent.actor(batch)
        agent.critic(batch)
        batch["advantage"] = torch.randn(count, 1)
        batch["value_target"] = batch["state_value"] + torch.randn(count, 1)
        batch["next"] = TensorDict(
            {"reward": torch.zeros(count, 1), "done": torch.zeros(count, 1, dtype=torch.bool)},
            [count],
        )
        batch["next", "terminated"] = batch["next", "done"]
    moved(agent.modules, 0.2)
    return agent, batch


def ours(config, agent, batch, beta: float):
    flat = {
        key: batch[key].detach()
        for key in ("observation", "action_log_prob", *agent.family.param_keys)
    }
    flat[agent.family.sample_key] = batch[agent.family.sample_key]
    flat |= {k: batch[k].squeeze(-1) for k in ("advantage", "value_target", "state_value")}
    params = dict(zip(agent.family.param_keys, agent.policy_net(flat["observation"]), strict=True))
    value = agent.value_net(flat["observation"]).squeeze(-1)
    loss = (KLPENLoss if isinstance(config, KLPENConfig) else ClipLoss)(config)
    flat |= draw(loss, agent.family, flat)
    scored = score(loss, agent.family, params, value, flat)
    terms = loss(scored, torch.tensor(beta), torch.tensor(0.0))
    means = dict(zip(loss.measures, loss.measure(terms.measured).detach(), strict=True))
    weighted = loss.weighted(means, 0.0)
    named = {name.partition("/")[2]: value for name, value in weighted.items()}
    named |= {"kl_old": means["kl/old/exact"], "policy_entropy": means["policy/entropy"]}
    named |= {"entropy": weighted["loss/entropy"]}
    return SimpleNamespace(total=terms.total, **named)


def gradients(agent, total) -> list[torch.Tensor]:
    agent.modules.zero_grad()
    total.backward()
    return [p.grad.clone() for p in agent.modules.parameters()]


def theirs(kind, agent, batch, config, **more):
    c = config
    module = kind(
        agent.actor,
        agent.critic,
        entropy_bonus=c.entropy_bonus,
        entropy_coeff=c.entropy_coeff,
        critic_coeff=c.critic_coeff,
        loss_critic_type=c.loss_critic_type,
        normalize_advantage=c.normalize_advantage,
        reduction=c.reduction,
        clip_value=c.clip_value,
        functional=False,
        **more,
    )
    return module(batch.copy())


def total_of(out: TensorDict) -> torch.Tensor:
    return sum(out[key] for key in out.keys() if key.startswith("loss_"))


VARIANTS = [
    {},
    {"normalize_advantage": False, "reduction": "sum"},
    {"clip_value": 0.1, "loss_critic_type": "l2"},
    {"loss_critic_type": "l1", "entropy_bonus": False},
]
#: TanhNormal's entropy is sampled on both sides, so its bonus is compared elsewhere.
POLICIES = [
    ("HalfCheetah-v5", "normal", {}),
    ("CartPole-v1", "categorical", {}),
    ("HalfCheetah-v5", "tanh_normal", {"entropy_bonus": False}),
]


ASYMMETRIC = {"clip_epsilon": 0.02, "clip_epsilon_high": 0.1}


@pytest.mark.parametrize(
    ("kind", "variant"),
    [*((kind, v) for kind in ("klpen", "clip") for v in VARIANTS), ("clip", ASYMMETRIC)],
    ids=str,
)
@pytest.mark.parametrize(("env_id", "distribution", "fixed"), POLICIES)
@pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")
def test_a_loss_is_torchrls(env_id, distribution, fixed, kind, variant) -> None:
    config = replace(KLPEN if kind == "klpen" else CLIP, **{**variant, **fixed})
    agent, batch = data(env_id, distribution)
    terms = ours(config, agent, batch, beta=1.5)
    grads = gradients(agent, terms.total)
    if kind == "klpen":
        name, more = "KLPENPPOLoss", {"beta": 1.5}
        assert float(terms.kl_old) > 0.01
    else:
        epsilon = config.clip_epsilon, config.clip_epsilon_high or config.clip_epsilon
        name, more = "ClipPPOLoss", {"clip_epsilon": epsilon}
    for home in (klrl.objectives, torchrl.objectives):
        if kind == "klpen" and home is torchrl.objectives:  # its beta moves before the gradient
            more |= {"increment": 1.0, "decrement": 1.0}
        reference = theirs(getattr(home, name), agent, batch, config, **more)
        if kind == "klpen":
            torch.testing.assert_close(terms.kl_old, reference["kl"].mean(), rtol=1e-6, atol=0)
        for part in ("objective", "critic"):
            found, expected = getattr(terms, part), reference[f"loss_{part}"].detach()
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        total = total_of(reference)
        torch.testing.assert_close(terms.total, total, rtol=1e-6, atol=0)
        for mine, other in zip(grads, gradients(agent, total), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


def test_torchrls_gradient_has_the_beta_of_the_next_forward() -> None:
    """TorchRL moves beta in place between forward and backward: the value is that of beta = 1.5,
    the gradient that of beta = 3. Here both are of one beta."""
    agent, batch = data("Pendulum-v1", "normal")
    config = replace(KLPEN, entropy_bonus=False)
    reference = theirs(KLPENPPOLoss, agent, batch, config, beta=1.5)
    wrong = gradients(agent, reference["loss_objective"] + reference["loss_critic"])
    at = {beta: ours(config, agent, batch, beta=beta) for beta in (1.5, 3.0)}
    torch.testing.assert_close(at[1.5].objective, reference["loss_objective"].detach())
    for mine, other in zip(gradients(agent, at[3.0].total), wrong, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


def test_tanh_entropy_bonus_widens_the_policy() -> None:
    """The gradient of the sampled bonus on log_std, against a finite difference of the entropy."""
    agent, batch = data("Pendulum-v1", "tanh_normal")
    config = replace(KLPEN, critic_coeff=0.0, samples_mc_entropy=4000, entropy_coeff=1.0)
    batch["advantage"].zero_()
    config = replace(config, normalize_advantage=False)
    ours(config, agent, batch, beta=0.0).total.backward()
    log_std = agent.policy_net.log_std
    entropies = []
    for shift in (1e-3, -1e-3):
        params = dict(zip(("loc", "scale"), agent.policy_net(batch["observation"]), strict=True))
        params["scale"] = params["scale"] * torch.tensor(shift).exp()
        torch.manual_seed(5)
        noise = agent.family.entropy_noise(params, 4000)
        entropies.append(agent.family.entropy(params, noise).mean())
    slope = float((entropies[0] - entropies[1]).detach()) / 2e-3
    assert float(log_std.grad) == pytest.approx(-slope, rel=0.1)


@pytest.mark.parametrize(("env_id", "distribution", "_fixed"), POLICIES)
def test_the_sampled_kl_is_the_exact_one_in_the_mean(env_id, distribution, _fixed) -> None:
    agent, batch = data(env_id, distribution)
    exact = ours(KLPEN, agent, batch, beta=1.0).kl_old
    sampled = ours(
        replace(KLPEN, kl_old="sampled", samples_mc_kl=4000), agent, batch, beta=1.0
    ).kl_old
    assert float(sampled) == pytest.approx(float(exact), rel=0.05)


def test_critic_clipping_by_hand() -> None:
    """V moved from 0 to 1 with a limit of .2: distance of .2 to 2 is larger than that of 1."""
    value, target, old = (torch.tensor([x]) for x in (1.0, 2.0, 0.0))
    assert float(critic_loss(value, target, old, "l2", 0.2)) == pytest.approx(1.8**2)
    assert float(critic_loss(value, target, old, "l2", None)) == pytest.approx(1.0)
    assert float(critic_loss(value, target, old, "smooth_l1", None)) == pytest.approx(0.5)


def test_beta_never_leaves_its_bounds() -> None:
    rule = DoublingBeta(replace(KLPEN, beta=1.0))
    for _ in range(100):
        rule.update(0.0)
    assert rule.beta == 1e-4
    for _ in range(100):
        rule.update(1.0)
    assert rule.beta == 1e4
    with pytest.warns(UserWarning, match="nan"):
        assert rule.update(float("nan")) == 1e4


def test_forward_is_torchrls_rule() -> None:
    agent, batch = data("Pendulum-v1", "normal")
    module = KLPENPPOLoss(agent.actor, agent.critic, beta=1.5, functional=False)
    rule = ForwardBeta(KLPEN)
    for step in range(4):
        module(batch.copy())
        rule.update(float(ours(KLPEN, agent, batch, rule.beta).kl_old))
        assert rule.beta == pytest.approx(float(module.beta)), step
        with torch.no_grad():  # back towards the sampling policy: KL falls below the target
            batch.update(agent.actor.get_dist_params(batch.select("observation")))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchrls_faults_are_still_there() -> None:
    """Where one is gone, its workaround may go."""
    assert not hasattr(torchrl.envs.transforms, "KLRewardTransform"), "for control"
    controller = torchrl.data.AdaptiveKLController(init_kl_coef=1.0, target=0.1, horizon=10)
    controller.update([1.0])
    assert float(controller.coef) < 1.0, "it lowers the coefficient above its target"
    loc, scale = (torch.tensor([x], dtype=torch.float32) for x in (9.0, 1e-3))
    exact = -math.log(1e-3) - 0.5 * math.log(2 * math.pi) + 2 * math.log(math.cosh(9.0))
    log_prob = float(TanhNormal(loc, scale, event_dims=1).log_prob(loc.tanh()))
    assert abs(log_prob - exact) > 0.1, "a saturated action's is clamped"
