"""Any causal language model of ``transformers`` with its tokenizer, from a folder or the hub.

No downloaded code is executed: weights are safetensors, pickles and Python files are not even
fetched, and ``trust_remote_code`` is off. Dropout is switched off, see :func:`silence_dropout`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from klrl.base.errors import ConfigError, first_line, in_one_line
from klrl.base.files import expanded
from klrl.config import LoraConfig
from klrl.language.causal_lm import unwrapped
from klrl.language.lora import add_lora
from klrl.language.mixed import compute_in_bfloat16
from klrl.language.prompts import Tokenizer, kind_of
from klrl.transforms.token_log_probs import context_of

#: Files that are fetched of a hub repository: no pickle, no Python.
WANTED_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
#: The same weights again, in other layouts.
UNWANTED_FILES = ("consolidated*", "original/*", "onnx/*")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


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

    Raises:
        ConfigError: it cannot be loaded, would run code, or lacks what training needs.
    """
    folder, setting = find_model(model), f"actor.model={model}"
    config = _read_config(folder, setting)
    _check_weights(folder, setting)
    tokenizer = load_tokenizer(folder, chat=chat, setting=setting, say=say)
    _check_generation(folder, setting)
    network = _read_weights(folder, config, getattr(torch, dtype), setting)
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


# ----------------------------------------------------------------------------------------- files


def find_model(model: str | Path) -> Path:
    """The folder of a model, downloaded first for a hub id.

    Raises:
        ConfigError: no such folder and no such hub id, or the hub cannot be reached.
    """
    setting, path = f"actor.model={model}", expanded(model)
    name = str(model)
    if name.strip() and path.is_dir():  # an empty path would be the current folder
        return path
    if path.is_file():
        raise ConfigError(f"{setting}: is a file; give the folder that save_pretrained wrote")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise ConfigError(f"{setting}: no such folder; give one that save_pretrained wrote")
    try:
        fetched = snapshot_download(
            name, allow_patterns=list(WANTED_FILES), ignore_patterns=list(UNWANTED_FILES)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: no such folder here, and the hub does not give it "
            f"({first_line(error)}); give a folder that save_pretrained wrote, or a hub id"
        ) from error
    return Path(fetched)


def _check_weights(folder: Path, setting: str) -> None:
    """Refuse a folder without safetensors before anything is read."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            f"{setting}: its weights are pickled ({pickles[0]}), and unpickling runs code; "
            "convert them once where you trust them: AutoModelForCausalLM.from_pretrained(...)"
            ".save_pretrained(FOLDER)"
        )
    raise ConfigError(f"{setting}: no *.safetensors in it; save it with save_pretrained")


def _read_config(folder: Path, setting: str) -> PretrainedConfig:
    """The model's config, without dropout.

    Raises:
        ConfigError: there is none, it needs remote code, or it is of no causal language model.
    """
    file = folder / "config.json"
    if not file.is_file():
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"{setting}: holds LoRA adapters alone; merge them into their model "
                "(klrl export RUN FOLDER --merge, or merge_and_unload) and give the new folder"
            )
        raise ConfigError(f"{setting}: no config.json in it; give a folder of save_pretrained")
    raw = _read_json(file, setting)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise ConfigError(
                f"{setting}: runs code of its own (auto_map), which klrl never does; choose a "
                "model that transformers itself implements"
            )
        raise ConfigError(
            f"{setting}: this transformers knows no model_type {kind!r}; upgrade it or choose "
            "another model"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"{setting}: {kind} is no causal language model; choose one that "
            "AutoModelForCausalLM loads"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # its checks share no base
        raise ConfigError(
            f"{setting}: config.json is no config of a {kind} ({in_one_line(error)}); save it anew"
        ) from error
    silence_dropout(config)
    if getattr(config, "rescale_every", 0):
        config.rescale_every = 0  # RWKV would divide its weights in place, again after a resume
    return config


def _read_json(file: Path, setting: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{setting}: {file.name} cannot be read ({error.strerror or error}); save it anew"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{setting}: {file.name} is not JSON ({error}); save it anew") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{setting}: {file.name} is {kind_of(content)}, not an object; save it anew"
        )
    return content


def _check_generation(folder: Path, setting: str) -> None:
    """Refuse a broken ``generation_config.json``, of which transformers says nothing.

    It would take the EOS of ``config.json``, and a list of several were lost.
    """
    file = folder / "generation_config.json"
    if file.exists() or file.is_symlink():
        _read_json(file, setting)


def silence_dropout(config: PretrainedConfig) -> None:
    """Set every dropout rate to 0, so that training mode and evaluation mode are one function.

    With dropout the updated policy would not be the one that sampled: a ratio other than 1 and a
    KL(old||new) above 0 before the first update. So would it be with the jitter of routers, which
    is noise of the training mode; PhiMoE's ``router_jitter_noise`` is a threshold of both modes.
    """
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            silence_dropout(value)
        rate = "dropout" in name or "pdrop" in name or name in ("layerdrop", "drop_path_rate")
        threshold = config.model_type == "phimoe" and name == "router_jitter_noise"
        if (rate or ("jitter" in name and not threshold)) and isinstance(value, float):
            setattr(config, name, 0.0)


def _read_weights(folder: Path, config: PretrainedConfig, dtype: torch.dtype, setting: str) -> Any:
    """The model; every weight must come from the files.

    Raises:
        ConfigError: the files are broken, or lack weights of this architecture.
    """
    try:
        with no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"{setting}: its weights cannot be read ({first_line(error)}); fetch or save it anew"
        ) from error
    except Exception as error:  # a config can name anything: an activation, a way to rotate
        raise ConfigError(
            f"{setting}: no model can be made of its files ({in_one_line(error)}); fix its "
            "config.json, or fetch or save it anew"
        ) from error
    network, loading_info = loaded
    missing = sorted(loading_info["missing_keys"])
    if missing:
        # transformers would initialise them at random and go on.
        raise ConfigError(
            f"{setting}: {len(missing)} weights are not in its files ({missing[0]}, ...); "
            "it was saved without its language-model head, or broke while being saved"
        )
    return network


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


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Disable the progress bars of loading and saving: they would break a run's own lines."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


# ---------------------------------------------------------------------------------------- tokenizer


def load_tokenizer(
    folder: Path, *, chat: bool, setting: str, say: Callable[[str], None] = print
) -> Tokenizer:
    """The tokenizer of a folder, padding on the left.

    If it has no pad token, EOS is used and ``say`` gets a line: klrl knows padding by position,
    never by value.

    Args:
        folder: of the model.
        chat: whether a chat template is needed.
        setting: for messages, as in ``actor.model=...``.
        say: takes the line.

    Raises:
        ConfigError: no tokenizer, one that runs code, no EOS token, or no chat template.
    """
    settings = _read_settings(folder, setting)
    # The folder's tokenizer.json must win over the model's type: for a Qwen2 model, AutoTokenizer
    # of transformers 5.23 replaces its rules by Qwen2's own.
    exact = settings.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
    kind: Any = PreTrainedTokenizerFast if exact else AutoTokenizer
    try:
        tokenizer: Tokenizer = kind.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # a broken tokenizer.json raises anything, Exception itself too
        raise ConfigError(
            f"{setting}: no tokenizer can be read from it ({first_line(error)}); save the "
            "model's tokenizer there with save_pretrained"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{setting}: its tokenizer has no EOS token, so no response could end; set eos_token "
            "in its tokenizer_config.json"
        )
    if chat and not tokenizer.chat_template:
        raise ConfigError(
            f"{setting}: its tokenizer has no chat template, and the prompts are conversations; "
            "put a chat_template.jinja beside it, or give plain prompts"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        say(f"{setting}: no pad token; padding with EOS, told apart by position")
    tokenizer.padding_side = "left"
    return tokenizer


def end_tokens(
    tokenizer: Tokenizer, eos_token_id: Any, setting: str, say: Callable[[str], None] = print
) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's EOS, and those that the model lists.

    Chat models list several: Llama 3 has one each for the end of a turn, of a message to a tool and
    of a text. A single id of the model is ignored: classes of transformers have one by default
    (Llama's is 2), whatever the tokenizer. ``say`` gets a line if there are several ids.

    Args:
        tokenizer: has an EOS.
        eos_token_id: of the model's generation config: a list, an id or None.
        setting: for messages, as in ``actor.model=...``.
        say: takes the line.

    Raises:
        ConfigError: the list has an id that is no token.
    """
    listed = list(eos_token_id) if isinstance(eos_token_id, list | tuple) else []
    for token in listed:
        known = isinstance(token, int) and token >= 0
        if not known or tokenizer.convert_ids_to_tokens(token) is None:
            raise ConfigError(
                f"{setting}: eos_token_id={listed} of its generation config names {token}, which "
                "is no token; fix its generation_config.json"
            )
    ends = tuple(dict.fromkeys((tokenizer.eos_token_id, *listed)))
    if len(ends) > 1:
        names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(list(ends))))
        say(f"{setting}: a response ends with any of {names}, as its generation config lists")
    return ends


def _read_settings(folder: Path, setting: str) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``; one that needs remote code is refused."""
    file = folder / "tokenizer_config.json"
    settings = _read_json(file, setting) if file.is_file() else {}
    if settings.get("auto_map"):
        raise ConfigError(
            f"{setting}: its tokenizer runs code of its own (auto_map), which klrl never does; "
            "choose a model whose tokenizer transformers itself implements"
        )
    return settings


# ------------------------------------------------------------------------------------------ context


def prompt_limit(context: int | None, response: int) -> int | None:
    """Most tokens of a prompt that leave room for the response.

    Args:
        context: of the model; None for no limit.
        response: ``collector.max_new_tokens``, most tokens of a response.

    Raises:
        ConfigError: the response alone fills the context.
    """
    if context is None:
        return None
    if response >= context:
        raise ConfigError(
            f"collector.max_new_tokens={response}: leaves no room for a prompt in the model's "
            f"context of {context} tokens; choose less"
        )
    return context - response
