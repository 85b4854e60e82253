"""Loads a causal LM of ``transformers`` and its tokenizer, and prepares the model for training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from klrl.base.context import context_of
from klrl.base.errors import ConfigError, first_line
from klrl.base.text import escaped
from klrl.config import LoraConfig
from klrl.kl.reference import evaluating
from klrl.language.data import templates
from klrl.language.data.model_files import (
    check_weights,
    find_model,
    read_config,
    read_json,
    read_tokenizer,
    read_weights,
)
from klrl.language.data.prompts import Tokenizer
from klrl.language.model.causal_lm import compute_in_bfloat16, unwrapped, weight_of


def add_lora(network: PreTrainedModel, settings: LoraConfig) -> PreTrainedModel:
    """Freeze a model's weights and add trainable LoRA adapters; return a ``PeftModel`` around it.

    The adapters have no dropout: sampling would not apply it, so the importance ratio would differ
    from 1 before the first update.
    """
    import peft  # check_language_packages has checked that it is installed

    targets = settings.target_modules
    config = peft.LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        # GPT-2's Conv1D stores its weight transposed.
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in network.modules()),
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft 0.21 reads a property that transformers 5.23 deprecates.
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            # peft warns of adapters on one of two tied weights; klrl export --merge refuses these.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings", UserWarning)
            model: PreTrainedModel = peft.get_peft_model(network, config)
            return model
    except ValueError as error:
        raise ConfigError(
            f"actor.lora.target_modules={targets}: {first_line(error)}; name layers of "
            "the model, or use all-linear"
        ) from error


@contextmanager
def adapter_off(model: Any) -> Iterator[nn.Module]:
    """Context manager for ``reference=adapter_off``: a ``PeftModel`` computes without its adapters.

    No weight is copied. Inside, gradients are off and the model is in evaluation mode.
    """
    if not hasattr(model, "disable_adapter"):
        raise ConfigError(
            "reference=adapter_off: the policy has no adapters; set actor.lora.r, or choose "
            "reference=initial"
        )
    with model.disable_adapter(), evaluating(model), torch.no_grad():
        yield model


#: Bytes of weights above which loading and the preflight print a progress line.
LARGE = 50_000_000


@dataclass(frozen=True)
class CausalLM:
    """A causal LM, and a tokenizer that fits it.

    ``model`` maps input_ids and attention_mask [B, T] to logits [B, T, V]; with LoRA it is a
    ``PeftModel``. It is in training mode only for gradient checkpointing. ``context``: most tokens
    of prompt and response; None for no limit. ``eos``: the ids that end a response, the tokenizer's
    EOS first.
    """

    model: nn.Module
    tokenizer: Tokenizer
    context: int | None
    eos: tuple[int, ...]

    def prompt_limit(self, response: int) -> int | None:
        """Return the number of tokens that a response of ``max_new_tokens`` leaves for a prompt."""
        if self.context is None:
            return None
        if response >= self.context:
            raise ConfigError(
                f"collector.max_new_tokens={response}: leaves no room for a prompt in the model's "
                f"context of {self.context} tokens; choose fewer"
            )
        return self.context - response


def load_causal_lm(
    model: str | Path,
    *,
    key: str = "actor.model",
    chat: bool,
    dtype: str = "float32",
    mixed: bool = False,
    device: str | torch.device = "cpu",
    gradient_checkpointing: bool = False,
    lora: LoraConfig | None = None,
    say: Callable[[str], None] = print,
) -> CausalLM:
    """Load a model and its tokenizer.

    ``key`` names the setting in messages. With ``chat``, prompts are conversations, which need a
    chat template. ``dtype``: of the weights; LoRA weights are at least float32. ``mixed``: compute
    in bfloat16 with float32 weights. ``say`` prints a line, such as an automatic choice.
    """
    folder, setting = find_model(model, key), f"{key}={model}"
    check_weights(folder, setting)
    config = read_config(folder, setting)
    tokenizer = load_tokenizer(folder, chat=chat, setting=setting, say=say)
    if (folder / "generation_config.json").exists():
        # Refuse a broken file: transformers would ignore it, and its EOS ids would be lost.
        read_json(folder / "generation_config.json", setting)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size > LARGE:
        say(f"{setting}: loading {size / 1e6:,.1f} MB")
    network = read_weights(
        AutoModelForCausalLM,
        folder,
        config,
        getattr(torch, dtype),
        setting,
        "save the model again, with its language-model head",
    )
    _check_vocabulary(network, tokenizer, setting)
    eos = end_tokens(tokenizer, network.generation_config.eos_token_id, setting, say)
    # Drop the author's sampling defaults (top_k, top_p, penalties), which generate() would apply.
    network.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=list(eos) if len(eos) > 1 else eos[0],
    )
    network.config.pad_token_id = tokenizer.pad_token_id
    trained = to_train(network, mixed, lora, gradient_checkpointing, setting)
    placed: nn.Module = nn.Module.to(trained, device)
    return CausalLM(placed, tokenizer, context_of(config), eos)


def to_train(
    network: PreTrainedModel, mixed: bool, lora: LoraConfig | None, checkpoint: bool, setting: str
) -> nn.Module:
    """Prepare a model for training; see the arguments of :func:`load_causal_lm`."""
    if mixed:
        compute_in_bfloat16(network)
    if lora is not None:
        network = add_lora(network, lora)
    if checkpoint:
        _checkpoint_activations(network, setting)
    return network.train(checkpoint)


def _check_vocabulary(network: PreTrainedModel, tokenizer: Tokenizer, setting: str) -> None:
    rows = len(weight_of(network.get_input_embeddings()))
    if len(tokenizer) > rows:
        raise ConfigError(
            f"{setting}: its tokenizer has {len(tokenizer)} tokens, its embedding {rows} rows; "
            "call resize_token_embeddings, or give the tokenizer that belongs to the model"
        )


def _checkpoint_activations(network: PreTrainedModel, setting: str) -> None:
    """Enable activation checkpointing; refuse a model that does not support it."""
    asked = "actor.gradient_checkpointing=true"
    try:
        unwrapped(network).activation_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"{asked}: {setting} does not support it; set it to false") from error


def load_tokenizer(
    folder: Path, *, chat: bool, setting: str, say: Callable[[str], None] = print
) -> Tokenizer:
    """Load a model's tokenizer, with a chat template if ``chat``, and set it to pad on the left.

    If the tokenizer has no pad token, EOS becomes the pad token. This is safe, since klrl finds
    padding by position, not by token id. The arguments are those of :func:`load_causal_lm`.
    """
    tokenizer = read_tokenizer(folder, setting)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{setting}: its tokenizer has no EOS token, so no response could end; set eos_token "
            "in its tokenizer_config.json"
        )
    if isinstance(tokenizer.chat_template, dict):  # templates by name, as of Command R
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    if chat and not tokenizer.chat_template:
        raise ConfigError(
            f"{setting}: its tokenizer has no chat template, but prompts are conversations; add "
            "a chat_template.jinja to the model's folder, or give plain prompts"
        )
    if chat:
        templates.prepare()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        say(f"{setting}: no pad token; EOS is used instead")
    tokenizer.padding_side = "left"
    return tokenizer


def end_tokens(
    tokenizer: Tokenizer, eos_token_id: object, setting: str, say: Callable[[str], None] = print
) -> tuple[int, ...]:
    """Return the ids that end a response: the tokenizer's EOS, and any ids that the model lists.

    The generation config of a chat model lists several ids: that of Llama 3 lists the ends of a
    turn, of a tool message and of a text. Phi-4's names a single id, the end of a turn. A single id
    is ignored unless it is a special token: it may be a default of ``transformers`` (2 for Llama)
    that does not fit the tokenizer.
    """
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    if isinstance(eos_token_id, list | tuple):
        listed = list(eos_token_id)
    else:
        listed = [token for token in special if token == eos_token_id]
    known = tokenizer.get_vocab().values()
    for token in listed:
        if token not in known:
            raise ConfigError(
                f"{setting}: eos_token_id={listed} of its generation config names {token}, which "
                "is not a token id of its tokenizer; fix its generation_config.json"
            )
    ends = tuple(dict.fromkeys((tokenizer.eos_token_id, *listed)))
    if len(ends) > 1:
        names = escaped(", ".join(map(str, tokenizer.convert_ids_to_tokens(list(ends)))))
        say(f"{setting}: a response ends with any of {names}, as its generation config says")
    return ends
