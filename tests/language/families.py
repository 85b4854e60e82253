"""Tiny random models of twenty families."""

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

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
#: What a config needs beside its sizes; where logits may be scaled or capped, they are.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "opt-projected": {"word_embed_proj_dim": 16},
    "gptj": {},
    "cohere": {},
    "granite": {"logits_scaling": 4.0},
    "nanochat": {},
    "deepseek_v3": {"num_key_value_heads": 4},
    "bert": {"is_decoder": True},
    "bloom": {},
    "mpt": {},
    "falcon-alibi": {"alibi": True, "new_decoder_architecture": False},
    "gemma2": {"final_logit_softcapping": 3.0},
    "llama4_text": {},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "granitemoehybrid": {"layer_types": HYBRID, "logits_scaling": 4.0},
    "mixtral": {},
    "phimoe": {},
    "mamba": {},
    "rwkv": {},
    "xlnet": {},
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
