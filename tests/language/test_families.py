"""Families of causal LMs: sampled, scored and learned from as plain transformers says, or refused.

The truth, and the list, are in ``benchmarks/families.py``.
"""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import RwkvForCausalLM

from benchmarks.families import (
    FAMILIES,
    GROUP,
    HEADER,
    PAGE,
    Row,
    measure,
    on_page,
    page,
    tiny,
    truth,
)
from klrl.language import model_files, scoring, wrapper_sampler
from klrl.language.batch import make_batch, response_mask
from klrl.language.causal_lm import OwnHead, backbone, head
from klrl.language.decoders import SharedCache
from klrl.language.mixed import compute_in_bfloat16
from klrl.language.model import load_causal_lm
from klrl.language.sampler import CacheSampler, Decoding, SpecialTokens
from klrl.language.scoring import self_check
from klrl.language.vocabulary import response_log_probs
from klrl.language.wrapper_sampler import WrapperSampler
from klrl.runs.rows import read_rows
from klrl.train.evaluate import evaluate_run
from tests.language.toys import prompts, rollout
from tests.transforms.llm_toys import tokenizer

#: Their own words, about kernels that are not installed and arguments that they ignore.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]

#: One of each kind: plain attention, alibi, windows and a capped head, attention and SSM with a
#: scaled head, latent attention, SSM with a cache by another name, a polluted state, not causal.
KINDS = {
    "llama": ("shared", "shared"),
    "cohere": ("shared", "shared"),
    "deepseek_v3": ("shared", "shared"),
    "bloom": ("copied", "packed"),
    "gemma2": ("copied", "packed"),
    "granitemoehybrid": ("copied", "packed"),
    "mamba": ("plain", "packed"),
    "rwkv": ("plain", "packed"),
    "xlnet": ("", ""),
}
SPECIAL = SpecialTokens((2,), 0)


@pytest.mark.parametrize("family", KINDS)
def test_a_family_is_right_or_refused(family: str) -> None:
    row = measure(family)
    assert row.verdict == ("right" if all(KINDS[family]) else "refused")
    assert (row.way, row.layout) == KINDS[family]
    assert on_page(PAGE.read_text())[family][1:3] == KINDS[family]
    if not row.way:
        assert row.refusal.startswith("XLNetLMHeadModel: no way to sample gives its own log-probs")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(8))
def test_the_page_is_what_is_measured(part: int) -> None:
    """All families; the differences themselves are rounding."""
    cells = on_page(PAGE.read_text())
    assert set(cells) == set(FAMILIES)
    for family in list(FAMILIES)[part::8]:
        row = measure(family)
        assert row.verdict != "WRONG", row
        written = cells[family]
        assert (written[1], written[2]) == (row.way, row.layout), family
        assert written[5].partition(":")[0] == row.verdict, family


def test_the_page_has_enough_families_and_none_is_wrong() -> None:
    cells = on_page(PAGE.read_text())
    right = [family for family, row in cells.items() if row[-1] == "right"]
    assert len(right) >= 45
    assert all(row[-1] == "right" or row[-1].startswith("refused: ") for row in cells.values())


def test_a_wrong_row_is_told_as_one() -> None:
    rows = [
        Row("llama", "shared", "shared", 1e-6, 1e-6),
        Row("gpt2", "copied", "packed", 2.5, 1e-6),
        Row("opt", "plain", "packed", 0.0, float("nan")),
        Row("xlm", refusal="why"),
    ]
    assert [row.verdict for row in rows] == ["right", "WRONG", "WRONG", "refused"]
    text = page(rows)
    assert "4 rows: 1 right, 1 refused, 2 wrong; sampled 1 shared, 1 copied, 1 plain" in text
    assert on_page(text)["gpt2"] == ("gpt2", "copied", "packed", "2e+00", "1e-06", "WRONG")
    assert len(HEADER) == len(rows[0].cells)


# ------------------------------------------------------------------------------------------- heads

HEADS = ("cohere", "granite", "gemma2", "gemma3_text", "falcon_h1", "bert", "nanochat", "gptj")


@pytest.mark.parametrize("family", [*HEADS, "opt-projected", "llama4_text"])
def test_a_head_gives_the_models_own_logits(family: str) -> None:
    """Also a copy of it, once the model has moved on: the policy that a rollout came from."""
    model, ids = tiny(family), torch.randint(3, 200, (2, 7))
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits
        states = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(head(model)(states), own, atol=1e-6, rtol=1e-6)
        assert head(model).weight.shape == (300, model.get_output_embeddings().weight.shape[1])
        old = deepcopy(head(model)).requires_grad_(False)
        for parameter in model.parameters():
            parameter.mul_(1.5)
        torch.testing.assert_close(old(states), own, atol=1e-6, rtol=1e-6)
        assert (head(model)(states) - own).abs().max() > 1e-2
    assert all(p.requires_grad for p in model.parameters())
    copied, whole = (sum(p.numel() for p in m.parameters()) for m in (old, model))
    assert copied < whole / 2


@pytest.mark.parametrize("family", ["cohere", "gemma2", "bert"])
def test_a_mixed_head_gives_the_models_own_logits(family: str) -> None:
    """Float32 weights, bfloat16 arithmetic; also the rollout's copy, which is kept in bfloat16."""
    model, ids = tiny(family), torch.randint(3, 200, (2, 7))
    exact = model(input_ids=ids, use_cache=False).logits.detach()
    compute_in_bfloat16(model)
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits.float()
        states = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
        old = deepcopy(head(model)).to(torch.bfloat16)
        near = {"atol": 0.02 * float(exact.abs().max()), "rtol": 0.02}
        torch.testing.assert_close(own, exact, **near)
        for kept in (head(model), old):
            torch.testing.assert_close(kept(states).float(), own, **near)
    assert not torch.equal(own, exact)


def test_a_plain_head_is_the_output_embedding() -> None:
    for family in ("llama", "gpt2", "mamba"):
        model = tiny(family)
        assert head(model) is model.get_output_embeddings()
    assert isinstance(head(tiny("cohere")), OwnHead)


@pytest.mark.parametrize("family", ["granitemoehybrid", "gemma2", "cohere"])
def test_the_gradient_is_plain_transformers_own(family: str) -> None:
    """Of the summed log-probs of one batch, weighted; autograd through the model's own logits."""
    model, batch = tiny(family), rollout(pads=3, tail=1)
    mask = response_mask(batch)
    weights = torch.linspace(-1, 1, mask.numel()).reshape(mask.shape) * mask
    layout = self_check(model, batch, GROUP)

    def gradient(log_probs: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        (weights * log_probs).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    policy = layout.next_tokens(model, batch, 0.7)
    ours = gradient(response_log_probs(policy, batch["tokens", "response"], mask))
    plain = gradient(_truth_with_gradient(model, batch))
    assert ours.shape == plain.shape
    assert plain.abs().max() > 0.1
    torch.testing.assert_close(ours, plain, atol=1e-4 * float(plain.abs().max()), rtol=1e-3)


def _truth_with_gradient(model, batch) -> torch.Tensor:
    rows, mask = [], response_mask(batch)
    width = batch["tokens", "prompt"].shape[1]
    for tokens, real in zip(
        batch["tokens", "full"], batch["masks", "all_attention_mask"], strict=True
    ):
        ids, prompt = tokens[real], int(real[:width].sum())
        table = (model(input_ids=ids[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
        chosen = table[prompt - 1 : -1].gather(-1, ids[prompt:, None]).squeeze(-1)
        rows.append(torch.nn.functional.pad(chosen, (0, mask.shape[1] - len(chosen))))
    return torch.stack(rows)


# --------------------------------------------------------------------------------------- preflight


def test_a_state_that_padding_pollutes_is_seen() -> None:
    """RWKV ignores the mask: a short prompt's row in a batch is not what it is alone."""
    model, (ids, mask) = tiny("rwkv"), prompts()
    layout = self_check(model, rollout(pads=3), GROUP)
    assert not layout.shared
    assert "scored in one row per prompt: " in layout.reason
    with pytest.raises(ValueError, match=r"generate draws from log-probs [0-9.]+ nats off plain"):
        WrapperSampler(model, None, SPECIAL).self_check(ids, mask, GROUP)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_wrapper_is_compared_with_something_else_than_itself(monkeypatch, mixed) -> None:
    """Log-probs that are wrong by one formula in both places do not pass, in no precision."""
    model, (ids, mask) = tiny("llama"), prompts(pads=2)
    sampler = WrapperSampler(model, None, SPECIAL)
    assert sampler.self_check(ids, mask, GROUP).value < 1e-5
    if mixed:
        compute_in_bfloat16(model)
        assert sampler.self_check(ids, mask, GROUP).ok
    right = wrapper_sampler.packed_states
    monkeypatch.setattr(wrapper_sampler, "packed_states", lambda *args: 1.03 * right(*args))
    with pytest.raises(ValueError, match="nats off plain ones"):
        sampler.self_check(ids, mask, GROUP)


def test_mixed_precision_hides_no_way_that_is_wrong(monkeypatch) -> None:
    """A way that is .1 nats off is within the rounding of bfloat16, and wrong."""
    model, (ids, mask) = tiny("llama"), prompts(pads=2)
    shared, shared_rows = SharedCache.step, scoring.shared_states
    monkeypatch.setattr(SharedCache, "step", lambda self, tokens: 1.03 * shared(self, tokens))
    monkeypatch.setattr(scoring, "shared_states", lambda *args: 1.03 * shared_rows(*args))
    compute_in_bfloat16(model)
    with torch.no_grad():
        rounded = model(input_ids=ids, use_cache=False).logits
    sampler = CacheSampler(model, SPECIAL)
    assert "shared: 0." in str(sampler.self_check(ids, mask, GROUP))
    assert sampler.way == "copied"
    layout = self_check(model, rollout(pads=3), GROUP)
    assert not layout.shared
    with torch.no_grad():  # and it computes in bfloat16 as before
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, rounded)
    assert rounded.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["mpt", "bloom", "falcon-alibi"])
def test_distances_of_slots_share_no_row_in_any_precision(family: str) -> None:
    """Alibi's penalty goes by slot: in 16 bits its error was within the rounding."""
    model, (ids, mask) = tiny(family).to(torch.bfloat16), prompts(pads=2)
    sampler = CacheSampler(model, SPECIAL)
    assert "not shared: its distances go by slot (alibi)" in str(
        sampler.self_check(ids, mask, GROUP)
    )
    assert sampler.way == "copied"
    assert not self_check(model, rollout(pads=3), GROUP).shared


def test_one_prompt_is_checked_with_rows_that_leave() -> None:
    ids, mask = prompts(lengths=(4,), pads=2)
    sampler = CacheSampler(tiny("llama"), SPECIAL)
    assert sampler.self_check(ids, mask, GROUP).ok
    assert sampler.way == "shared"


@pytest.mark.parametrize("family", ["granitemoehybrid", "mamba", "rwkv", "bloom"])
def test_rows_that_end_leave_every_cache(family: str) -> None:
    """A third of the vocabulary ends a response: rows come and go in each way."""
    model, (ids, mask) = tiny(family), prompts(lengths=(5, 9, 7, 3), pads=1)
    sampler = CacheSampler(model, SpecialTokens(tuple(range(3, 100)), 0))
    sampler.self_check(ids, mask, GROUP)
    found = sampler(ids, mask, GROUP, Decoding(9, 0.7), torch.Generator().manual_seed(0))
    lengths = found.mask.sum(1)
    assert lengths.min() < lengths.max()
    batch = make_batch(ids, mask, found, GROUP)
    off = (found.log_probs.double() - truth(model, batch, 0.7)).abs().max()
    assert off < 1e-4


# -------------------------------------------------------------------------------------------- runs


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "line"),
    [
        pytest.param(
            "lfm2",
            "cache copied per response, nats off plain log-probs: ",
            marks=pytest.mark.slow,
        ),
        ("rwkv", "no cache: every token from its whole row, nats off plain log-probs: "),
    ],
)
def test_a_run_and_its_evaluations_take_one_sampler(family, line, tmp_path, exits) -> None:
    """From a folder, through training and both kinds of evaluation."""
    model = tiny(family)
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    Path("data.jsonl").write_text("\n".join(f'{{"prompt": "{"hello " * n}"}}' for n in (1, 4, 2)))
    Path("lengths.py").write_text(
        "def reward(prompts, responses, rows):\n    return [float(len(r)) for r in responses]\n"
    )
    words = ("experiment=text", "env.data=data.jsonl", "env.reward=lengths:reward")
    folder = f"actor.model={tmp_path / 'model'}"
    code, out, err = exits(*words, folder, "eval.every=1", "eval.final=2")
    assert code == 0, err
    assert f"preflight: {line}" in out
    assert "preflight: scored in one row per response, padded on the right" in out
    assert all(
        math.isfinite(row["kl/ref/exact"]) for row in read_rows(Path("run/metrics.jsonl"))[1:-1]
    )
    assert len(evaluate_run("run").returns) == 3


@pytest.mark.integration
@pytest.mark.parametrize(
    ("family", "line"),
    [
        ("mixtral", "training - evaluation mode, nats"),
        ("phimoe", "phimoe draws its experts at random in training mode, which checkpointing"),
    ],
)
def test_a_training_mode_that_is_another_function_is_refused(
    family, line, tmp_path, exits, monkeypatch
) -> None:
    """Gradient checkpointing needs that mode."""
    monkeypatch.setattr(model_files, "silence_dropout", lambda config: None)
    model = tiny(family)
    model.config.router_jitter_noise = 0.5
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    Path("data.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "hello there"}')
    words = ("experiment=text", "env.data=data.jsonl", "env.reward=lengths:reward")
    Path("lengths.py").write_text(
        "def reward(prompts, responses, rows):\n    return [float(len(r)) for r in responses]\n"
    )
    folder = f"actor.model={tmp_path / 'model'}"
    code, _, err = exits(*words, folder, "actor.gradient_checkpointing=true")
    assert code == 2
    assert line in err
    assert "set actor.gradient_checkpointing=false" in err or "set it to false" in err
    assert exits(*words, folder)[0] == 0


def test_playing_changes_no_weights(tmp_path) -> None:
    """RWKV divides its weights in place where it is not trained; a checkpoint would hold those."""
    config = tiny("rwkv").config
    config.num_hidden_layers, config.rescale_every = 4, 2
    RwkvForCausalLM(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path, chat=False, say=lambda _: None).model
    before = deepcopy(model.state_dict())
    model(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
