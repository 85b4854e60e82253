"""Every family of causal LMs that a tiny random model can be made of: right, or refused.

    python -m benchmarks.families                       # writes docs/families.md
    python -m benchmarks.families llama mamba rwkv      # prints these rows

The truth is a plain, unpadded, float32 forward of each row alone, by the transformers model itself:
log_softmax(logits / temperature) at the response's tokens. Nothing of klrl's is in it.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tensordict import TensorDictBase
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from benchmarks.results import ROOT, table
from klrl.base.errors import first_line
from klrl.language.batch import make_batch
from klrl.language.decoders import WAYS
from klrl.language.sampler import CacheSampler, Decoding, SpecialTokens
from klrl.language.scoring import self_check
from klrl.language.vocabulary import response_log_probs

PAGE = ROOT / "docs/families.md"
#: Largest difference that is right, nats in float32; the preflight's own bound.
RIGHT = 1e-4
GROUP, LONGEST, TEMPERATURE = 3, 12, 0.7

#: Sizes by the names that families give them; each config takes those that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "attention_hidden_size"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_head_dim", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), 6),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups"), 1),
    **dict.fromkeys(("mamba_ngroups", "n_groups", "n_shared_experts"), 1),
    **dict.fromkeys(("num_experts_per_tok", "mamba_expand", "expand"), 2),
    **{"shared_intermediate_size": 48, "mamba_chunk_size": 8, "chunk_size": 8},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "qk_head_dim": 16},
    **{"attention_hidden_size": 32, "mamba_d_ssm": 64, "rotary_dim": 4, "vocab_size": 300},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}

HYBRID = ["linear_attention", "full_attention"]
MLA: dict[str, Any] = {"num_key_value_heads": 4}
ZAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layers_block_type": 2 * ["linear_attention", "hybrid"],
    **{"attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4},
}
#: What a config needs beside its sizes; where logits may be scaled or capped, they are.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "bamba": {"attn_layer_indices": [1]},
    "bart": {"is_decoder": True},
    "bert": {"is_decoder": True},
    "bert-encoder": {},
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {},
    "ctrl": {"n_positions": 128},
    "cwm": {},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
    "diffllama": {},
    "doge": {},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "electra": {"is_decoder": True},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "falcon": {},
    "falcon-alibi": {"alibi": True, "new_decoder_architecture": False},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "falcon_mamba": {},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": MLA,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_oss": {},
    "gptj": {},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {"logits_scaling": 4.0},
    "granitemoehybrid": {"layer_types": HYBRID, "logits_scaling": 4.0},
    "granitemoeshared": {"logits_scaling": 4.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {},
    "hyperclovax": {},
    "jais2": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "jetmoe": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama": {},
    "llama4_text": {},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "minicpm3": MLA,
    "minimax": {"layer_types": HYBRID, "block_size": 4},
    "minimax_m2": {},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {},
    "mpt": {},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmo_hybrid": {"layer_types": HYBRID},
    "olmoe": {},
    "openai-gpt": {},
    "opt": {"word_embed_proj_dim": 32},
    "opt-projected": {"word_embed_proj_dim": 16},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_5_moe_text": {"layer_types": HYBRID},
    "qwen3_5_text": {"layer_types": HYBRID},
    "qwen3_moe": {},
    "qwen3_next": {"layer_types": HYBRID},
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 2},
    "roberta": {"is_decoder": True},
    "rwkv": {},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {},
    "trocr": {},
    "vaultgemma": {},
    "xglm": {},
    "xlm": {"causal": True, "emb_dim": 32},
    "xlnet": {},
    "xlstm": {"embedding_dim": 32},
    "youtu": MLA,
    "zamba": {**ZAMBA, "n_mamba_heads": 2},
    "zamba2": ZAMBA,
}


def kind_of(family: str) -> str:
    """The ``model_type`` of a row of the table: ``falcon-alibi`` is of falcon."""
    if family in CONFIG_MAPPING:
        return family
    return family.rpartition("-")[0]


def tiny(family: str, seed: int = 0) -> Any:
    """A random model of a few 10,000 weights whose next-token distributions are not flat."""
    config_class = CONFIG_MAPPING[kind_of(family)]
    has = config_class().to_dict()
    sizes = {k: v for k, v in SIZES.items() if k in has and not isinstance(has[k], list | dict)}
    config = config_class(**{**sizes, **FAMILIES[family]})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    with torch.no_grad():
        for weight in {id(layer.weight): layer.weight for layer in layers}.values():  # tied: once
            weight.mul_(8.0)
    return model


# ----------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        family: its name in :data:`FAMILIES`.
        way: how it is sampled; empty where it is refused.
        layout: how it is scored.
        sampled: largest difference of a sampled log-prob from the truth, nats.
        scored: of a scored one.
        refusal: the line, or empty.
    """

    family: str
    way: str = ""
    layout: str = ""
    sampled: float = 0.0
    scored: float = 0.0
    refusal: str = ""

    @property
    def verdict(self) -> str:
        """Right, refused or WRONG."""
        if self.refusal:
            return "refused"
        right = self.sampled <= RIGHT and self.scored <= RIGHT  # NaN is not
        return "right" if right else "WRONG"

    @property
    def cells(self) -> tuple[str, ...]:
        """As on the page."""
        if self.refusal:
            return (self.family, "", "", "", "", f"refused: {self.refusal}")
        numbers = f"{self.sampled:.0e}", f"{self.scored:.0e}"
        return (self.family, self.way, self.layout, *numbers, self.verdict)


def measure(family: str) -> Row:
    """Sample and score responses to prompts of three lengths, as the preflight settles it."""
    model, (ids, mask) = tiny(family), _prompts()
    generator = torch.Generator().manual_seed(1)
    try:
        sampler = CacheSampler(model, SpecialTokens((2,), 0), keep_states=True)
        sampler.self_check(ids, mask, GROUP)
        responses = sampler(ids, mask, GROUP, Decoding(LONGEST, TEMPERATURE), generator)
        batch = make_batch(ids, mask, responses, GROUP)
        layout = self_check(model, batch, GROUP)
    except ValueError as error:
        return Row(family, refusal=first_line(error))
    with torch.no_grad():
        policy = layout.next_tokens(model, batch, TEMPERATURE)
        scored = response_log_probs(policy, responses.tokens, responses.mask)
    true = truth(model, batch)
    name = "shared" if layout.shared else "packed"
    off = [float((value.double() - true).abs().max()) for value in (responses.log_probs, scored)]
    return Row(family, sampler.way, name, *off)


def _prompts() -> tuple[Tensor, Tensor]:
    """Prompts of 5, 14 and 9 tokens, left-padded to 16, and their mask."""
    generator, width = torch.Generator().manual_seed(0), 16
    ids = torch.randint(3, 200, (3, width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor([5, 14, 9])[:, None]
    return ids.masked_fill(~mask, 0), mask


@torch.no_grad()
def truth(model: nn.Module, batch: TensorDictBase, temperature: float = TEMPERATURE) -> Tensor:
    """The log-probs [B, R] of the response tokens by plain transformers, float64, 0 at padding."""
    width = batch["tokens", "prompt"].shape[1]
    real = batch["masks", "all_attention_mask"]
    log_probs = torch.zeros(real[:, width:].shape, dtype=torch.float64)
    for row, (tokens, here) in enumerate(zip(batch["tokens", "full"], real, strict=True)):
        ids, prompt = tokens[here], int(here[:width].sum())
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        table = (logits / temperature).log_softmax(-1)[prompt - 1 : -1]
        chosen = table.gather(-1, ids[prompt:, None]).squeeze(-1)
        log_probs[row, : len(chosen)] = chosen.double()
    return log_probs


# -------------------------------------------------------------------------------------------- page

HEADER = ("family", "sampler", "scoring", "sampled - truth", "scored - truth", "verdict")
TEXT = """# Families of causal LMs

For each family a tiny random model is made of its config and goes through klrl's preflight. It
is sampled and scored at temperature {temperature:g}, G = {group}, with prompts of 5, 9 and 14
tokens padded on the left, responses of up to {longest} tokens and windows of 6. The truth is a
plain forward of each row alone, without padding, in float32, by transformers {version}:
log_softmax(logits / temperature) of the model's own logits. Differences are the largest over all
tokens, in nats; up to {right:g} is right. `python -m benchmarks.families` makes the page, and
`make test-slow` compares it.

Sampling, from the fastest: **shared** (a prompt is computed once, its responses stand in one
row), **copied** (a prompt is computed once, each response gets a copy of its cache),
**repeated** (a prompt is computed once per response, the cache is handled as `generate` does),
**plain** (no cache: the whole row is computed for every token). Scoring: **shared** (one row per
prompt) or **packed** (one row per response, padded on the right). The preflight takes the first
that is right, and says which.

{counts}

{table}

Families of `AutoModelForCausalLM` that were not measured; a run checks them at its start, as it
does all others: {missing}.
"""


def page(rows: Sequence[Row]) -> str:
    """The whole page."""
    verdicts = [row.verdict for row in rows]
    ways = [row.way for row in rows if row.way]
    counts = f"{len(rows)} rows: " + ", ".join(
        f"{verdicts.count(name)} {name.lower()}" for name in ("right", "refused", "WRONG")
    )
    counts += "; sampled " + ", ".join(f"{ways.count(way)} {way}" for way in WAYS) + "."
    missing = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(map(kind_of, FAMILIES))
    return TEXT.format(
        temperature=TEMPERATURE,
        group=GROUP,
        longest=LONGEST,
        version=transformers.__version__,
        right=RIGHT,
        counts=counts,
        table=table(HEADER, [row.cells for row in rows]),
        missing=", ".join(sorted(missing)),
    )


def on_page(text: str) -> dict[str, tuple[str, ...]]:
    """The cells of a page's rows, by family."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line] for line in lines]
    return {row[0]: tuple(row) for row in rows if row[0] in FAMILIES}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page, or print the rows of some families."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("families", nargs="*", help="print these; default: write docs/families.md")
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for family in args.families or FAMILIES:
        rows.append(measure(family))
        print("  ".join(rows[-1].cells), flush=True)
    if not args.families:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
