"""KLComputation on tokens: formats, masks, scores and refusals, against arithmetic."""

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from klrl.kl import KLComputation, estimate_kl

GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")
COEF = 0.5


def log_probs(*sizes: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-3 * torch.rand(size, generator=generator) for size in sizes]


def dense(gen, ref, reward=None, **root) -> TensorDict:
    following = {GEN[0]: {"full": torch.stack(gen)}, REF[0]: {"full": torch.stack(ref)}}
    if reward is not None:
        following["reward"] = reward
    return TensorDict({**root, "next": following}, [len(gen)])


def nested(gen, ref, reward=None, **root) -> TensorDict:
    def to_nested(rows):
        return torch.nested.as_nested_tensor(rows, layout=torch.strided)

    following = {GEN[0]: {"full": to_nested(gen)}, REF[0]: {"full": to_nested(ref)}}
    if reward is not None:
        following["reward"] = reward if isinstance(reward, torch.Tensor) else to_nested(reward)
    masks = {key: to_nested(value) for key, value in root.pop("masks", {}).items()}
    return TensorDict({**root, "masks": masks, "next": following}, [len(gen)])


def stacked(gen, ref, reward=None, masks=None) -> TensorDict:
    samples = []
    for i in range(len(gen)):
        following = {GEN[0]: {"full": gen[i]}, REF[0]: {"full": ref[i]}}
        if reward is not None:
            following["reward"] = reward[i]
        rows = {key: value[i] for key, value in (masks or {}).items()}
        samples.append(TensorDict({"masks": rows, "next": following}, []))
    return lazy_stack(samples)


def rows_of(batch, *key) -> list[torch.Tensor]:
    value = batch["next"].get(key[0] if len(key) == 1 else key, as_list=True)
    return list(value.unbind(0)) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_reward_per_token_is_charged_per_token(estimator: str) -> None:
    gen, ref = log_probs(10, 10), log_probs(10, 10, seed=1)
    reward = torch.randn(2, 10, 1)
    out = KLComputation(coeff=COEF, estimator=estimator)(dense(gen, ref, reward.clone()))
    kl = estimate_kl(torch.stack(gen), torch.stack(ref), estimator)
    assert out["next", "kl_penalty"].shape == (2, 10)
    torch.testing.assert_close(out["next", "kl_penalty"], kl)
    torch.testing.assert_close(out["next", "reward"], reward - COEF * kl.unsqueeze(-1))


@pytest.mark.parametrize("build", [nested, stacked])
def test_ragged_log_probs(build) -> None:
    gen, ref = log_probs(3, 5), log_probs(3, 5, seed=1)
    mask = [torch.arange(n) >= 1 for n in (3, 5)]
    score = [torch.full((1, 1), 2.0), torch.full((1, 1), -1.0)]
    batch = build(gen, ref, score, masks={"all_assistant_mask": mask})
    out = KLComputation(coeff=COEF)(batch)
    kls, rewards = rows_of(out, "kl_penalty"), rows_of(out, "reward")
    for i in range(2):
        kl = (gen[i] - ref[i]) * mask[i]
        torch.testing.assert_close(kls[i], kl)
        shaped = -COEF * kl
        shaped[-1] += float(score[i])
        torch.testing.assert_close(rewards[i], shaped.unsqueeze(-1))


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 1, 1)])
def test_a_score_goes_to_the_last_response_token_and_nowhere_else(shape) -> None:
    """Prompt of 2, responses of 3 and 1, padding: the sum of rewards is the score minus the KL."""
    gen, ref = log_probs(6, 6), log_probs(6, 6, seed=1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0]]).bool()
    score = torch.tensor([3.0, 7.0]).view(shape)
    batch = dense(gen, ref, score, masks={"all_assistant_mask": mask})
    reward = KLComputation(coeff=COEF)(batch)["next", "reward"].squeeze(-1)
    kl = (torch.stack(gen) - torch.stack(ref)) * mask
    expected = -COEF * kl
    expected[0, 4] += 3.0
    expected[1, 2] += 7.0
    torch.testing.assert_close(reward, expected)
    assert not reward[~mask].any()


def test_without_an_assistant_mask_the_prompt_is_taken_off_the_attention() -> None:
    gen, ref = log_probs(6, 6), log_probs(6, 6, seed=1)
    attention = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]).bool()
    batch = dense(
        gen,
        ref,
        torch.ones(2, 1, 1),
        masks={"all_attention_mask": attention},
        tokens={"prompt": torch.zeros(2, 2, dtype=torch.long)},
    )
    out = KLComputation(coeff=COEF)(batch)["next"]
    mask = attention.clone()
    mask[:, :2] = False
    torch.testing.assert_close(out["kl_penalty"], (torch.stack(gen) - torch.stack(ref)) * mask)
    assert (out["reward"].squeeze(-1) + COEF * out["kl_penalty"]).nonzero().tolist() == [
        [0, 4],
        [1, 3],
    ]


def test_padding_counts_nothing_whatever_stands_there() -> None:
    gen, ref = log_probs(4, 4), log_probs(4, 4, seed=1)
    attention = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    for row, real in zip(gen, attention, strict=True):
        row[~real] = float("nan")
    batch = dense(gen, ref, torch.ones(2, 1, 1), masks={"all_attention_mask": attention})
    out = KLComputation()(batch)["next"]
    assert out["kl_penalty"].isfinite().all()
    assert not out["kl_penalty"][~attention].any()
    assert not out["reward"].squeeze(-1)[~attention].any()


def test_log_probs_are_found_below_next_then_at_the_root() -> None:
    gen, ref = log_probs(3), log_probs(3, seed=1)
    batch = dense(gen, ref, torch.zeros(1, 3, 1))
    batch[GEN] = torch.full((1, 3), 99.0)
    moved = batch.clone()
    del moved["next", GEN[0]]
    moved[GEN] = torch.stack(gen)
    kls = [KLComputation()(each)["next", "kl_penalty"] for each in (batch, moved)]
    torch.testing.assert_close(kls[0], kls[1])
    torch.testing.assert_close(kls[0], torch.stack(gen) - torch.stack(ref))


def test_without_next_everything_stands_at_the_root() -> None:
    gen, ref = log_probs(3), log_probs(3, seed=1)
    out = KLComputation(coeff=COEF)(dense(gen, ref, torch.ones(1, 3, 1))["next"])
    torch.testing.assert_close(out["reward"].squeeze(-1), 1 - COEF * (gen[0] - ref[0])[None])


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_dense_reward_beside_ragged_log_probs_is_cut_on_its_padded_side(side: str) -> None:
    gen, ref = log_probs(2, 4), log_probs(2, 4, seed=1)
    reward = torch.arange(1.0, 9.0).view(2, 4, 1)
    out = KLComputation(padding_side=side, coeff=COEF)(nested(gen, ref, reward))
    cut = reward[0, 2:] if side == "left" else reward[0, :2]
    expected = cut - COEF * (gen[0] - ref[0]).unsqueeze(-1)
    torch.testing.assert_close(rows_of(out, "reward")[0], expected)


def test_no_reward_counts_as_zero_and_an_uncharged_one_stays() -> None:
    gen, ref = log_probs(3), log_probs(3, seed=1)
    out = KLComputation(coeff=COEF)(dense(gen, ref))
    torch.testing.assert_close(out["next", "reward"].squeeze(-1), -COEF * (gen[0] - ref[0])[None])
    kept = KLComputation(add_to_reward=False)(dense(gen, ref, torch.ones(1, 1, 1)))
    assert kept["next", "reward"].tolist() == [[[1.0]]]
    assert "reward" not in KLComputation(add_to_reward=False)(dense(gen, ref))["next"].keys()
