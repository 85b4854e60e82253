"""Any causal language model of ``transformers`` with its tokenizer, as klrl trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from klrl.base.context import context_of
from klrl.base.errors import ConfigError
from klrl.config import LoraConfig
from klrl.language.causal_lm import unwrapped
from klrl.language.lora import add_lora
from klrl.language.mixed import compute_in_bfloat16
from klrl.language.model_files import (
    check_generation,
    check_weights,
    find_model,
    read_config,
    read_weights,
)
from klrl.language.prompts import Tokenizer
from klrl.language.tokenizer import end_tokens, load_tokenizer

#: Bytes of weights from which a run says what it does before its first row.
LARGE = 50_000_000


@dataclass(frozen=True)
class CausalLM:
    """A model and its tokenizer, checked to belong together.

    Args:
        model: (input_ids [B, T], attention_mask [B, T]) -> logits [B, T, V]; a ``PeftModel`` with
            LoRA. It is in training mode only with gradient checkpointing, which needs that mode.
        tokenizer: has EOS, a pad token and, if required, a chat template.
        context: most tokens of prompt and response together; None if the config has no limit.
        eos: ids that end a response, the tokenizer's first.
    """

    model: Any
    tokenizer: Tokenizer
    context: int | None
    eos: tuple[int, ...]


def load_causal_lm(
    model: str | Path,
    *,
    chat: bool,
    dtype: str = "float32",
    mixed: bool = False,
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    lora: LoraConfig | None = None,
    say: Callable[[str], None] = print,
) -> CausalLM:
    """Load a model and its tokenizer.

    Args:
        model: ``actor.model``: a folder written by ``save_pretrained``, or a hub id.
        chat: whether prompts are conversations, so that a chat template is needed.
        dtype: of the weights: float32, bfloat16 or float64. LoRA's weights stay in float32.
        mixed: compute in bfloat16 with weights of float32.
        device: where to put it.
        gradient_checkpointing: drop activations and recompute them in the backward pass.
        lora: train low-rank adapters in place of the weights.
        say: takes a line about each automatic choice.
    """
    folder, setting = find_model(model), f"actor.model={model}"
    config = read_config(folder, setting)
    check_weights(folder, setting)
    tokenizer = load_tokenizer(folder, chat=chat, setting=setting, say=say)
    check_generation(folder, setting)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size > LARGE:
        say(f"{setting}: loading {size / 1e6:,.1f} MB")
    network = read_weights(folder, config, getattr(torch, dtype), setting)
    _check_vocabulary(network, tokenizer, setting)
    eos = end_tokens(tokenizer, network.generation_config.eos_token_id, setting, say)
    # The author's sampling defaults (top_k, top_p, penalties) would change the samples and the KL.
    network.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=list(eos) if len(eos) > 1 else eos[0],
    )
    network.config.pad_token_id = tokenizer.pad_token_id
    if mixed:
        compute_in_bfloat16(network)
    if lora is not None:
        network = add_lora(network, lora)
    if gradient_checkpointing:
        _checkpoint_gradients(network, setting)
    network = network.to(device).train(gradient_checkpointing)
    return CausalLM(network, tokenizer, context_of(config), eos)


def _checkpoint_gradients(network: Any, setting: str) -> None:
    kind = unwrapped(network).config.model_type
    if kind == "phimoe":
        raise ConfigError(
            f"actor.gradient_checkpointing=true: {kind} draws its experts at random in training "
            "mode, which checkpointing needs; set it to false"
        )
    try:
        network.activation_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(
            f"actor.gradient_checkpointing=true: {setting} does not support it; set it to false"
        ) from error


def _check_vocabulary(network: Any, tokenizer: Tokenizer, setting: str) -> None:
    """Refuse a tokenizer with more tokens than the embedding has rows."""
    rows = network.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ConfigError(
            f"{setting}: its tokenizer has {len(tokenizer)} tokens, its embedding {rows} rows; "
            "they do not belong together: resize_token_embeddings, or take the right tokenizer"
        )


def prompt_limit(context: int | None, response: int) -> int | None:
    """Most tokens of a prompt that leave room for the response.

    Args:
        context: of the model; None for no limit.
        response: ``collector.max_new_tokens``, most tokens of a response.
    """
    if context is None:
        return None
    if response >= context:
        raise ConfigError(
            f"collector.max_new_tokens={response}: leaves no room for a prompt in the model's "
            f"context of {context} tokens; choose less"
        )
    return context - response
