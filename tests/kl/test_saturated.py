"""Actions of a TanhNormal that rounding put on a bound: no wrong log-prob, or not in silence."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import nn
from torch.distributions import Normal
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

from klrl.kl import KLConstrainedTransform, KLRewardTransform, RetrieveKL
from klrl.kl.policies import score
from klrl.losses import ClipPPOLoss, KLPENPPOLoss

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


def sampled(actor: nn.Module) -> TensorDict:
    batch = TensorDict({"observation": torch.zeros(COUNT, 1)}, [COUNT])
    with torch.no_grad():
        actor(batch)
    batch["next"] = TensorDict({"reward": torch.zeros(COUNT, 1)}, [COUNT])
    batch["advantage"], batch["value_target"] = torch.ones(COUNT, 1), torch.zeros(COUNT, 1)
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


def test_an_actor_that_is_its_own_reference() -> None:
    """In the mean 0: the sampler's log-prob is of the sample, the other of what is known of it."""
    actor = policy(15.0, 1.0)
    for name, make in TRANSFORMS.items():
        kl = make(actor, actor)(sampled(actor))["next", "kl_penalty"]
        tolerance = 1e-4 if name == "retrieve" else 4 * 2.5 / COUNT**0.5
        assert abs(float(kl.mean())) < tolerance, name


def test_the_expected_log_prob_is_that_of_a_quadrature() -> None:
    """E[log pi(a) | u beyond the cut], two dimensions of which one is saturated, by trapezoids."""
    actor, reference = policy(7.5, 1.2, 2), policy(6.0, 0.7, 2)
    batch = sampled(actor)[:1].exclude("action_log_prob")
    batch["action"] = torch.tensor([[1.0, 0.5]])
    found = score(reference, batch).detach()
    cut = math.atanh(1 - 2.0**-18)
    u = torch.linspace(cut, 30.0, 400_001, dtype=torch.float64)
    density = Normal(7.5, 1.2).log_prob(u).exp()
    slope = 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
    inner = Normal(6.0, 0.7).log_prob(u) - slope
    tail = torch.trapezoid(density * inner, u) / torch.trapezoid(density, u)
    v = math.atanh(0.5)
    point = float(Normal(6.0, 0.7).log_prob(torch.tensor(v))) - math.log(1 - 0.25)
    assert float(found) == pytest.approx(float(tail) + point, abs=2e-3)


def test_pre_tanh_is_read_where_it_is() -> None:
    """Every sample's k1, by torch's Gaussians."""
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
    params = [("params", head, name) for head in ("near", "far") for name in PARAMS]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near, self.far = Constant(0.2, 1.0), Constant(loc, 1.0)

        def forward(self, seen):
            return *self.near(seen), *self.far(seen)

    return ProbabilisticTensorDictSequential(
        TensorDictModule(Both(), ["observation"], params),
        ProbabilisticTensorDictModule(
            in_keys=["params"],
            out_keys=["near", "far"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"near": TanhNormal, "far": TanhNormal}},
            return_log_prob=True,
            default_interaction_type="random",
        ),
    )


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
    ("known", "estimator"), [("parameters", "exact"), ("pre_tanh", "k1"), ("pre_tanh", "exact")]
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


@pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")
@pytest.mark.parametrize("kind", [KLPENPPOLoss, ClipPPOLoss])
def test_the_ratio_of_a_saturated_action(kind) -> None:
    """w of a policy that moved by .1, near that of the tails' masses: 1 where all is saturated."""
    actor = policy(15.0, 1.0)
    batch = sampled(actor)
    with torch.no_grad():
        actor[0].module.loc += 0.1
    critic = ValueOperator(nn.Linear(1, 1), in_keys=["observation"])
    out = kind(
        actor, critic, entropy_bonus=False, **{"beta": 1e-4} if kind is KLPENPPOLoss else {}
    )(batch)
    assert float(out["loss_objective"].detach()) == pytest.approx(-1.0, abs=0.01)


@pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kind", [KLPENPPOLoss, ClipPPOLoss])
def test_a_loss_names_the_exact_kl_where_it_cannot_sample_one(kind, estimator: str) -> None:
    """The parameters give the number; what u was, and so the gradient, is lost."""
    actor, reference = policy(15.0, 1.0), policy(0.0, 1.0)
    critic = ValueOperator(nn.Linear(1, 1), in_keys=["observation"])
    loss = kind(actor, critic, reference=reference, ref_kl_coef=1.0, ref_kl_estimator=estimator)
    with pytest.warns(UserWarning, match="bounds of TanhNormal.*ref_kl_estimator=exact"):
        loss(sampled(actor))


@pytest.mark.filterwarnings("ignore:.*entropy.*:UserWarning")
def test_a_loss_without_either_warns() -> None:
    actor = policy(15.0, 1.0)
    critic = ValueOperator(nn.Linear(1, 1), in_keys=["observation"])
    with pytest.warns(UserWarning, match="bounds of TanhNormal"):
        ClipPPOLoss(actor, critic)(sampled(actor).exclude(*PARAMS))
