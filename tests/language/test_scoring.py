"""Log-probs and exact KLs of responses against plain transformers, one sequence at a time."""

import re

import numpy as np
import pytest
import torch

from klrl.language.data.batch import response_mask, take_prompts
from klrl.language.model import vocabulary
from klrl.language.model.causal_lm import head, sharing_refused
from klrl.language.model.plain import packed_states
from klrl.language.model.vocabulary import (
    Against,
    NextTokens,
    exact_token_kl,
    response_log_probs,
    token_entropy,
    token_measures,
)
from klrl.language.run import scoring
from klrl.language.run.scoring import ScoringLayout, self_check, shared_states
from tests.language.toys import EOS, FAMILIES, GROUP, network, of_tokens, rollout, truth

PACKED, SHARED = ScoringLayout(GROUP, False), ScoringLayout(GROUP, True)
LAYOUTS = pytest.mark.parametrize("layout", [SHARED, PACKED], ids=["shared", "packed"])
families = pytest.mark.parametrize("family", FAMILIES)


def log_probs(layout, model, batch, temperature=1.0):
    policy = layout.next_tokens(model, batch, temperature)
    return response_log_probs(policy, batch["tokens", "response"], response_mask(batch))


def true_kl(model, other, batch, temperature=1.0):
    found = torch.zeros(response_mask(batch).shape, dtype=torch.float64)
    tables = zip(truth(model, batch, temperature), truth(other, batch, temperature), strict=True)
    for row, (p, q) in enumerate(tables):
        found[row, : len(p)] = (p.exp() * (p - q)).sum(-1)
    return found


@LAYOUTS
@families
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("pad", [0, EOS], ids=["pad", "pad_is_eos"])
def test_log_probs_are_those_of_plain_transformers(layout, family, temperature, pad) -> None:
    model, batch = network(family), rollout(pads=4, tail=2, pad=pad)
    found = log_probs(layout, model, batch, temperature)
    torch.testing.assert_close(
        found.double(), of_tokens(truth(model, batch, temperature), batch), atol=1e-5, rtol=0
    )
    assert found.detach()[response_mask(batch)].lt(-1e-3).all()


@LAYOUTS
@families
def test_exact_kl_is_the_plain_sum_over_the_vocabulary(layout, family) -> None:
    model, other, batch = network(family), network(family, seed=1), rollout(pads=2, tail=1)
    pair = [layout.next_tokens(m, batch, 0.7) for m in (model, other)]
    kl = exact_token_kl(*pair, response_mask(batch))
    expected = true_kl(model, other, batch, 0.7)
    torch.testing.assert_close(kl.double(), expected, atol=1e-5, rtol=1e-5)
    assert expected.sum() > 1
    log_prob, [of_other] = token_measures(
        pair[0], batch["tokens", "response"], response_mask(batch), [Against(pair[1])]
    )
    torch.testing.assert_close(log_prob, log_probs(layout, model, batch, 0.7))
    torch.testing.assert_close(of_other.log_prob, log_probs(layout, other, batch, 0.7))
    torch.testing.assert_close(of_other.divergence["reverse"], kl)


@pytest.mark.parametrize("few", [False, True], ids=["one_chunk", "chunks"])
def test_divergences_are_the_plain_sums_over_the_vocabulary(few, monkeypatch) -> None:
    if few:
        monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 4 * 300)
    model, other, batch = network().double(), network(seed=1).double(), rollout(pads=2, tail=1)
    mask, tokens = response_mask(batch), batch["tokens", "response"]

    def divergences() -> torch.Tensor:
        pair = [SHARED.next_tokens(m, batch, 0.7) for m in (model, other)]
        against = Against(pair[1], ("forward", "js"))
        found = token_measures(pair[0], tokens, mask, [against])[1][0].divergence
        return torch.stack([found["forward"], found["js"]])

    tables = zip(truth(model, batch, 0.7), truth(other, batch, 0.7), strict=True)
    found = divergences()
    for row, (log_p, log_q) in enumerate(tables):
        p, q = np.exp(log_p.numpy()), np.exp(log_q.numpy())
        forward = (q * np.log(q / p)).sum(-1)
        m = (p + q) / 2
        js = ((p * np.log(p / m)).sum(-1) + (q * np.log(q / m)).sum(-1)) / 2
        for value, expected in zip(found, (forward, js), strict=True):
            own = value[row, : len(expected)].detach().numpy()
            np.testing.assert_allclose(own, expected, rtol=1e-9)
            assert not value[row, len(expected) :].any()
        assert not np.allclose(forward, js, rtol=0.1)

    weight = head(model).weight
    slope = torch.autograd.grad(divergences().sum(), weight)[0]
    index = tuple(int(i) for i in (slope.abs() == slope.abs().max()).nonzero()[0])

    def moved(step: float) -> float:
        with torch.no_grad():
            weight[index] += step
            value = float(divergences().sum())
            weight[index] -= step
        return value

    assert float(slope[index]) == pytest.approx((moved(1e-5) - moved(-1e-5)) / 2e-5, rel=1e-5)


@LAYOUTS
def test_entropy_is_the_plain_one(layout) -> None:
    model, batch = network(), rollout(tail=1)
    found = token_entropy(layout.next_tokens(model, batch, 0.7), response_mask(batch))
    for row, table in zip(found, truth(model, batch, 0.7), strict=True):
        expected = -(table.exp() * table).sum(-1)
        torch.testing.assert_close(row[: len(table)].double(), expected, atol=1e-5, rtol=0)
        assert not row[len(table) :].any()


@LAYOUTS
@families
def test_numbers_do_not_depend_on_padding_split_or_order(layout, family) -> None:
    """In float64, where rounding hides no error (Llama's norms stay in float32)."""
    model, other = network(family).double(), network(family, seed=1).double()

    def kl(batch):
        pair = [layout.next_tokens(m, batch, 1.0) for m in (model, other)]
        return exact_token_kl(*pair, response_mask(batch)).detach()

    batch = rollout()
    whole = kl(batch)
    padded = kl(rollout(pads=9, tail=5))
    torch.testing.assert_close(padded[:, : whole.shape[1]], whole, atol=1e-6, rtol=0)
    assert not padded[:, whole.shape[1] :].any()
    one_by_one = [kl(take_prompts(batch, torch.tensor([i]), GROUP)) for i in range(3)]
    torch.testing.assert_close(torch.cat(one_by_one), whole, atol=1e-6, rtol=0)
    order = torch.tensor([2, 0, 1])
    moved = kl(take_prompts(batch, order, GROUP))
    expected = whole.unflatten(0, (3, GROUP))[order].flatten(0, 1)
    torch.testing.assert_close(moved, expected, atol=1e-6, rtol=0)
    within = torch.tensor([1, 2, 0, 3, 5, 4, 8, 7, 6])
    torch.testing.assert_close(kl(batch[within]), whole[within], atol=1e-6, rtol=0)


@families
def test_both_layouts_have_one_gradient(family) -> None:
    model, batch = network(family).double(), rollout(pads=3, tail=2)
    grads = []
    for layout in (SHARED, PACKED):
        model.zero_grad()
        log_probs(layout, model, batch).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, *others in zip(*grads, strict=True):
        for b in others:
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)  # RMSNorm is in float32
        assert a.isfinite().all()
    assert max(float(g.abs().max()) for g in grads[0]) > 1e-3


@pytest.mark.parametrize("learned", [False, True], ids=["closed_form", "autograd"])
def test_chunks_change_neither_values_nor_gradients(learned, monkeypatch) -> None:
    model, other, batch = network().double(), network(seed=1).double(), rollout()
    other.requires_grad_(learned)
    mask, found = response_mask(batch), []
    for logits in (vocabulary.CHUNK_ELEMENTS, 4 * 300):
        monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", logits)
        model.zero_grad()
        other.zero_grad()
        pair = [SHARED.next_tokens(model, batch, 0.7), SHARED.next_tokens(other, batch, 1.3)]
        log_prob, [(of_other, kl)] = token_measures(
            pair[0], batch["tokens", "response"], mask, [Against(pair[1])]
        )
        terms = torch.stack([log_prob, of_other, kl["reverse"]])
        terms.square().sum().backward()
        learning = [*model.parameters(), *(other.parameters() if learned else ())]
        found.append([*terms, *(p.grad.clone() for p in learning)])
        assert all(float(p.grad.abs().max()) > 0 for p in learning)
        torch.testing.assert_close(terms[1], log_probs(SHARED, other, batch, 1.3))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_chunks_logits_are_not_kept_for_the_backward(monkeypatch) -> None:
    """What autograd keeps stays far below one [tokens, V] table, and grows by no chunk's."""
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 16 * 5000)
    states = torch.randn(8, 32, 4, requires_grad=True)
    head_ = torch.nn.Linear(4, 5000)
    policy, ref = NextTokens(states, head_), NextTokens(states.detach(), torch.nn.Linear(4, 5000))
    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kl = exact_token_kl(policy, ref, torch.ones(8, 32, dtype=torch.bool))
    assert kept < 8 * 32 * 5000 / 20
    kl.sum().backward()
    assert states.grad.abs().sum() > 0


def test_padding_that_holds_nan_reaches_neither_value_nor_gradient() -> None:
    states = torch.randn(2, 3, 4)
    states[:, 2] = torch.nan
    states.requires_grad_()
    mask = torch.tensor([[True, True, False]] * 2)
    policy = NextTokens(states, torch.nn.Linear(4, 7))
    found = response_log_probs(policy, torch.zeros(2, 3, dtype=torch.long), mask)
    found.sum().backward()
    assert not found[:, 2].any()
    assert states.grad[:, :2].isfinite().all()
    assert not states.grad[:, 2].any()


def test_the_self_check_falls_back_with_a_reason(monkeypatch) -> None:
    model, batch = network(), rollout()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    layout = self_check(model, batch, GROUP)
    assert not layout.shared
    right = "scored in one row per response, padded on the right; log-prob error, nats: "
    assert layout.reason.startswith(right)
    assert layout.reason.endswith(
        "ok; its layers select keys by index in the row (sliding_attention)"
    )
    assert torch.equal(layout.states(model, batch), packed_states(model, batch))

    wrong = scoring.tree_mask
    monkeypatch.setattr(scoring, "tree_mask", lambda s, d: wrong(s.clamp_max(0), d))
    layout = self_check(network(), batch, GROUP)
    assert not layout.shared
    assert re.search(r"; scored in one row per prompt: off by [0-9.]+ nats$", layout.reason)

    def refuses(*args):
        raise ValueError("attention_mask must be 2-D\nmore")

    monkeypatch.setattr(scoring, "tree_mask", refuses)
    layout = self_check(network(), batch, GROUP)
    assert layout.reason.endswith(
        "; scored in one row per prompt: ValueError: attention_mask must be 2-D"
    )


def test_settings_that_forbid_sharing() -> None:
    model = network("qwen2")
    assert sharing_refused(model) is None
    model.config._attn_implementation = "eager"
    assert sharing_refused(model) is None
    model.config._attn_implementation_internal = "flash_attention_2"
    assert sharing_refused(model) == "attention 'flash_attention_2' takes no 4-D mask"
    model.config._attn_implementation_internal = "sdpa"
    model.config.layer_types = None
    model.config.sliding_window = 8
    assert sharing_refused(model) == "its layers select keys by index in the row (sliding_window)"
    model.config.sliding_window, model.config.window_size = None, 8  # GPT-Neo
    assert sharing_refused(model) == "its layers select keys by index in the row (window_size)"


def test_eager_attention_takes_the_tree_mask_too() -> None:
    model, batch = network(), rollout(pads=2)
    model.set_attn_implementation("eager")
    assert self_check(model, batch, GROUP).shared


def test_the_self_check_refuses_logits_that_no_head_gives() -> None:
    """A forward from outside, which asks the live backbone: klrl cannot run it on kept states."""
    model = network()
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits / 4
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: no way to score .* nats\); choose"):
        self_check(model, rollout(), GROUP)


def test_a_reference_is_scored_once_for_the_whole_rollout() -> None:
    model, batch = network(seed=1), rollout()
    for at_a_time in (1, 2, 3):
        states = torch.cat([*SHARED.rollout_states(model, batch, at_a_time)])
        assert not states.requires_grad
        found = NextTokens(states, head(model), 0.7)
        torch.testing.assert_close(
            response_log_probs(found, batch["tokens", "response"], response_mask(batch)).double(),
            of_tokens(truth(model, batch, 0.7), batch),
            atol=1e-5,
            rtol=0,
        )


@LAYOUTS
def test_dropout_is_off_while_scoring(layout) -> None:
    model, batch = network("gpt2").train(), rollout()
    once, again = (log_probs(layout, model, batch) for _ in range(2))
    assert torch.equal(once, again)
    assert model.training
    assert model.transformer.drop.training


@pytest.mark.parametrize("score", [packed_states, lambda m, b: shared_states(m, b, GROUP)])
def test_a_batch_longer_than_the_context_is_refused(score) -> None:
    """7 + 6 tokens: padding does not count."""
    model, batch = network(), rollout(pads=5, tail=5)
    model.config.max_position_embeddings = 13
    score(model, batch)
    model.config.max_position_embeddings = 12
    with pytest.raises(ValueError, match="13 tokens.*max_position_embeddings=12"):
        score(model, batch)


@pytest.mark.parametrize(
    ("prompt", "responses", "longest", "ratio"),
    [  # CPU seconds, shared / packed, of docs/sampler.md
        *[(32, 8, 16, 0.48), (32, 8, 64, 0.84), (32, 8, 256, 1.62), (32, 8, 512, 2.45)],
        *[(256, 8, 16, 0.18), (256, 8, 64, 0.37), (256, 4, 256, 0.85)],
    ],
)
def test_the_cost_of_a_layout_is_within_a_quarter_of_what_was_measured(
    prompt, responses, longest, ratio
) -> None:
    shared, packed = scoring.costs(prompt, responses, longest)
    assert shared / packed == pytest.approx(ratio, rel=0.25)
    assert (shared < packed) == (ratio < 1)


def test_long_responses_are_packed_and_a_resume_keeps_its_layout() -> None:
    model, batch = network(), rollout()
    found = {n: self_check(model, batch, GROUP, n) for n in (16, 2000)}
    assert [found[16].shared, found[2000].shared] == [True, False]
    assert found[2000].reason.endswith("ok; one row per prompt would cost 3.0 times as much")
    for shared in (True, False):
        assert self_check(model, batch, GROUP, 2000, shared).shared == shared
