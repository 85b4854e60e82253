"""Log-probs, masks, KLs and rewards of tokens against plain transformers, one by one."""

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from klrl.kl import RetrieveKL, RetrieveLogProb
from tests.transforms.llm_toys import (
    FAMILIES,
    alone,
    chats,
    conversation,
    network,
    rendered,
    tokenizer,
    wrapper,
)

COEF = 0.3


def token_rows(seed: int = 3, sizes=((3, 5), (7, 2), (4, 6))) -> list[tuple[Tensor, Tensor]]:
    """(prompt, response) ids; every response ends with EOS."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, len(tokenizer()), (n,), generator=generator)  # noqa: E731
    return [(draw(p), torch.cat([draw(r - 1), torch.tensor([2])])) for p, r in sizes]


def padded(rows: list[tuple[Tensor, Tensor]], side: str, pad: int, extra: int = 0) -> TensorDict:
    """A batch in klrl's layout ("both": prompt padded left, response right), or one-sided."""
    width = [max(len(pair[i]) for pair in rows) + extra for i in (0, 1)]
    ids, real, assistant = [], [], []
    for prompt, response in rows:
        before, after = width[0] - len(prompt), width[1] - len(response)
        before, after = {
            "both": (before, after),
            "left": (before + after, 0),
            "right": (0, before + after),
        }[side]
        flags = [False] * before + [True] * (len(prompt) + len(response)) + [False] * after
        answer = [False] * (before + len(prompt)) + [True] * len(response) + [False] * after
        ids.append(
            torch.tensor([pad] * before + prompt.tolist() + response.tolist() + [pad] * after)
        )
        real.append(torch.tensor(flags))
        assistant.append(torch.tensor(answer))
    root = {
        "tokens": {"full": torch.stack(ids)},
        "masks": {
            "all_attention_mask": torch.stack(real),
            "all_assistant_mask": torch.stack(assistant),
        },
        "next": {"reward": torch.arange(1.0, len(rows) + 1).view(-1, 1, 1)},
    }
    return TensorDict(root, [len(rows)])


def by_hand(rows, model, reference, estimator: str) -> list[Tensor]:
    """KL of every response token, from the definition."""
    kls = []
    for prompt, response in rows:
        ids = torch.cat([prompt, response])
        r = (alone(model, ids) - alone(reference, ids))[len(prompt) :].double()
        kls.append({"k1": r, "k2": r**2 / 2, "k3": torch.exp(-r) - 1 + r}[estimator].float())
    return kls


def retrieve_kl(model, reference, **kwargs) -> RetrieveKL:
    return RetrieveKL(
        wrapper(model, "tokens", log_probs_key="gen"),
        wrapper(reference, "tokens", log_probs_key="ref"),
        assistant_only=False,
        coeff=COEF,
        **kwargs,
    )


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("pad", "extra"), [(0, 0), (2, 9)], ids=["pad", "pad==eos"])
def test_log_probs_of_padded_tokens(family: str, side: str, pad: int, extra: int) -> None:
    model, rows = network(family), token_rows()
    batch = padded(rows, side, pad, extra)
    scored = RetrieveLogProb(wrapper(model, "tokens"), assistant_only=False)(batch)
    found = scored["next", "log_probs", "full"]
    for row, real, pair in zip(found, batch["masks", "all_attention_mask"], rows, strict=True):
        torch.testing.assert_close(row[real], alone(model, torch.cat(pair)), atol=1e-5, rtol=0)
        assert not row[~real].any()
    torch.testing.assert_close(
        scored["next", "log_probs_mask"], batch["masks", "all_assistant_mask"]
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kl_and_shaped_reward_of_every_token(family: str, estimator: str) -> None:
    model, reference, rows = network(family), network(family, 1), token_rows()
    batch = padded(rows, "both", 0)
    after = retrieve_kl(model, reference, estimator=estimator)(batch)["next"]
    truth = by_hand(rows, model, reference, estimator)
    masks = batch["masks", "all_assistant_mask"]
    for index, (kl, mask) in enumerate(zip(truth, masks, strict=True)):
        torch.testing.assert_close(after["kl_penalty"][index][mask], kl, atol=2e-5, rtol=1e-5)
        assert not after["kl_penalty"][index][~mask].any()
        shaped = -COEF * kl
        shaped[-1] += index + 1.0  # the score, on the last response token
        reward = after["reward"][index].squeeze(-1)
        torch.testing.assert_close(reward[mask], shaped, atol=2e-5, rtol=1e-5)
        assert not reward[~mask].any()
        assert kl.abs().mean() > 0.01


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_conversations_score_assistant_tokens_alone(turns, pad_output, side) -> None:
    model = network("qwen2")
    batch = conversation(turns)
    transform = RetrieveLogProb(wrapper(model, pad_output=pad_output), padding_side=side)
    key = ("next", "log_probs", "full")
    found = transform(batch).get(key, as_nested_tensor=not pad_output)
    assert found.is_nested is not pad_output
    for row, chat in zip(found.unbind(0), chats(turns), strict=True):
        ids, assistant = rendered(chat)
        truth = alone(model, ids).masked_fill(~assistant, 0.0)
        assert int(assistant.sum()) > turns
        cut = row[-len(ids) :] if side == "left" else row[: len(ids)]
        torch.testing.assert_close(cut, truth, atol=1e-5, rtol=0)
        assert row.numel() == len(ids) or pad_output
        assert float(row.sum()) == pytest.approx(float(truth.sum()), abs=1e-3)


def test_text_is_tokenised_and_its_prompt_is_not_charged() -> None:
    model = network()
    texts = ["hello, how are you", "one two three, and four"]
    prompts = ["hello,", "one two"]
    batch = TensorDict({"text": {}, "next": {}}, [2])
    batch["text"] = TensorDict({"full": texts, "prompt": prompts}, [2])
    transform = RetrieveLogProb(wrapper(model, "text"), assistant_only=False)
    after = transform(batch)["next"]
    for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        ids = torch.tensor(tokenizer()(text)["input_ids"])
        row = after["log_probs", "full"][index][-len(ids) :]
        torch.testing.assert_close(row, alone(model, ids), atol=1e-5, rtol=0)
        given = len(tokenizer()(prompt)["input_ids"])
        assert int(after["log_probs_mask"][index].sum()) == len(ids) - given


@pytest.mark.parametrize("temperature", [None, 0.5, 2.0])
def test_both_models_are_scored_at_the_sampling_temperature(temperature) -> None:
    model, reference, rows = network(), network(seed=1), token_rows()
    gen = wrapper(model, "tokens", log_probs_key="gen", generate_kwargs={"temperature": 0.7})
    ref = wrapper(reference, "tokens", log_probs_key="ref")
    batch = padded(rows, "both", 0)
    transform = RetrieveKL(gen, ref, assistant_only=False, temperature=temperature)
    after = transform(batch)["next"]
    ids = torch.cat(rows[1])
    real = batch["masks", "all_attention_mask"][1]
    for name, network_ in (("log_probs", model), ("ref_log_probs", reference)):
        truth = alone(network_, ids, temperature or 0.7)
        torch.testing.assert_close(after[name, "full"][1][real], truth, atol=1e-5, rtol=0)


def test_dropout_does_not_touch_the_scores_nor_is_it_switched_off_for_good() -> None:
    model, rows = network("gpt2").train(), token_rows()
    model.transformer.h[0].eval()
    batch = padded(rows, "both", 0)
    scores = [
        RetrieveLogProb(wrapper(model, "tokens"), assistant_only=False)(batch.clone())[
            "next", "log_probs", "full"
        ]
        for _ in range(2)
    ]
    torch.testing.assert_close(scores[0], scores[1], atol=0, rtol=0)
    assert model.training
    assert model.transformer.drop.training
    assert not model.transformer.h[0].training


def test_padding_without_a_mask_is_found_at_the_ends_and_eos_is_kept() -> None:
    """Where pad == eos, the first of the trailing pads ended the response."""
    rows, toy = token_rows(), tokenizer(pad_is_eos=True)
    batch = padded(rows, "both", toy.pad_token_id)
    real = batch["masks", "all_attention_mask"]
    del batch["masks"]
    model = wrapper(network(), "tokens", tokenizer=toy)
    found = RetrieveLogProb(model, assistant_only=False)(batch)["next", "log_probs", "full"]
    for row, kept, pair in zip(found, real, rows, strict=True):
        torch.testing.assert_close(row[kept], alone(network(), torch.cat(pair)), atol=1e-5, rtol=0)
        assert not row[~kept].any()


@pytest.mark.parametrize("rooted", [False, True])
def test_ragged_log_probs_of_a_plain_batch_are_read_as_a_list_or_padded(rooted: bool) -> None:
    model, batch = network(), conversation(1)
    if rooted:
        del batch["next"]
    out = RetrieveLogProb(wrapper(model, pad_output=False))(batch)
    key = ("log_probs", "full") if rooted else ("next", "log_probs", "full")
    truth = [
        alone(model, ids).masked_fill(~assistant, 0.0) for ids, assistant in map(rendered, chats(1))
    ]
    assert truth[0].shape != truth[1].shape
    rows = out.get(key, as_list=True)
    assert [row.shape for row in rows] == [row.shape for row in truth]
    padded = out.get(key, as_padded_tensor=True)
    assert padded.shape == (2, max(len(row) for row in truth))
    for row, filled, expected in zip(rows, padded, truth, strict=True):
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(filled[: len(row)], row)
        assert not filled[len(row) :].any()
