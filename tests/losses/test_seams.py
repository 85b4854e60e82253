"""The LossModules where TorchRL's own interfaces meet them: keywords, heads, beta, compile."""

import math
from contextlib import nullcontext

import pytest
import torch
import torchrl.objectives
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)
from torch import nn
from torchrl.modules import IndependentNormal, TanhNormal, ValueOperator

from klrl.kl import freeze
from klrl.losses import ClipPPOLoss, KLPENPPOLoss
from tests.agents import moved
from tests.losses.test_documented import Problem
from tests.transforms import heads
from tests.transforms.toys import COUNT, actor

both = pytest.mark.parametrize("kind", [KLPENPPOLoss, ClipPPOLoss])


def keywords(batch: TensorDict) -> dict[str, torch.Tensor]:
    """A batch as TorchRL's dispatch wants it: ("next", "done") is next_done."""
    return {
        key if isinstance(key, str) else "_".join(key): value
        for key, value in batch.items(True, True)
        if key not in ("advantage", "value_target", "state_value")
    }


@both
@pytest.mark.parametrize("reference", [False, True])
def test_keywords_give_what_a_tensordict_gives(kind, reference: bool) -> None:
    known = Problem()
    batch = known.batch.exclude("advantage", "value_target", "state_value")
    none = torch.zeros(COUNT, 1, dtype=torch.bool)
    after = {"observation": torch.randn(COUNT, 3), "reward": torch.randn(COUNT, 1)}
    batch["next"] = {**after, "done": none, "terminated": none}
    more = {"reference": moved(freeze(known.actor)), "ref_kl_coef": 0.3} if reference else {}
    loss = kind(known.actor, known.critic, **more)
    expected = loss(batch.copy())
    if kind is ClipPPOLoss:  # TorchRL's reads no parameters, and refuses keywords for them
        batch = batch.exclude("loc", "scale")
    values = loss(**keywords(batch))
    assert loss.out_keys[0] == "loss_objective"
    assert ("loss_kl_ref" in loss.out_keys) is reference
    for key, value in zip(loss.out_keys, values, strict=True):
        torch.testing.assert_close(value, expected[key], msg=str(key))
    loss.select_out_keys("loss_objective")
    torch.testing.assert_close(loss(**keywords(batch)), expected["loss_objective"])


@both
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
@pytest.mark.parametrize("one_key", [False, True])
def test_heads_add_in_the_kl_to_a_reference(kind, estimator, reduction: str, one_key) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        below = "action" if one_key else "agent"
        policy = heads.two_headed_actor(below, one_key=one_key)
        reference = moved(freeze(policy))
        batch = TensorDict({"agent": {"seen": torch.randn(COUNT, 3)}}, [COUNT])
        critic = ValueOperator(nn.Linear(3, 1), in_keys=[("agent", "seen")])
        with torch.no_grad():
            policy(batch)
            batch["advantage"] = torch.zeros(COUNT, 1)
            batch["value_target"] = torch.zeros(COUNT, 1)
            moved(policy)
            old = batch[below, "move_log_prob"] + batch[below, "press_log_prob"]
            scored = [heads.by_hand(model, batch) for model in (policy, reference)]
    finally:
        torch.set_default_dtype(torch.float32)
    (p, q), (log_p, log_q) = zip(*scored, strict=True)
    ratio, r = (log_p - old).exp(), log_p - log_q
    each = {
        "exact": sum(torch.distributions.kl_divergence(a, b) for a, b in zip(p, q, strict=True)),
        "k1": ratio * r,
        "k2": ratio * r**2 / 2,
        "k3": ratio * ((-r).exp() - 1 + r),
    }[estimator]
    loss = kind(
        policy,
        critic,
        reference=reference,
        ref_kl_coef=0.3,
        ref_kl_estimator=estimator,
        reduction=reduction,
    )
    for name, suffix in (("action", ""), ("sample_log_prob", "_log_prob")):
        loss.set_keys(**{name: [(below, head + suffix) for head in ("move", "press")]})
    out = loss(batch.copy())
    torch.testing.assert_close(out["kl_approx"], (old - log_p).mean())
    reduced = {"none": each, "mean": each.mean(), "sum": each.sum()}[reduction]
    torch.testing.assert_close(out["loss_kl_ref"].detach(), 0.3 * reduced, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out["kl_ref"], each.mean(), rtol=1e-9, atol=1e-12)


@both
@pytest.mark.parametrize("estimator", ["exact", "k1"])
def test_padding_counts_nowhere_in_the_kl_to_a_reference(kind, estimator: str) -> None:
    """TorchRL's validity mask ("collector", "mask"): what it leaves out holds NaN."""
    known = Problem()
    reference = moved(freeze(known.actor))
    settings = {"reference": reference, "ref_kl_coef": 1.0, "ref_kl_estimator": estimator}
    real = COUNT // 2
    for reduction in ("mean", "sum"):
        loss = kind(known.actor, known.critic, reduction=reduction, **settings)
        expected = loss(known.batch[:real].copy())
        padded = known.batch.copy()
        padded["collector", "mask"] = torch.arange(COUNT) < real
        padded["observation"] = padded["observation"].clone()
        padded["observation"][real:] = 1e3
        out = loss(padded)
        for key in ("loss_kl_ref", "kl_ref"):
            torch.testing.assert_close(out[key], expected[key], msg=key)


def test_kl_old_new_is_from_the_old_policy_to_the_new() -> None:
    """By the closed form of two Gaussians, with a mask; the other direction differs by a half."""
    known = Problem()
    loss = KLPENPPOLoss(known.actor, known.critic)
    with torch.no_grad():
        known.actor[0].module[0].bias[2:] += 1.0  # wider now: the two directions differ
        known.new = known.actor.get_dist(known.batch.select("observation"))
    expected = known.kl().squeeze(-1)
    p, q = known.new, known.old
    other = torch.distributions.kl_divergence(p, q).mean()
    assert float((other - expected.mean()).abs() / expected.mean()) > 0.3
    found = loss.kl_old_new(known.batch)
    torch.testing.assert_close(found, expected.mean(), atol=1e-5, rtol=1e-5)
    known.batch["collector", "mask"] = torch.arange(COUNT) < 5
    found = loss.kl_old_new(known.batch)
    torch.testing.assert_close(found, expected[:5].mean(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kl", [math.inf, -math.inf, math.nan])
def test_a_kl_that_is_no_number_leaves_beta(kl: float) -> None:
    known = Problem()
    loss = KLPENPPOLoss(known.actor, known.critic, beta=0.5)
    for value in (kl, torch.tensor(kl)):
        with pytest.warns(UserWarning, match=r"KL\(old\|\|new\)=.*beta stays at 0.5"):
            assert loss.update_beta(value) == 0.5
    assert float(loss.beta) == 0.5


def bare(*parts: nn.Module) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(actor()[0], *parts)


WRONG = {
    "no distribution": lambda: bare(),
    "a network": lambda: actor()[0],
    "no module": lambda: nn.Linear(3, 2),
    "no keys": lambda: bare(
        ProbabilisticTensorDictModule(["loc", "scale"], [], distribution_class=IndependentNormal)
    ),
}


@both
@pytest.mark.parametrize("name", WRONG)
def test_a_head_without_keys_is_refused_in_words(kind, name: str) -> None:
    known = Problem()
    with pytest.raises(TypeError, match="^actor_network=.*ProbabilisticTensorDictModule"):
        kind(WRONG[name](), known.critic)
    with pytest.raises(TypeError, match="^reference=.*ProbabilisticTensorDictModule"):
        kind(known.actor, known.critic, reference=WRONG[name]())


@both
def test_a_head_without_log_prob_serves(kind) -> None:
    head = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=IndependentNormal
    )
    known = Problem()
    plain = ProbabilisticTensorDictSequential(known.actor[0], head)
    outs = [kind(policy, known.critic)(known.batch.copy()) for policy in (known.actor, plain)]
    torch.testing.assert_close(outs[1]["loss_objective"], outs[0]["loss_objective"])


class Bare(nn.Module):
    """A policy that names neither its parameters nor its action, as TorchRL's losses take it."""

    in_keys = ("observation",)

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def get_dist(self, data: TensorDict) -> torch.distributions.Distribution:
        return self.policy.get_dist(data)


class FromParameters(Bare):
    def build_dist_from_params(self, data: TensorDict) -> torch.distributions.Distribution:
        return self.policy.build_dist_from_params(data)


@both
@pytest.mark.parametrize("estimator", ["exact", "k1"])
def test_an_actor_with_get_dist_and_in_keys_serves(kind, estimator: str) -> None:
    known = Problem()
    reference = moved(freeze(known.actor))
    settings = {"reference": reference, "ref_kl_coef": 0.3, "ref_kl_estimator": estimator}
    bare = (Bare if kind is ClipPPOLoss else FromParameters)(known.actor)
    batch = known.batch.rename_key_("action", "move").rename_key_("action_log_prob", "log_p")
    outs = []
    for policy in (known.actor, bare):
        loss = kind(policy, known.critic, **settings)
        loss.set_keys(action="move", sample_log_prob="log_p")
        outs.append(loss(batch.copy()))
    for key, value in outs[0].items():
        torch.testing.assert_close(outs[1][key], value, msg=key)


def made_up(composite: bool, width: float) -> TensorDict:
    """Clipped noise for actions, log-probs near 0, parameters that know nothing of either."""
    action, loc = torch.randn(8, 4, 2).clamp(-1, 1), width * torch.randn(8, 4, 2)
    params = {"loc": loc, "scale": width * torch.rand(8, 4, 2) + 1e-4}
    known = {"params": {"move": params}, "move": action} if composite else params
    key = "move_log_prob" if composite else "action_log_prob"
    return TensorDict(
        {
            "observation": torch.randn(8, 4, 3),
            **known,
            **({} if composite else {"action": action}),
            key: torch.randn(8, 4) / 10,
            "advantage": torch.randn(8, 4, 1),
            "value_target": torch.randn(8, 4, 1),
        },
        [8, 4],
    )


def squashed(composite: bool) -> nn.Module:
    if not composite:
        return actor(TanhNormal)
    net = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
    return heads.composite(net, {"move": TanhNormal})


@both
@pytest.mark.filterwarnings("ignore:.*(entropy|composite).*:UserWarning")
@pytest.mark.parametrize("composite", [False, True])
@pytest.mark.parametrize("width", [0.1, 1.0])
def test_actions_that_were_not_sampled_have_torchrls_loss(kind, composite, width) -> None:
    torch.manual_seed(0)
    policy, batch = squashed(composite), made_up(composite, width)
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    outs = []
    for loss_class in (kind, getattr(torchrl.objectives, kind.__name__)):
        # TorchRL's beta would move between loss and gradient.
        still = {"increment": 1.0, "decrement": 1.0} if kind is KLPENPPOLoss else {}
        loss = loss_class(policy, critic, functional=False, **still)
        if composite:
            loss.set_keys(action=["move"], sample_log_prob=["move_log_prob"])
        torch.manual_seed(0)
        warned = pytest.warns(UserWarning, match="could have produced these actions")
        with warned if loss_class is kind else nullcontext():
            out = loss(batch.copy())
        policy.zero_grad()
        (out["loss_objective"] + out["loss_entropy"] + out["loss_critic"]).backward()
        outs.append(out.detach().update({k: p.grad for k, p in policy.named_parameters()}))
    for key, value in outs[1].items():
        assert bool(value.isfinite().all()), key
        torch.testing.assert_close(outs[0][key], value, msg=str(key))


# torch.compile


@pytest.mark.slow
@pytest.mark.integration
@both
@pytest.mark.filterwarnings("ignore")
def test_compiled_losses_have_the_values_and_gradients_of_eager_ones(kind) -> None:
    known = Problem()
    reference = moved(freeze(known.actor))
    results = []
    for wrap in (lambda loss: loss, torch.compile):
        loss = kind(known.actor, known.critic, reference=reference, ref_kl_coef=0.3)
        call = wrap(loss)
        for _ in range(2):
            loss.zero_grad()
            out = call(known.batch.copy())
            sum(out[k] for k in out.keys() if k.startswith("loss_")).backward()
        grads = [p.grad.clone() for p in loss.parameters()]
        results.append((out["loss_objective"].detach(), out["loss_kl_ref"].detach(), *grads))
        if kind is KLPENPPOLoss:
            assert float(loss.beta) == 1.0
            assert loss.update_beta(1.0) == 2.0
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)
