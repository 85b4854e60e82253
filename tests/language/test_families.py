"""Families of causal LMs: sampled, scored and learned from as plain transformers says, or refused.

docs/language.md has what these and ninety others gave on 2026-11-24.
"""

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import RwkvForCausalLM

from klrl.language.data import model_files
from klrl.language.data.batch import make_batch, response_mask
from klrl.language.model.causal_lm import backbone, compute_in_bfloat16, head
from klrl.language.model.pretrained import load_causal_lm
from klrl.language.model.vocabulary import response_log_probs
from klrl.language.run import scoring
from klrl.language.run.sampler import CacheSampler, Decoding, SharedCache, SpecialTokens
from klrl.language.run.scoring import self_check
from klrl.runs.rows import read_rows
from klrl.train.evaluate import evaluate_run
from tests.language.conftest import LENGTHS
from tests.language.families import tiny
from tests.language.toys import GROUP, of_tokens, prompts, rollout, truth
from tests.transforms.llm_toys import tokenizer

#: Their own words, about kernels that are not installed and arguments that they ignore.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]

#: How they are sampled and scored. Plain attention, also with latent keys, distances by slot
#: (alibi), windows and chunks, attention beside a state, experts, states alone; heads that scale,
#: shift or cap logits.
KINDS = {
    "llama": ("shared", "shared"),
    "opt-projected": ("shared", "shared"),
    "gptj": ("shared", "shared"),
    "cohere": ("shared", "shared"),
    "granite": ("shared", "shared"),
    "nanochat": ("shared", "shared"),
    "deepseek_v3": ("shared", "shared"),
    "bert": ("shared", "shared"),
    "bloom": ("copied", "packed"),
    "mpt": ("copied", "packed"),
    "falcon-alibi": ("copied", "packed"),
    "gemma2": ("copied", "packed"),
    "llama4_text": ("copied", "packed"),
    "falcon_h1": ("copied", "packed"),
    "granitemoehybrid": ("copied", "packed"),
    "mixtral": ("copied", "packed"),
    "phimoe": ("copied", "packed"),
    "mamba": ("plain", "packed"),
    "rwkv": ("plain", "packed"),
}
SPECIAL = SpecialTokens((2,), 0)


@pytest.mark.parametrize("family", KINDS)
def test_a_family_is_sampled_and_scored_as_plain_transformers_says(family: str) -> None:
    """Temperature .7, prompts of 5, 14 and 9 tokens, responses of 12: beyond every window."""
    model, (ids, mask) = tiny(family), prompts(lengths=(5, 14, 9), pads=2)
    sampler = CacheSampler(model, SPECIAL)
    sampler.self_check(ids, mask, GROUP)
    responses = sampler(ids, mask, GROUP, Decoding(12, 0.7), 1)
    batch = make_batch(ids, mask, responses, GROUP)
    layout = self_check(model, batch, GROUP)
    assert (sampler.way, "shared" if layout.shared else "packed") == KINDS[family]
    with torch.no_grad():
        scored = response_log_probs(
            layout.next_tokens(model, batch, 0.7), responses.tokens, responses.mask
        )
    true = of_tokens(truth(model, batch, 0.7), batch)
    assert true[responses.mask].min() < -1  # no flat distribution
    torch.testing.assert_close(responses.log_probs.double(), true, atol=1e-4, rtol=0)
    torch.testing.assert_close(scored.double(), true, atol=1e-4, rtol=0)


def test_a_family_that_is_not_causal_is_refused() -> None:
    model, (ids, mask) = tiny("xlnet"), prompts(pads=2)
    with pytest.raises(ValueError, match="XLNetLMHeadModel: no way to sample reproduces its own"):
        CacheSampler(model, SPECIAL).self_check(ids, mask, GROUP)


HEADS = ("cohere", "granite", "gemma2", "falcon_h1", "bert", "nanochat", "gptj")


@pytest.mark.parametrize("family", [*HEADS, "opt-projected", "llama4_text"])
def test_a_head_gives_the_models_own_logits(family: str) -> None:
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


@pytest.mark.parametrize("family", ["granitemoehybrid", "gemma2", "cohere"])
def test_the_gradient_is_plain_transformers_own(family: str) -> None:
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
    plain = gradient(of_tokens(truth(model, batch, 0.7, grad=True), batch))
    assert ours.shape == plain.shape
    assert plain.abs().max() > 0.1
    torch.testing.assert_close(ours, plain, atol=1e-4 * float(plain.abs().max()), rtol=1e-3)


def test_a_state_that_padding_pollutes_is_seen() -> None:
    """RWKV ignores the mask: a short prompt's row in a batch is not what it is alone."""
    layout = self_check(tiny("rwkv"), rollout(pads=3), GROUP)
    assert not layout.shared
    assert "scored in one row per prompt: " in layout.reason


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
    assert "shared by a prompt's responses: off by 0." in str(sampler.self_check(ids, mask, GROUP))
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
    assert "not shared: its attention depends on the index in the row (ALiBi)" in str(
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
    found = sampler(ids, mask, GROUP, Decoding(9, 0.7))
    lengths = found.mask.sum(1)
    assert lengths.min() < lengths.max()
    batch = make_batch(ids, mask, found, GROUP)
    off = (found.log_probs.double() - of_tokens(truth(model, batch, 0.7), batch)).abs().max()
    assert off < 1e-4


@pytest.mark.integration
def test_a_run_and_its_evaluations_take_one_sampler(tmp_path, exits) -> None:
    model = tiny("rwkv")
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    Path("data.jsonl").write_text("\n".join(f'{{"prompt": "{"hello " * n}"}}' for n in (1, 4, 2)))
    Path("lengths.py").write_text(LENGTHS)
    words = ("experiment=text", "env.data=data.jsonl", "env.reward=lengths:reward")
    folder = f"actor.model={tmp_path / 'model'}"
    code, out, err = exits(*words, folder, "eval.every=1", "eval.final=2")
    assert code == 0, err
    assert "preflight: no cache: each token recomputes its whole row; log-prob error, nats" in out
    assert "preflight: scored in one row per response, padded on the right" in out
    assert all(
        math.isfinite(row["kl/ref/exact"]) for row in read_rows(Path("run/metrics.jsonl"))[1:-1]
    )
    assert len(evaluate_run("run").returns) == 3


@pytest.mark.integration
@pytest.mark.parametrize("family", ["mixtral", "phimoe"])
def test_a_training_mode_that_is_another_function_is_refused(
    family, tmp_path, exits, monkeypatch
) -> None:
    """Mixtral's routers add noise, and PhiMoE's draw experts at random."""
    monkeypatch.setattr(model_files, "disable_dropout", lambda config: None)
    model = tiny(family)
    model.config.router_jitter_noise = 0.5
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    Path("data.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "hello there"}')
    words = ("experiment=text", "env.data=data.jsonl", "env.reward=lengths:reward")
    Path("lengths.py").write_text(LENGTHS)
    folder = f"actor.model={tmp_path / 'model'}"
    code, _, err = exits(*words, folder, "actor.gradient_checkpointing=true")
    assert code == 2
    assert "training - evaluation mode, nats" in err
    assert "set actor.gradient_checkpointing=false" in err
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
