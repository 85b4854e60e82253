"""One case per documented argument and error of KLPENPPOLoss and ClipPPOLoss.

TorchRL's values and gradients, the trainer: test_modules. Here every argument is shown to be read,
by numbers.
"""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.nn import functional
from torchrl.modules import (
    ActorValueOperator,
    IndependentNormal,
    ProbabilisticActor,
    TanhNormal,
    TruncatedNormal,
    ValueOperator,
)

from klrl.kl import KLRewardTransform
from klrl.kl.reference import flat_policy
from klrl.losses import ClipPPOLoss, KLPENPPOLoss
from tests.agents import moved
from tests.transforms.toys import COUNT, actor


class Problem:
    """A policy and a critic that moved away from what sampled the batch; all terms by hand."""

    def __init__(self, distribution: type = IndependentNormal) -> None:
        self.actor = actor(distribution)
        self.critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
        batch = TensorDict({"observation": torch.randn(COUNT, 3)}, [COUNT])
        with torch.no_grad():
            self.critic(self.actor(batch))
            batch["advantage"] = torch.randn(COUNT, 1)
            batch["value_target"] = batch["state_value"] + 2 * torch.randn(COUNT, 1)
        self.batch = batch
        moved(self.actor), moved(self.critic)
        with torch.no_grad():
            self.new = self.actor.get_dist(batch.select("observation"))
            self.old = distribution(batch["loc"], batch["scale"])
            self.value = self.critic(batch.select("observation"))["state_value"]
            log_p = self.new.log_prob(batch["action"])
            self.ratio = (log_p - batch["action_log_prob"]).exp().unsqueeze(-1)

    def kl(self) -> torch.Tensor:
        """KL(old||new) of two diagonal Gaussians, [N, 1]."""
        (m0, s0), (m1, s1) = ((d.base_dist.loc, d.base_dist.scale) for d in (self.old, self.new))
        terms = (s1 / s0).log() + (s0**2 + (m0 - m1) ** 2) / (2 * s1**2) - 0.5
        return terms.sum(-1, keepdim=True)

    def loss(self, **kwargs) -> TensorDict:
        return KLPENPPOLoss(self.actor, self.critic, **kwargs)(self.batch.copy())


@pytest.mark.parametrize(
    ("kwargs", "kl", "expected"),
    [
        ({"dtarg": 0.1}, 0.16, 2.0),
        ({"dtarg": 0.1}, 0.14, 1.0),
        ({"dtarg": 0.1}, 0.06, 0.5),
        ({"increment": 3.0}, 0.016, 3.0),
        ({"decrement": 0.25}, 0.006, 0.25),
    ],
)
def test_dtarg_increment_and_decrement(kwargs, kl: float, expected: float) -> None:
    known = Problem()
    assert KLPENPPOLoss(known.actor, known.critic, **kwargs).update_beta(kl) == expected


# TorchRL tells of every estimate that it draws.
@pytest.mark.filterwarnings("ignore:.*(KL|kl|entropy).*:UserWarning")
@pytest.mark.parametrize("samples", [1, 7])
def test_samples_are_drawn_where_no_closed_form_exists(samples: int) -> None:
    known, other = Problem(TruncatedNormal), Problem(TanhNormal)
    torch.manual_seed(5)
    kl = known.loss(samples_mc_kl=samples, entropy_bonus=False)["kl"].mean()
    torch.manual_seed(5)
    x = known.old.rsample((samples,))
    by_hand = (known.old.log_prob(x) - known.new.log_prob(x)).mean()
    torch.testing.assert_close(kl, by_hand, atol=1e-5, rtol=1e-5)
    torch.manual_seed(5)
    entropy = other.loss(samples_mc_entropy=samples)["entropy"]
    torch.manual_seed(5)
    by_hand = -other.new.log_prob(other.new.rsample((samples,))).mean()
    torch.testing.assert_close(entropy, by_hand, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("end", ["coef", "coeff"])
def test_the_entropys_and_the_critics_coefficients(end: str) -> None:
    known = Problem()
    entropy = known.new.entropy().mean()
    critic = functional.smooth_l1_loss(known.value, known.batch["value_target"])
    given = {f"entropy_{end}": 0.4, f"critic_{end}": 0.3}
    for kwargs, of_entropy, of_critic in (({}, 0.01, 1.0), (given, 0.4, 0.3)):
        out = known.loss(**kwargs).detach()
        torch.testing.assert_close(out["loss_entropy"], -of_entropy * entropy)
        torch.testing.assert_close(out["entropy"], entropy)
        torch.testing.assert_close(out["loss_critic"], of_critic * critic)
    assert not {"loss_entropy", "entropy"} & set(known.loss(entropy_bonus=False).keys())


def shared_operator() -> ActorValueOperator:
    common = TensorDictModule(nn.Linear(3, 5), ["observation"], ["hidden"])
    head = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(nn.Linear(5, 4), NormalParamExtractor()), ["hidden"], ["loc", "scale"]
        ),
        ["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    return ActorValueOperator(common, head, ValueOperator(nn.Linear(5, 1), in_keys=["hidden"]))


def test_a_policy_inside_a_policy_is_read_as_one() -> None:
    """tensordict 0.14.3 skips the inner network: drop flat_policy when this fails."""
    model = shared_operator()
    common, head, value_head = model.module
    nested = ProbabilisticTensorDictSequential(common, head)
    flat = ProbabilisticTensorDictSequential(common, *head.module)
    data = TensorDict({"observation": torch.randn(4, 3), "loc": torch.zeros(4, 2)}, [4])
    data["scale"] = torch.ones(4, 2)
    assert not nested.get_dist(data.copy()).base_dist.loc.any()
    assert flat_policy(nested).get_dist(data.copy()).base_dist.loc.any()
    batch = Problem().batch.select("observation", "advantage", "value_target")
    with torch.no_grad():
        flat(batch)
    moved(model)
    batch = batch.exclude("hidden")
    for kind in (KLPENPPOLoss, ClipPPOLoss):
        losses = [
            kind(flat, value_head, reference=flat, ref_kl_coef=0.1),
            kind(actor=nested, critic=value_head, reference=nested, ref_kl_coef=0.1),
            # As KLPENPPOLoss's note has it.
            kind(ProbabilisticTensorDictSequential(model, head), value_head),
        ]
        found = [loss(batch.copy())["loss_objective"] for loss in losses]
        torch.testing.assert_close(found[1], found[0])
        torch.testing.assert_close(found[2], found[0])
        with pytest.raises(ValueError, match="actor and actor_network"):
            kind(flat, value_head, actor=flat)
    assert KLRewardTransform(nested).reference.module.in_keys == flat.in_keys


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"increment": 0.9}, "increment should be >= 1.0"),
        ({"decrement": 1.1}, "decrement should be <= 1.0"),
        ({"beta": 0.0}, "beta=0.0"),
        ({"beta": 1e5}, "beta=100000.0"),
        ({"beta_update": "daily"}, "beta_update=daily"),
        ({"delay_actor": True}, "^delay_actor=True: .*, or use ClipPPOLoss"),
        ({"ref_kl_estimator": "k4"}, "ref_kl_estimator=k4"),
        ({"loss_critic_type": "l3"}, "l3"),
        ({"reduction": "median"}, "median"),
        # The documentation calls them deprecated; TorchRL 0.14.1 refuses them.
        ({"advantage_key": "x"}, "'advantage'.*set_keys"),
        ({"value_target_key": "x"}, "'value_target'.*set_keys"),
        ({"value_key": "x"}, "'value'.*set_keys"),
        ({"lacking": "loc"}, r"lacks \['loc'\]"),
        ({"lacking": "scale"}, r"lacks \['scale'\]"),
    ],
    ids=str,
)
def test_what_the_loss_refuses(kwargs, words: str) -> None:
    known, kwargs = Problem(), dict(kwargs)
    known.batch = known.batch.exclude(*filter(None, [kwargs.pop("lacking", None)]))
    with pytest.raises((ValueError, NotImplementedError, RuntimeError, KeyError), match=words):
        known.loss(**kwargs)
