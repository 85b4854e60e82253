"""References inside transforms and losses: frozen, moved along, saved, and nobody's parameters."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator

from klrl.kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RetrieveKL,
)
from klrl.kl.reference import FrozenPolicy
from klrl.losses import ClipPPOLoss, KLPENPPOLoss

COUNT = 32


def dropping(seed: int = 0) -> ProbabilisticActor:
    """A policy with dropout and the statistics of a BatchNorm, in training mode."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    module = TensorDictModule(
        nn.Sequential(network, NormalParamExtractor()), ["observation"], ["loc", "scale"]
    )
    return ProbabilisticActor(
        module, ["loc", "scale"], distribution_class=IndependentNormal, return_log_prob=True
    )


def loss(kind: type, reference: nn.Module) -> nn.Module:
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    return kind(dropping(), critic, reference=reference, ref_kl_coef=1.0)


#: name -> (what holds a reference, where it says how far the batch's policy is from it).
HOLDERS = {
    "legacy": (lambda ref: KLRewardTransform(ref, kl_key="kl"), ("next", "kl")),
    "log-prob": (ReferenceModelLogProbTransform, ("next", "ref_log_prob")),
    "divergence": (lambda ref: KLDivergenceTransform(ref, estimator="exact"), "kl_penalty"),
    "constrained": (KLConstrainedTransform, "kl_penalty"),
    "constrained, exact": (
        lambda ref: KLConstrainedTransform(ref, estimator="exact"),
        "kl_penalty",
    ),
    "retrieve": (lambda ref: RetrieveKL(dropping(), ref), "kl_penalty"),
    "klpen": (lambda ref: loss(KLPENPPOLoss, ref), "loss_kl_ref"),
    "clip": (lambda ref: loss(ClipPPOLoss, ref), "loss_kl_ref"),
}
LOSSES = ("klpen", "clip")
holders = pytest.mark.parametrize("name", HOLDERS)


def transition(dtype: torch.dtype = torch.float32) -> TensorDict:
    """Sampled by the policy as it acts: in evaluation mode."""
    policy = dropping().eval().to(dtype)
    batch = TensorDict({"observation": torch.randn(COUNT, 3, dtype=dtype)}, [COUNT])
    with torch.no_grad():
        policy(batch)
    zero = torch.zeros(COUNT, 1, dtype=dtype)
    batch["advantage"], batch["value_target"] = zero.clone(), zero.clone()
    batch["next"] = TensorDict({"reward": zero}, [COUNT])
    return batch


def answer(name: str, holder: nn.Module, batch: TensorDict) -> torch.Tensor:
    key = HOLDERS[name][1]
    out = holder(batch.clone())
    return out[key if name in LOSSES or isinstance(key, tuple) else ("next", key)].detach()


def holding(name: str, seed: int = 1) -> nn.Module:
    """A holder in evaluation mode; a loss leaves the policy in the mode that it is in."""
    holder = HOLDERS[name][0](dropping(seed).eval()).eval()
    if name in LOSSES:
        holder.actor_network.eval()
    return holder


def weights(holder: nn.Module) -> set[int]:
    return {value.data_ptr() for value in holder.parameters()}


@holders
def test_train_does_not_bring_dropout_back(name: str) -> None:
    """KL to itself is 0, and log pi_ref that of the policy in evaluation mode, in either mode."""
    batch = transition()
    holder = HOLDERS[name][0](dropping().eval() if name == "retrieve" else dropping())
    for mode in (True, False, True):
        holder.train(mode)
        if name in LOSSES:  # the loss runs the policy in the mode that it is in, as TorchRL's do
            holder.actor_network.eval()
        expected = batch["action_log_prob"] if name == "log-prob" else 0.0
        found = answer(name, holder, batch)
        torch.testing.assert_close(found, torch.zeros_like(found) + expected, atol=1e-5, rtol=1e-5)


@holders
def test_the_reference_is_nobodys_parameter(name: str) -> None:
    reference = dropping(1)
    holder = HOLDERS[name][0](reference)
    inner = getattr(holder, "reference", None) or getattr(holder, "frozen_model", None)
    held = weights(reference) | (set() if inner is None else weights(inner))
    assert held
    assert not weights(holder) & held
    names = [key for key, _ in holder.named_parameters()]
    assert not [key for key in names if "reference" in key or "frozen" in key]
    expected = {"retrieve": 6, "klpen": 8, "clip": 8}.get(name, 0)
    assert len(list(holder.parameters())) == len(names) == expected


@holders
def test_the_reference_stands_in_the_state(name: str) -> None:
    batch = transition()
    holder, other = holding(name, 1), holding(name, 2)
    expected = answer(name, holder, batch)
    assert not torch.allclose(answer(name, other, batch), expected, atol=1e-3)
    other.load_state_dict(holder.state_dict())
    torch.testing.assert_close(answer(name, other, batch), expected)
    state = holder.state_dict()
    dropped = next(key for key in state if key.endswith("running_mean") and "network" not in key)
    if name == "retrieve":
        dropped = next(key for key in state if "1.model" in key)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({key: value for key, value in state.items() if key != dropped})
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict({**state, dropped: torch.zeros(5)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict({**state, dropped + "_more": torch.zeros(5)})


@holders
def test_the_reference_moves_along(name: str) -> None:
    narrow, wide = transition(), transition().double()
    wide["action_log_prob"] = narrow["action_log_prob"].double()
    holder = holding(name)
    expected = answer(name, holder, narrow)
    holder.to(torch.float64)
    assert {v.dtype for v in holder.state_dict().values() if v.is_floating_point()} == {
        torch.float64
    }
    found = answer(name, holder, wide)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected, atol=1e-4, rtol=1e-4)
    if name in LOSSES:
        return  # TensorDictParams moves to no other kind of device without CUDA
    holder.to("meta")
    assert {str(v.device) for v in holder.state_dict().values()} == {"meta"}


@holders
def test_copies_and_pickles(name: str) -> None:
    batch = transition()
    holder = holding(name)
    expected = answer(name, holder, batch)
    for again in (copy.deepcopy(holder), pickle.loads(pickle.dumps(holder))):
        torch.testing.assert_close(answer(name, again, batch), expected)
        assert len(list(again.parameters())) == len(list(holder.parameters()))


def test_frozen_params_is_the_view_of_the_removed_transform() -> None:
    """Code for TorchRL 0.10 runs the reference on its frozen parameters, and may change them."""
    policy = dropping().eval()
    transform = KLRewardTransform(policy)
    assert not any(v.requires_grad for v in transform.frozen_params.values(True, True))
    seen = TensorDict({"observation": torch.randn(4, 3)}, [4])
    with transform.frozen_params.to_module(transform.functional_actor):
        dist = transform.functional_actor.get_dist(seen.copy())
    torch.testing.assert_close(dist.base_dist.loc, policy.get_dist(seen.copy()).base_dist.loc)
    batch = transition()
    before = answer("log-prob", ReferenceModelLogProbTransform(transform.reference), batch)
    transform.frozen_params.apply_(lambda value: value.data.zero_())
    after = answer("log-prob", ReferenceModelLogProbTransform(transform.reference), batch)
    assert not torch.allclose(before, after)
    trained = KLRewardTransform(policy, requires_grad=True)
    assert {v.requires_grad for v in trained.frozen_params.values(True, True) if v.ndim} >= {True}
    assert weights(trained) == weights(trained.reference), (
        "clones that are asked for may be trained"
    )
    trained.train()
    assert not any(part.training for part in trained.reference.modules())


def test_what_is_frozen_already_is_not_copied_again() -> None:
    reference = FrozenPolicy.copy_of(dropping())
    for transform in (KLRewardTransform(reference), ReferenceModelLogProbTransform(reference)):
        held = transform.reference if hasattr(transform, "reference") else transform.frozen_model
        assert held is reference
    policy = dropping()
    assert FrozenPolicy.copy_of(policy).module is not policy
    assert policy.training, "the policy that is copied is left as it is"
    assert all(p.requires_grad for p in policy.parameters())


@pytest.mark.parametrize("name", LOSSES)
def test_resetting_a_losss_parameters_leaves_the_reference(name: str) -> None:
    holder = HOLDERS[name][0](dropping(1))
    before = [p.clone() for p in holder.reference.parameters()]
    holder.reset_parameters_recursive()
    for old, new in zip(before, holder.reference.parameters(), strict=True):
        assert torch.equal(old, new)
