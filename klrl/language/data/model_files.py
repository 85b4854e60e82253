"""Reads and checks the files of a model, from a folder or from the Hugging Face hub.

No code from the model's files is executed: weights must be safetensors; pickles and Python files
are not fetched; ``trust_remote_code`` is off. Dropout is switched off, see :func:`disable_dropout`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from klrl.base.errors import ConfigError, first_line, in_one_line
from klrl.base.files import expanded, read_plain
from klrl.base.text import counted
from klrl.language.data.prompts import Tokenizer, guarded, json_type

#: Files to fetch from a hub repository: no pickles, no Python.
WANTED_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
#: Copies of the weights in other formats, which are not fetched.
UNWANTED_FILES = ("consolidated*", "original/*", "onnx/*")
#: In files that older versions of transformers wrote: constants, and parts of other tasks' heads.
_UNUSED = re.compile(
    r"\.(attn|attention)\.(masked_)?bias$|\.(causal_mask|inv_freq|position_ids|version)$"
    r"|(^|\.)pooler\.|^cls\.seq_relationship\."
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def find_model(model: str | Path, key: str = "actor.model") -> Path:
    """Return a model's folder; download it if ``model`` is a hub id. ``key`` names the setting.

    Raises:
        ConfigError: ``model`` is neither a folder nor a hub id, or the hub cannot be reached.
    """
    setting, path = f"{key}={model}", expanded(model)
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
            f"{setting}: no such folder, and no download from the hub "
            f"({first_line(error)}); give a folder that save_pretrained wrote, or a hub id"
        ) from error
    return Path(fetched)


def check_weights(folder: Path, setting: str) -> None:
    """Refuse a folder without safetensors files, or with adapters, merged or not."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{setting}: has LoRA adapters (adapter_config.json), which transformers adds to the "
            "weights; merge them (klrl export RUN FOLDER --merge, or merge_and_unload) into a new "
            "folder, and give that"
        )
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            f"{setting}: its weights are pickled ({pickles[0]}), and unpickling runs code; "
            "convert them once where you trust them: from_pretrained(...).save_pretrained(FOLDER)"
        )
    raise ConfigError(f"{setting}: has no *.safetensors; save the model with save_pretrained")


def read_config(folder: Path, setting: str) -> PretrainedConfig:
    """Read the model's config and switch dropout off."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{setting}: has no config.json; save the model with save_pretrained")
    raw = read_json(file, setting)
    kind = raw.get("model_type")
    if "auto_map" in raw and kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"{setting}: needs custom code (auto_map), which klrl never runs; choose a model "
            "that is part of transformers"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers' errors have no common base class
        raise ConfigError(
            f"{setting}: config.json is not a valid {kind} config ({in_one_line(error)}); save it "
            "again, upgrade transformers, or choose another model"
        ) from error
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"{setting}: {kind} is not a causal language model; choose one that "
            "AutoModelForCausalLM loads"
        )
    disable_dropout(config)
    if getattr(config, "rescale_every", 0):
        config.rescale_every = 0  # else RWKV divides its weights in place, once more at each resume
    return config


def read_json(file: Path, setting: str) -> dict[str, Any]:
    """Read a JSON file; refuse content that is not an object."""
    try:
        content = json.loads(read_plain(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{setting}: {file.name} is not JSON ({first_line(error)}); save it again"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{setting}: {file.name} is {json_type(content)}, not an object; save it again"
        )
    return content


def read_tokenizer(folder: Path, setting: str) -> Tokenizer:
    """Load a tokenizer with the rules of its own files; refuse one that needs custom code."""
    file = folder / "tokenizer_config.json"
    settings = read_json(file, setting) if file.is_file() else {}
    if settings.get("auto_map"):
        raise ConfigError(
            f"{setting}: its tokenizer needs custom code (auto_map), which klrl never runs; "
            "choose a model whose tokenizer is part of transformers"
        )
    # AutoTokenizer of transformers 5.23 replaces the rules in tokenizer.json by those of the model
    # type, for example Qwen2's. PreTrainedTokenizerFast keeps the rules of the file.
    exact = settings.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
    kind: Any = PreTrainedTokenizerFast if exact else AutoTokenizer
    how = {"trust_remote_code": False, "local_files_only": True}
    return guarded(
        lambda _: kind.from_pretrained(folder, **how),
        [None],
        lambda _: f"{setting}: its tokenizer cannot be read",
        "save the model's tokenizer there with save_pretrained",
        seconds=120.0,
    )[0]


def disable_dropout(config: PretrainedConfig) -> None:
    """Set every dropout rate to 0, so that training and evaluation mode compute the same function.

    With dropout, the trained policy would differ from the sampling policy even before the first
    update, so the importance ratio would not be 1. Router jitter adds noise in training mode, so it
    is set to 0 too. PhiMoE's ``router_jitter_noise`` is kept: both modes use it as a threshold.
    """
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            disable_dropout(value)
        rate = "dropout" in name or "pdrop" in name or name in ("layerdrop", "drop_path_rate")
        threshold = config.model_type == "phimoe" and name == "router_jitter_noise"
        if (rate or ("jitter" in name and not threshold)) and isinstance(value, float):
            setattr(config, name, 0.0)


def read_weights(
    kind: type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification],
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    setting: str,
    lacking: str,
) -> PreTrainedModel:
    """Load a model whose weights fit its config.

    Raises:
        ConfigError: its files lack weights (the message ends with ``lacking``), have more than the
            config describes, or have others. ``transformers`` would draw missing weights at random
            and drop the rest: a config with fewer layers would train a truncated model.
    """
    try:
        with silent():
            loaded: Any = kind.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, in one line
            )
    except Exception as error:  # a config can name an unknown activation or RoPE type
        raise ConfigError(
            f"{setting}: its weights cannot be read ({in_one_line(error)}); fix its config.json, "
            "or fetch or save it again"
        ) from error
    model: PreTrainedModel = loaded[0]
    missing, surplus, other = (
        sorted(loaded[1][name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    surplus = [name for name in surplus if not _UNUSED.search(name)]
    if kind is AutoModelForSequenceClassification:  # the head of another task changes no logit
        parts = {name for each in (model, model.base_model) for name, _ in each.named_children()}
        surplus = [name for name in surplus if name.partition(".")[0] in parts]
    problem = None
    if missing:
        problem = f"lack {counted(len(missing), 'weight')} ({missing[0]}, ...); {lacking}"
    elif surplus:
        problem = (
            f"have {counted(len(surplus), 'weight')} that its config.json leaves out "
            f"({surplus[0]}, ...); fix the config (fewer layers?), or load the model with "
            "transformers and save it without them: from_pretrained(...).save_pretrained(FOLDER)"
        )
    elif other:
        name, found, wanted = other[0]
        shapes = f"{tuple(found)}, but its config.json says {tuple(wanted)}"
        problem = f"have {name} of shape {shapes}; fix the config, or save the model again"
    if problem:
        raise ConfigError(f"{setting}: its files {problem}")
    return model


@contextmanager
def silent() -> Iterator[None]:
    """Inside this context, transformers shows no progress bars, load reports and warnings."""
    enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if enabled:
            logging.enable_progress_bar()
