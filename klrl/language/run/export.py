"""A trained policy in Hugging Face's format: what ``klrl export`` writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from klrl.base.errors import ConfigError
from klrl.base.files import expanded, replace_file, replacing
from klrl.config import LanguageConfig
from klrl.language.data.model_files import find_model, no_progress_bar
from klrl.language.model.causal_lm import unwrapped, weight_of
from klrl.language.run.load import check_place, find_base, language_config, moved, trained_policy
from klrl.runs.find import find_run

#: Files of a tokenizer and its chat templates, which are copied as their author wrote them.
_TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.jinja"),
    "additional_chat_templates/*.jinja",
)
#: What a saved config.json says of the weights beside it.
_OF_WEIGHTS = ("dtype", "architectures", "transformers_version")


def export_run(
    run: str, folder: Path, *, which: str = "last", merge: bool = False, model: str | None = None
) -> str:
    """Write a language run's policy as ``save_pretrained`` does, to a new folder.

    All weights, which ``AutoModelForCausalLM`` loads; or with LoRA the adapters alone, which
    ``PeftModel`` loads on the run's base model. Config, generation config and tokenizer are the
    author's: klrl's own changes (no dropout, no sampling defaults, a pad token) are not in them.
    A value head is left out.

    Args:
        run: the run folder.
        folder: where to write.
        which: last or best.
        merge: add the adapters to the weights, and write these.
        model: the folder where the run's base model is now; None: where it was.

    Returns:
        What was written, in words.

    Raises:
        ConfigError: no such run or checkpoint, a control run, no adapters to merge, or adapters
            that cannot be, the folder exists, or the base model is missing or another.
        OSError: it cannot be written; nothing is left.
    """
    config = moved(language_config(find_run(run, "RUN"), "RUN"), model)
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"FOLDER={folder}: exists already; give a new one")
    adapters = bool(config.actor.lora.r)
    if merge and not adapters:
        raise ConfigError("--merge: actor.lora.r=0, the run has no adapters; drop it")
    check_place(config)
    network: Any = trained_policy(run, which, setting="RUN", model=model).model
    if merge:
        _check_mergeable(network, config)
        network = network.merge_and_unload()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as partial, no_progress_bar():
        partial.mkdir()
        _write(network, config, partial, adapters_alone=adapters and not merge)
    what = "adapters" if adapters and not merge else "merged weights" if merge else "all weights"
    dtype = str(_dtype(network)).removeprefix("torch.")
    return f"{folder}: the {which} checkpoint of {run}, {what}, {dtype}"


def _check_mergeable(model: Any, config: LanguageConfig) -> None:
    """Refuse adapters on one of embedding and head where these share a weight."""
    network = unwrapped(model)
    pair = network.get_input_embeddings(), network.get_output_embeddings()
    tied = len({weight_of(each).data_ptr() for each in pair}) == 1
    if tied and any("lora_" in name for each in pair for name, _ in each.named_parameters()):
        raise ConfigError(
            f"--merge: actor.lora.target_modules={config.actor.lora.target_modules} has adapters "
            "on one of embedding and head, which share a weight in this model; drop it"
        )


def _dtype(model: nn.Module) -> torch.dtype:
    """Of the weights that are written."""
    trained = [p.dtype for name, p in model.named_parameters() if "lora_" in name]
    return trained[0] if trained else next(model.parameters()).dtype


def _write(model: Any, config: LanguageConfig, folder: Path, *, adapters_alone: bool) -> None:
    source = find_model(find_base(config))
    if adapters_alone:
        (settings,) = model.peft_config.values()
        # A hub id, or a path that is valid everywhere here.
        local = expanded(find_base(config)).is_dir()
        settings.base_model_name_or_path = str(source.resolve() if local else find_base(config))
        # Adapters of embeddings are among the adapters; the embeddings themselves are the base's.
        model.save_pretrained(folder, save_embedding_layers=False)
    else:
        model.save_pretrained(folder)
        _restore_config(folder / "config.json", source / "config.json")
        (folder / "generation_config.json").unlink(missing_ok=True)
        if (source / "generation_config.json").is_file():
            shutil.copyfile(source / "generation_config.json", folder / "generation_config.json")
    for file in {file for pattern in _TOKENIZER for file in source.glob(pattern)}:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def _restore_config(saved: Path, author: Path) -> None:
    """Put the author's settings (dropout, pad token, ...) into a saved ``config.json``."""
    ours, theirs = (json.loads(path.read_text(encoding="utf-8")) for path in (saved, author))
    if ours["model_type"] == theirs["model_type"]:
        dropped = {*_OF_WEIGHTS, "torch_dtype"}
        restored = {name: value for name, value in theirs.items() if name not in dropped}
        restored |= {name: ours[name] for name in _OF_WEIGHTS if name in ours}
    else:  # of a model with a vision or audio part only the text model was loaded
        text = theirs.get("text_config", {})
        rates = {name for name in ours if "drop" in name or "jitter" in name}
        restored = {name: value for name, value in ours.items() if name not in rates}
        restored |= {name: text[name] for name in rates if name in text}
    replace_file(saved, json.dumps(restored, indent=2, sort_keys=True) + "\n")
