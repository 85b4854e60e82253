"""The LLM-side KLRewardTransform on batches, against plain transformers."""

import copy

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from klrl.envs.llm.transforms.kl.reward import KLRewardTransform
from tests.transforms.llm_toys import alone, network, wrapper
from tests.transforms.test_llm_truth import by_hand, padded, token_rows

COEF = 0.4


def batch(model, *, masks: bool = True, response_only: bool = False) -> TensorDict:
    """Sampled by ``model``, in klrl's layout, with the sampler's log-probs, zero on the prompt."""
    rows = token_rows()
    data = padded(rows, "both", 0)
    full = torch.zeros(data["tokens", "full"].shape)
    for index, (prompt, response) in enumerate(rows):
        mask = data["masks", "all_assistant_mask"][index]
        full[index, mask] = alone(model, torch.cat([prompt, response]))[len(prompt) :]
    width = max(len(prompt) for prompt, _ in rows)
    data["tokens", "prompt"] = data["tokens", "full"][:, :width]
    data["log_probs"] = {"response": full[:, width:]} if response_only else {"full": full}
    if not masks:
        del data["masks", "all_assistant_mask"]
    return data


@pytest.mark.parametrize("masks", [True, False], ids=["assistant mask", "prompt length"])
@pytest.mark.parametrize("response_only", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_three_keys_are_written(family: str, response_only: bool, masks: bool) -> None:
    model, reference = network(family), network(family, 1)
    data = batch(model, masks=masks, response_only=response_only)
    real = padded(token_rows(), "both", 0)["masks", "all_assistant_mask"]
    out = KLRewardTransform(wrapper(reference, "tokens"), coef=COEF)(data)["next"]
    for index, r in enumerate(by_hand(token_rows(), model, reference, "k1")):
        kl, reward, ref = (
            out[key][index].squeeze(-1) for key in ("kl_penalty", "reward", "ref_log_prob")
        )
        torch.testing.assert_close(kl[real[index]], r, atol=2e-5, rtol=0)
        shaped = -COEF * r
        shaped[-1] += index + 1.0
        torch.testing.assert_close(reward[real[index]], shaped, atol=2e-5, rtol=0)
        pair = token_rows()[index]
        scored = alone(reference, torch.cat(pair))[len(pair[0]) :]
        torch.testing.assert_close(ref[real[index]], scored, atol=2e-5, rtol=0)
        for row in (kl, reward, ref):
            assert not row[~real[index]].any()


def test_ragged_batches_come_back_ragged_or_padded_on_the_asked_side() -> None:
    model, reference = network(), network(seed=1)
    samples = [
        TensorDict(
            {
                "tokens": {"full": torch.cat(pair), "prompt": pair[0]},
                "log_probs": {"full": alone(model, torch.cat(pair))},
                "next": {"reward": torch.zeros(1, 1)},
            }
        )
        for pair in token_rows()
    ]
    results = {}
    for name, pad_output, side in (
        ("ragged", False, "left"),
        ("left", True, "left"),
        ("right", True, "right"),
    ):
        transform = KLRewardTransform(
            wrapper(reference, "tokens", pad_output=pad_output), padding_side=side
        )
        assert transform.pad_output is pad_output
        out = transform(lazy_stack([sample.clone() for sample in samples]))
        results[name] = out["next"].get("kl_penalty", as_list=True)
    longest = max(len(torch.cat(pair)) for pair in token_rows())
    for index, r in enumerate(by_hand(token_rows(), model, reference, "k1")):
        row = results["ragged"][index].squeeze(-1)
        torch.testing.assert_close(row[-len(r) :], r, atol=2e-5, rtol=0)
        left, right = (results[side][index].squeeze(-1) for side in ("left", "right"))
        assert len(left) == len(right) == longest
        torch.testing.assert_close(left[longest - len(row) :], row)
        torch.testing.assert_close(right[: len(row)], row)


def test_all_tokens_where_assistant_only_is_off() -> None:
    model, reference = network(), network(seed=1)
    data = batch(model)
    for index, pair in enumerate(token_rows()):
        real = data["masks", "all_attention_mask"][index]
        data["log_probs", "full"][index, real] = alone(model, torch.cat(pair))
    out = KLRewardTransform(wrapper(reference, "tokens"), assistant_only=False)(data)["next"]
    for index, pair in enumerate(token_rows()):
        r = alone(model, torch.cat(pair)) - alone(reference, torch.cat(pair))
        real = data["masks", "all_attention_mask"][index]
        torch.testing.assert_close(out["kl_penalty"][index, real].squeeze(-1), r, atol=2e-5, rtol=0)


def test_a_missing_reward_counts_as_zero_and_one_that_is_not_charged_stays() -> None:
    model, reference = network(), network(seed=1)
    data = batch(model)
    del data["next", "reward"]
    out = KLRewardTransform(wrapper(reference, "tokens"), coef=COEF)(data.clone())["next"]
    torch.testing.assert_close(out["reward"], -COEF * out["kl_penalty"])
    kept = KLRewardTransform(wrapper(reference, "tokens"), add_to_reward=False)(batch(model))
    assert kept["next", "reward"].flatten().tolist() == [1.0, 2.0, 3.0]
    assert kept["next", "kl_penalty"].any()


def test_other_keys_and_another_log_prob_key() -> None:
    model, reference = network(), network(seed=1)
    data = batch(model)
    data["old", "full"] = data.pop("log_probs")["full"]
    data["next", "score"] = data["next"].pop("reward")
    out = KLRewardTransform(
        wrapper(reference, "tokens"),
        in_keys=["score"],
        out_keys=["shaped", ("kl", "tokens"), "ref"],
        log_prob_key=("old", "full"),
    )(data)["next"]
    assert {"shaped", ("kl", "tokens"), "ref", "score"} <= set(out.keys(include_nested=True))
    assert out["score"].shape == (3, 1, 1)
    torch.testing.assert_close(
        out["shaped"].sum((1, 2)), out["score"].sum((1, 2)) - out["kl", "tokens"].sum((1, 2))
    )


def test_the_coefficient_moves_and_the_transform_can_be_copied() -> None:
    model, reference = network(), network(seed=1)
    transform = KLRewardTransform(wrapper(reference, "tokens"), coef=torch.tensor(0.0))
    out = transform(batch(model))["next"]
    assert float(out["reward"].sum()) == 6.0
    copied = copy.deepcopy(transform)
    copied.coef.fill_(2.0)
    charged = copied(batch(model))["next"]
    torch.testing.assert_close(charged["reward"].sum(), 6.0 - 2 * charged["kl_penalty"].sum())
    assert float(transform.coef) == 0.0
    assert any("ref_model" in key for key in transform.state_dict())


def test_the_temperature_is_that_of_the_reference_or_given() -> None:
    model, reference = network(), network(seed=1)
    pair = token_rows()[0]
    real = batch(model)["masks", "all_assistant_mask"][0]
    for kwargs, ref, temperature in (
        ({}, wrapper(reference, "tokens", generate_kwargs={"temperature": 0.5}), 0.5),
        ({"temperature": 2.0}, wrapper(reference, "tokens"), 2.0),
    ):
        out = KLRewardTransform(ref, **kwargs)(batch(model))["next", "ref_log_prob"]
        scored = alone(reference, torch.cat(pair), temperature)[len(pair[0]) :]
        torch.testing.assert_close(out[0, real].squeeze(-1), scored, atol=2e-5, rtol=0)
