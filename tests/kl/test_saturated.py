"""Actions of a TanhNormal that rounding put on a bound: no wrong log-prob, or not in silence."""

import math
import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import nn
from torch.distributions import Normal
from torchrl.data import Composite, Unbounded
from torchrl.envs import GymEnv, TransformedEnv
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

from klrl.kl import KLConstrainedTransform, KLRewardTransform, RetrieveKL
from klrl.kl.policies import score
from klrl.kl.saturated import (
    any_kept,
    any_lost,
    draw,
    kept_at,
    log_prob_before_tanh,
    log_probs,
    saturated,
)
from klrl.losses import ClipPPOLoss, KLPENPPOLoss
from tests.transforms.heads import TenSteps, composite

COUNT = 4000
PARAMS = ("loc", "scale")


class Constant(nn.Module):
    """A Gaussian that does not read the state."""

    def __init__(self, loc: float, scale: float, size: int = 1) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.full((size,), loc))
        self.log_scale = nn.Parameter(torch.full((size,), math.log(scale)))

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*seen.shape[:-1], self.loc.shape[-1])
        return self.loc.expand(shape).clone(), self.log_scale.exp().expand(shape).clone()


def policy(loc: float, scale: float, size: int = 1, **bounds) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(Constant(loc, scale, size), ["observation"], list(PARAMS)),
        list(PARAMS),
        distribution_class=TanhNormal,
        distribution_kwargs=bounds,
        return_log_prob=True,
        default_interaction_type="random",
    )


def sampled(actor: nn.Module, count: int = COUNT) -> TensorDict:
    batch = TensorDict({"observation": torch.zeros(count, 1)}, [count])
    with torch.no_grad():
        actor(batch)
    batch["next"] = TensorDict({"reward": torch.zeros(count, 1)}, [count])
    batch["advantage"], batch["value_target"] = torch.ones(count, 1), torch.zeros(count, 1)
    return batch


def true_kl(p: tuple[float, float], q: tuple[float, float]) -> float:
    """Of two Gaussians; tanh changes nothing."""
    (m, s), (n, t) = p, q
    return math.log(t / s) + (s**2 + (m - n) ** 2) / (2 * t**2) - 0.5


#: (policy's loc and scale, the reference's): saturated wholly, in part, hardly, at both bounds.
CASES = [
    ((15.0, 1.0), (0.0, 1.0)),
    ((-15.0, 1.0), (0.0, 2.0)),
    ((7.0, 1.5), (5.0, 1.0)),
    ((6.0, 0.5), (5.0, 1.0)),
    ((0.0, 9.0), (1.0, 8.0)),
]
TRANSFORMS = {
    "legacy": lambda actor, ref: KLRewardTransform(ref, kl_key="kl_penalty"),
    "constrained": lambda actor, ref: KLConstrainedTransform(ref),
    "retrieve": RetrieveKL,
}


@pytest.mark.parametrize("bounds", [{}, {"low": -2.0, "high": 5.0}], ids=str)
@pytest.mark.parametrize(("p", "q"), CASES)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_mean_of_k1_is_the_kl(name: str, p, q, bounds) -> None:
    """From the parameters that the policy wrote, within 4 standard errors of the sample."""
    actor, reference = policy(*p, **bounds), policy(*q, **bounds)
    batch = sampled(actor)
    kl = TRANSFORMS[name](actor, reference)(batch)["next", "kl_penalty"].squeeze(-1)
    u = torch.randn(200_000, dtype=torch.float64) * p[1] + p[0]
    spread = float((Normal(*p).log_prob(u) - Normal(*q).log_prob(u)).std())
    assert float(kl.mean()) == pytest.approx(true_kl(p, q), abs=4 * spread / COUNT**0.5 + 0.01)


def test_pre_tanh_is_read_where_it_is() -> None:
    actor, reference = policy(15.0, 1.0), policy(0.0, 1.0)
    batch = with_pre_tanh(sampled(actor).exclude(*PARAMS))
    u = batch["pre_tanh"]
    by_hand = Normal(15.0, 1.0).log_prob(u) - Normal(0.0, 1.0).log_prob(u)
    for name, make in TRANSFORMS.items():
        kl = make(actor, reference)(batch.clone())["next", "kl_penalty"]
        torch.testing.assert_close(kl.detach(), by_hand, atol=1e-3, rtol=1e-4, msg=name)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_without_either_a_warning_names_the_remedy(name: str) -> None:
    actor, reference = policy(15.0, 1.0), policy(0.0, 1.0)
    batch = sampled(actor).exclude(*PARAMS)
    with pytest.warns(UserWarning, match="bounds of TanhNormal.*loc.*scale.*pre_tanh"):
        TRANSFORMS[name](actor, reference)(batch)


def test_unsaturated_actions_are_scored_as_torchrl_scores_them() -> None:
    actor, reference = policy(0.3, 1.0, 3), policy(-0.2, 0.8, 3)
    batch = sampled(actor)
    expected = reference.log_prob(batch.copy())
    for data in (batch, batch.exclude(*PARAMS)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(score(reference, data), expected, atol=0, rtol=0)


def two_heads(loc: float) -> ProbabilisticTensorDictSequential:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near, self.far = Constant(0.2, 1.0), Constant(loc, 1.0)

        def forward(self, seen):
            return *self.near(seen), *self.far(seen)

    return composite(Both(), dict.fromkeys(("near", "far"), TanhNormal))


def test_heads_of_a_composite() -> None:
    actor, reference = two_heads(15.0), two_heads(0.0)
    batch = sampled(actor)
    kl = KLConstrainedTransform(reference)(batch.clone())["next", "kl_penalty"]
    assert float(kl.mean()) == pytest.approx(112.5, abs=4 * 15 / COUNT**0.5)
    with pytest.warns(UserWarning, match="bounds of TanhNormal"):
        KLConstrainedTransform(reference)(batch.exclude("params"))


def test_an_action_under_another_key() -> None:
    """``action_key``: scored as under the reference's own, from parameters or from pre_tanh."""
    actor, reference = policy(15.0, 1.0), policy(0.0, 1.0)
    batch = sampled(actor)
    transform = KLRewardTransform(reference, kl_key="kl", action_key=("taken", "action"))
    for data in (batch, with_pre_tanh(batch.exclude(*PARAMS))):
        for key in ("action", "pre_tanh"):
            if key in data.keys():
                data = data.rename_key_(key, ("taken", key))
        kl = transform(data.clone())["next", "kl"]
        assert float(kl.mean()) == pytest.approx(112.5, abs=4 * 15 / COUNT**0.5)
    with pytest.warns(UserWarning, match="bounds of TanhNormal"):
        transform(data.exclude(("taken", "pre_tanh")))


@pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")
@pytest.mark.filterwarnings("ignore:You are using a composite:UserWarning")
@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize("kind", [KLPENPPOLoss, ClipPPOLoss])
def test_the_ratio_of_a_composites_saturated_head(kind, aggregate: bool) -> None:
    """At theta = theta_old w is 1 in every head; near it after a small move; else a warning."""
    with set_composite_lp_aggregate(aggregate):
        actor = two_heads(15.0)
        keys = ["sample_log_prob"] if aggregate else ["near_log_prob", "far_log_prob"]
        batch = sampled(actor)
        loss = kind(
            actor, ValueOperator(nn.Linear(1, 1), in_keys=["observation"]), entropy_bonus=False
        )
        loss.set_keys(action=["near", "far"], sample_log_prob=keys[0] if aggregate else keys)
        beta = 1.0 if kind is KLPENPPOLoss else 0.0

        def minus_wa() -> float:
            out = loss(batch.copy()).detach()
            return float(out["loss_objective"] - beta * out.get("kl", torch.zeros(())).mean())

        if kind is KLPENPPOLoss:
            with pytest.warns(UserWarning, match="composite is sampled.*bounds.*ClipPPOLoss"):
                loss(batch.copy())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # TorchRL's, of one log-prob for both heads; and the KL's, as above.
            warnings.filterwarnings("ignore", "You are using a composite|.*composite is sampled")
            assert minus_wa() == pytest.approx(-1.0, abs=1e-3)
            with torch.no_grad():
                actor[0].module.far.loc += 0.1
            assert minus_wa() == pytest.approx(-1.0, abs=0.02)
        if kind is ClipPPOLoss:
            with pytest.warns(UserWarning, match="bounds of TanhNormal"):
                loss(batch.exclude("params"))


@pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")
@pytest.mark.parametrize("kind", [KLPENPPOLoss, ClipPPOLoss])
@pytest.mark.parametrize(
    ("known", "estimator"),
    [("parameters", "exact"), ("parameters", "k1"), ("pre_tanh", "k1"), ("pre_tanh", "exact")],
)
def test_the_losses(kind, known: str, estimator: str) -> None:
    """At theta = theta_old w is 1, so loss_objective is -A, and the mean of w k1 the KL."""
    actor, reference = policy(15.0, 1.0), policy(0.0, 1.0)
    batch = sampled(actor)
    if known == "pre_tanh":
        batch = with_pre_tanh(batch)
    critic = ValueOperator(nn.Linear(1, 1), in_keys=["observation"])
    loss = kind(actor, critic, reference=reference, ref_kl_coef=1.0, ref_kl_estimator=estimator)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "actions lie")
        out = loss(batch)
    assert float(out["loss_objective"].detach()) == pytest.approx(-1.0, abs=1e-4)
    spread = 1e-3 if estimator == "exact" else 4 * 15 / COUNT**0.5
    assert float(out["loss_kl_ref"].detach()) == pytest.approx(112.5, abs=spread)
    out["loss_kl_ref"].backward()
    # d/dm of (m - 0)^2 / 2 is 15; one sample's, (r + 1) (u - m), spreads by 114.
    spread = 1e-3 if estimator == "exact" else 4 * 114 / COUNT**0.5
    assert float(actor[0].module.loc.grad) == pytest.approx(15.0, abs=spread)


def with_pre_tanh(batch: TensorDict) -> TensorDict:
    """The same policy's samples, kept before tanh."""
    u = 15 + torch.randn(COUNT, 1)
    slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
    log_prob = (Normal(15.0, 1.0).log_prob(u) - slope).squeeze(-1)
    return batch.update({"pre_tanh": u, "action": u.tanh(), "action_log_prob": log_prob})


#: Unit Gaussians at loc m and 0: with z = u - m, r = m^2 / 2 + m z, so E[z r] = m, the gradient of
#: the KL m^2 / 2; and E[z r^2 / 2] = m^3 / 2.
LOCS = [5.0, 9.0, 15.0]
REWARDS = [("legacy", "k1"), ("constrained", "k1"), ("retrieve", "k1"), ("constrained", "k2")]
MANY = 100_000


class Still(TenSteps):
    """Observation and reward are 0, whatever is done."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        one = Unbounded((count, 1))
        self.observation_spec = Composite(observation=one, shape=[count])
        self.action_spec, self.reward_spec = one.clone(), one.clone()

    def seen(self) -> dict[str, object]:
        return {"observation": torch.zeros(*self.batch_size, 1)}

    def rewards(self, tensordict) -> dict:
        return {"reward": torch.zeros(*self.batch_size, 1)}


def in_the_reward(way: str, estimator: str, actor: nn.Module, reference: nn.Module) -> nn.Module:
    if way == "constrained":
        return KLConstrainedTransform(reference, estimator=estimator)
    return TRANSFORMS[way](actor, reference)


@pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")
@pytest.mark.parametrize(
    ("way", "estimator", "loc", "where"),
    [
        *((*each, loc, "batch") for each in REWARDS for loc in LOCS),
        *((*each, 9.0, "environment") for each in REWARDS),
    ],
)
def test_the_score_function_gradient_of_the_reward(loc, way, estimator, where) -> None:
    """By klrl's own loss, within 4 standard errors; an environment cannot write to its batch."""
    torch.manual_seed(2)
    actor, reference = policy(loc, 1.0), policy(0.0, 1.0)
    transform = in_the_reward(way, estimator, actor, reference)
    if where == "batch":
        batch = transform(sampled(actor, MANY))
    else:
        with torch.no_grad():
            batch = TransformedEnv(Still(MANY), transform).rollout(1, actor)
        assert "pre_tanh" not in batch.keys()
    batch["advantage"] = batch["next", "reward"].detach()
    batch["value_target"] = torch.zeros_like(batch["advantage"])
    critic = ValueOperator(nn.Linear(1, 1), in_keys=["observation"])
    out = ClipPPOLoss(actor, critic, entropy_bonus=False)(batch)
    out["loss_objective"].backward()
    # By the moments of z: the variances of z r and of z r^2 / 2.
    true, variance = {
        "k1": (loc, loc**4 / 4 + 2 * loc**2),
        "k2": (loc**3 / 2, loc**8 / 64 + 7 * loc**6 / 8 + 15 * loc**4 / 4),
    }[estimator]
    error = (variance / MANY) ** 0.5
    found = float(actor[0].module.loc.grad)
    assert found == pytest.approx(true, abs=4 * error)
    assert float(out["kl_approx"]) == pytest.approx(0.0, abs=1e-5)  # the first ratio is 1


@pytest.mark.parametrize("loc", LOCS)
def test_k3_is_that_of_data_that_kept_the_sample(loc: float) -> None:
    """Sample by sample: u that klrl drew, scored in float64, and kept by another policy."""
    torch.manual_seed(0)
    actor, reference = policy(loc, 1.0), policy(0.0, 1.0)
    batch = KLConstrainedTransform(reference, estimator="k3")(sampled(actor, MANY))
    raw = sampled(actor, MANY).exclude(*PARAMS)
    u = batch["pre_tanh"].double()
    slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
    raw["action"], raw["pre_tanh"] = batch["action"], batch["pre_tanh"]
    raw["action_log_prob"] = (Normal(loc, 1.0).log_prob(u) - slope).squeeze(-1).float()
    kept = KLConstrainedTransform(reference, estimator="k3")(raw)["next", "kl_penalty"]
    found, r = batch["next", "kl_penalty"], loc**2 / 2 + loc * (u - loc)
    torch.testing.assert_close(found, kept, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.double(), (-r).exp() - 1 + r, atol=1e-5, rtol=1e-5)


def test_the_draw_is_reproducible_and_leaves_the_generator_alone() -> None:
    """The same transitions, shuffled and in parts: the same samples (where float32 tells the
    transitions apart), and no two alike."""
    actor, reference = policy(15.0, 1.0, 2), policy(0.0, 1.0, 2)
    batch, transform = sampled(actor), KLRewardTransform(reference)
    state, order = torch.get_rng_state(), torch.arange(COUNT - 1, -1, -1)
    u = transform(batch.clone())["pre_tanh"]
    shuffled = batch[order].clone()
    parts = torch.cat([transform(part.clone())["pre_tanh"] for part in shuffled.split(100)])
    assert float((parts == u[order]).float().mean()) > 0.99
    assert torch.equal(torch.get_rng_state(), state)
    assert len(u.unique()) > 2 * COUNT * 0.99
    assert abs(float(torch.corrcoef(u.T)[0, 1])) < 4 / COUNT**0.5


def test_actions_that_the_log_prob_does_not_fit() -> None:
    """Noise behind the policy clips at the bounds, where the log-prob is still that of its own."""
    actor, reference = policy(5.0, 1.0), policy(0.0, 1.0)
    batch = sampled(actor)
    batch["action"], batch["action_log_prob"] = torch.ones(COUNT, 1), torch.full((COUNT,), -50.0)
    expected = reference.log_prob(batch.copy())
    with pytest.warns(UserWarning, match="bounds of TanhNormal"):
        torch.testing.assert_close(score(reference, batch), expected, atol=0, rtol=0)
    assert "pre_tanh" not in batch.keys()


SHAPES = [(), (1,), (3,), (3, 2)]


def log_density(u: torch.Tensor, loc: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """log pi(tanh(u)) in float64, by the density's formula."""
    u, loc, scale = (value.double() for value in (u, loc, scale))
    gauss = -(((u - loc) / scale) ** 2) / 2 - scale.log() - math.log(2 * math.pi) / 2
    return (gauss - torch.log(4 / (u.exp() + (-u).exp()) ** 2)).sum(-1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("far", [0.4, 12.0], ids=["inside", "saturated"])
@pytest.mark.parametrize("kind", ["plain", "composite", "no log-prob"])
def test_draws_and_log_probs_in_every_batch_shape(shape, far: float, kind: str) -> None:
    """The second of two coordinates is saturated, or none; also without a batch dimension."""
    loc, scale = torch.tensor([0.3, far]).expand(*shape, 2), torch.full((*shape, 2), 0.7)
    dist, key = TanhNormal(loc, scale), "action"
    if kind == "composite":
        params = TensorDict({"action": {"loc": loc, "scale": scale}}, shape)
        dist = CompositeDistribution(params, distribution_map={"action": TanhNormal})
    known = loc + scale * torch.randn(*shape, 2)
    batch = TensorDict({"action": torch.tanh(known).clamp(-1 + 2**-20, 1 - 2**-20)}, shape)
    stored = log_density(known, loc, scale).float()
    keys = [] if kind == "no log-prob" else ["action_log_prob"]
    batch.update(dict.fromkeys(keys, stored))
    head = dist.dists["action"] if kind == "composite" else dist
    lost = saturated(head, batch["action"])
    assert lost[..., 1].all() == (far > 1)
    assert not lost[..., 0].any()
    assert any_lost(dist, batch, key) is (far > 1)
    draw(batch, dist, key, keys)
    assert any_kept(dist, batch, key) is (far > 1)
    u = batch[kept_at(dist, key)] if far > 1 else torch.atanh(batch["action"])
    inside = torch.where(lost, u, known)
    torch.testing.assert_close(u, inside, atol=1e-4, rtol=1e-4)
    assert (u[lost] > 6).all()
    now = log_density(u, loc, scale)
    torch.testing.assert_close(log_prob_before_tanh(head, u).double(), now, atol=1e-3, rtol=1e-5)
    found = log_probs(dist, batch, key)["action_log_prob"]
    assert found.shape == shape
    torch.testing.assert_close(found.double(), now, atol=1e-3, rtol=1e-4)
    if keys:
        torch.testing.assert_close(batch["action_log_prob"], found, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "loc"), [("legacy", 7.0), ("constrained", 0.2), ("retrieve", -12.0)]
)
def test_one_environment_without_a_batch_dimension(name: str, loc: float) -> None:
    actor, reference = (policy(*pair, low=-2.0, high=2.0) for pair in ((loc, 1.0), (0.0, 2.0)))
    env = TransformedEnv(GymEnv("Pendulum-v1"), TRANSFORMS[name](actor, reference))
    with torch.no_grad():
        steps = env.rollout(100, actor)
    kl = steps["next", "kl_penalty"].squeeze(-1).double()
    u = torch.randn(200_000, dtype=torch.float64) + loc
    spread = float((Normal(loc, 1.0).log_prob(u) - Normal(0.0, 2.0).log_prob(u)).std())
    expected = true_kl((loc, 1.0), (0.0, 2.0))
    assert float(kl.mean()) == pytest.approx(expected, abs=4 * spread / 10 + 0.01)
    if abs(loc) < 1:  # no action is saturated: each step's is the density's
        u = torch.atanh((steps["action"] / 2).double()).squeeze(-1)
        ratio = Normal(loc, 1.0).log_prob(u) - Normal(0.0, 2.0).log_prob(u)
        torch.testing.assert_close(kl, ratio, atol=1e-3, rtol=1e-3)
