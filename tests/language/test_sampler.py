"""The sampler against plain transformers: tokens, masks, log-probs, truncation, determinism."""

import re

import pytest
import torch
from transformers import DynamicCache

from klrl.language.data.batch import make_batch
from klrl.language.run import sampler as module
from klrl.language.run.sampler import CacheSampler, Decoding, SpecialTokens
from tests.language.toys import EOS, FAMILIES, GROUP, PAD, network, of_tokens, prompts, truth

families = pytest.mark.parametrize("family", FAMILIES)
KINDS = ("shared", "copied")
kinds = pytest.mark.parametrize("kind", KINDS)
MANY_EOS = tuple(range(2, 60))  # a fifth of the vocabulary ends a response: lengths vary


def make(kind, model, eos=MANY_EOS, pad=PAD):
    return CacheSampler(model, SpecialTokens(eos, pad), way=kind, keep_states=True)


@kinds
@families
@pytest.mark.parametrize("pad", [PAD, EOS], ids=["pad", "pad_is_eos"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_rollout_is_what_plain_transformers_says_of_it(kind, family, pad, temperature) -> None:
    model, (ids, mask) = network(family), prompts(pads=3)
    found = make(kind, model, pad=pad)(ids, mask, GROUP, Decoding(5, temperature))
    batch = make_batch(ids, mask, found, GROUP)
    lengths = found.mask.sum(1)
    assert lengths.min() < lengths.max()
    expected = of_tokens(truth(model, batch, temperature), batch)
    torch.testing.assert_close(found.log_probs.double(), expected, atol=1e-5, rtol=0)
    for row, n in enumerate(lengths.tolist()):
        ended = [int(t) in MANY_EOS for t in found.tokens[row, :n]]
        assert not any(ended[:-1])
        assert ended[-1] != bool(found.truncated[row])
        assert ended[-1] or n == 5
        assert (found.tokens[row, n:] == pad).all()
        assert not found.log_probs[row, n:].any()
    assert found.truncated.any()
    assert not found.truncated.all()


@kinds
def test_the_kept_states_predict_the_tokens(kind) -> None:
    model, (ids, mask) = network(), prompts()
    found = make(kind, model)(ids, mask, GROUP, Decoding(6, 0.7))
    table = (model.lm_head(found.states) / 0.7).log_softmax(-1)
    scored = table.gather(-1, found.tokens[..., None]).squeeze(-1).masked_fill(~found.mask, 0.0)
    torch.testing.assert_close(scored, found.log_probs)


@kinds
def test_the_generator_alone_decides(kind) -> None:
    model, (ids, mask) = network(), prompts()
    sampler = make(kind, model)
    before = torch.get_rng_state()
    one, same, other = (sampler(ids, mask, GROUP, Decoding(6), seed).tokens for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, same)
    assert one.shape != other.shape or not torch.equal(one, other)


@kinds
def test_tokens_follow_the_tempered_softmax(kind) -> None:
    """4,000 draws of a first token against its true distribution (total variation, V = 300)."""
    model, (ids, mask) = network(), prompts(lengths=(4,))
    decoding = Decoding(1, 0.5)
    found = make(kind, model)(ids, mask, 4000, decoding)
    table = (model(ids).logits[0, -1].detach() / 0.5).softmax(-1)
    drawn = torch.bincount(found.tokens[:, 0], minlength=len(table)) / 4000
    noise = (2 * table * (1 - table) / (torch.pi * 4000)).sqrt().sum() / 2
    assert (drawn - table).abs().sum() / 2 < 1.3 * noise
    at_one = model(ids).logits[0, -1].detach().softmax(-1)
    assert (at_one - table).abs().sum() / 2 > 3 * noise


@kinds
@families
def test_greedy_takes_the_likeliest(kind, family) -> None:
    model, (ids, mask) = network(family), prompts()
    decoding = Decoding(5, greedy=True)
    found = make(kind, model, eos=(299,))(ids, mask, 1, decoding)
    for row, table in enumerate(truth(model, make_batch(ids, mask, found, 1))):
        assert torch.equal(found.tokens[row, : len(table)], table.argmax(-1))


@kinds
def test_sampling_stops_when_all_have_ended(kind) -> None:
    model, (ids, mask) = network(), prompts()
    every = tuple(range(300))
    found = make(kind, model, eos=every)(ids, mask, GROUP, Decoding(50))
    assert found.tokens.shape == (9, 1)
    assert not found.truncated.any()


@kinds
def test_a_prompt_longer_than_the_context_is_refused(kind) -> None:
    model, (ids, mask) = network(), prompts(pads=4)
    model.config.max_position_embeddings = 11
    make(kind, model)(ids, mask, 1, Decoding(4))
    with pytest.raises(ValueError, match="12 tokens.*max_position_embeddings=11"):
        make(kind, model)(ids, mask, 1, Decoding(5))


@pytest.mark.parametrize(
    ("kind", "rows"), [("shared", module.SharedCache), ("copied", module.CopiedCache)]
)
def test_finished_rows_leave_the_cache_and_change_no_other(kind, rows, monkeypatch) -> None:
    model, (ids, mask) = network(), prompts(lengths=(3, 7, 5, 4), pads=2)
    sizes, step = [], rows.step

    def counted(self, tokens):
        sizes.append(len(tokens))
        return step(self, tokens)

    monkeypatch.setattr(rows, "step", counted)
    found = make(kind, model)(ids, mask, 2, Decoding(12), 1)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 8
    assert found.mask[:2].sum(1).max() < found.mask[2:].sum(1).max(), "an early prompt leaves"
    batch = make_batch(ids, mask, found, 2)
    expected = of_tokens(truth(model, batch), batch)
    torch.testing.assert_close(found.log_probs.double(), expected, atol=1e-5, rtol=0)


@kinds
def test_dropout_is_off_while_sampling(kind) -> None:
    model, (ids, mask) = network("gpt2"), prompts()
    still = make(kind, model)(ids, mask, GROUP, Decoding(6))
    found = make(kind, model.train())(ids, mask, GROUP, Decoding(6))
    assert torch.equal(found.tokens, still.tokens)
    assert torch.equal(found.log_probs, still.log_probs)
    assert model.training


@families
def test_the_self_check_tells_how_it_goes_on(family, monkeypatch) -> None:
    model, (ids, mask) = network(family), prompts()
    sampler = CacheSampler(model, SpecialTokens((EOS,), PAD))

    def settled() -> str:
        return str(sampler.self_check(ids, mask, GROUP))

    assert sampler.way == "shared"
    assert settled().startswith("cache shared by a prompt's responses; log-prob error, nats: ")

    def slots(self, spread=module.SharedCache._spread):
        spread(self)
        self.position_ids = self.position_ids + 3

    monkeypatch.setattr(module.SharedCache, "_spread", slots)
    line = settled()
    assert line.startswith("cache copied per response")
    assert re.search("ok; cache shared by a prompt's responses: off by [0-9.]+ nats$", line)
    assert sampler.way == "copied"
    assert settled().endswith("ok")

    def no_copies(self, rows):
        raise AttributeError("no attribute 'reorder_cache'\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(DynamicCache, "reorder_cache", no_copies)
        line = settled()
    assert line.startswith("no cache: each token recomputes its whole row; log-prob error, nats: ")
    error = "AttributeError: no attribute 'reorder_cache'"
    assert line.endswith(f"ok; cache copied per response: {error}")

    sampler.way = "copied"

    def wrong(self, spread=module.CopiedCache._spread):
        spread(self)
        self.mask[:] = 1

    monkeypatch.setattr(module.CopiedCache, "_spread", wrong)
    monkeypatch.setattr(module.Recomputed, "start", lambda self: 2 * self._prompts())
    words = r"no way to sample .*\(cache copied .*; no cache: .*\); choose"
    with pytest.raises(ValueError, match=words):
        settled()
