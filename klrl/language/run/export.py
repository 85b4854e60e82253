"""``klrl export``: writes a trained policy in Hugging Face's format."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from klrl.base.errors import ConfigError
from klrl.base.files import expanded, replace_file, replacing
from klrl.config import LanguageConfig
from klrl.config.identity import canonical
from klrl.domains import recorded_domain
from klrl.language.data.model_files import find_model, silent
from klrl.language.model.causal_lm import unwrapped, weight_of
from klrl.language.run.load import check_base, find_base, language_config, relocated, trained_policy
from klrl.runs.checkpoint import digests
from klrl.runs.find import find_run
from klrl.runs.folder import RunFolder
from klrl.runs.returns import kl_lines
from klrl.runs.rows import read_rows

#: Files of a tokenizer and its chat templates, which are copied unchanged.
_TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "*.jinja"),
    "additional_chat_templates/*.jinja",
)
#: Entries of a saved config.json that describe the weights next to it.
_OF_WEIGHTS = ("dtype", "architectures", "transformers_version")


def export_run(
    run: str, folder: Path, *, which: str = "last", merge: bool = False, model: str | None = None
) -> str:
    """Write a language run's policy to a new folder, as ``save_pretrained`` does.

    ``AutoModelForCausalLM`` loads the folder. With LoRA and without ``merge``, the folder has only
    the adapters, which ``PeftModel`` adds to the run's base model. The tokenizer is copied from the
    base model, and so are config and generation config if all weights are written: klrl's changes
    (no dropout, no sampling defaults, an added pad token) and the value head are left out. With
    ``collector.temperature`` other than 1 the generation config samples from the run's policy. The
    model card README.md describes the run.

    ``model``: current folder of the run's base model; None: the path stored in the run.

    Returns:
        A line that says what was written.

    Raises:
        ConfigError: no such run or checkpoint, a control run, adapters that are missing or cannot
            be merged, an existing folder, or a base model that is missing or changed.
        OSError: the folder cannot be written; then it does not exist afterwards.
    """
    config = relocated(language_config(find_run(run, "RUN"), "RUN"), model)
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"FOLDER={folder}: already exists; give a new folder")
    adapters = bool(config.actor.lora.r)
    if merge and not adapters:
        raise ConfigError("--merge: the run has no adapters (actor.lora.r=0); drop --merge")
    check_base(config)
    network: Any = trained_policy(run, which, setting="RUN", model=model).model
    if merge:
        _check_mergeable(network, config)
        network = network.merge_and_unload()
    folder.parent.mkdir(parents=True, exist_ok=True)
    what = "adapters" if adapters and not merge else "merged weights" if merge else "all weights"
    hub_id = None if expanded(find_base(config)).is_dir() else config.actor.model
    card = model_card(find_run(run, "RUN"), config, which, folder.name, what, hub_id)
    with replacing(folder) as partial, silent():
        partial.mkdir()
        _write(network, config, partial, adapters_alone=adapters and not merge)
        (partial / "README.md").write_text(card, encoding="utf-8")  # peft wrote one
    lora = [p.dtype for name, p in network.named_parameters() if "lora_" in name]
    dtype = str((lora or [network.dtype])[0]).removeprefix("torch.")
    temperature = config.collector.temperature
    policy = "" if temperature == 1 else f"; the run's policy is softmax(logits / {temperature:g})"
    return f"{folder}: the {which} checkpoint of {run}, {what}, {dtype}{policy}"


def _check_mergeable(model: Any, config: LanguageConfig) -> None:
    """Refuse to merge adapters of the embedding or the head if the two share a weight."""
    network = unwrapped(model)
    pair = network.get_input_embeddings(), network.get_output_embeddings()
    tied = len({weight_of(each).data_ptr() for each in pair}) == 1
    if tied and any("lora_" in name for each in pair for name, _ in each.named_parameters()):
        raise ConfigError(
            f"--merge: actor.lora.target_modules={config.actor.lora.target_modules} adapts only "
            "one of embedding and head, which share a weight in this model; drop --merge"
        )


def _write(model: Any, config: LanguageConfig, folder: Path, *, adapters_alone: bool) -> None:
    source = find_model(find_base(config))
    if adapters_alone:
        (settings,) = model.peft_config.values()
        # Store a hub id unchanged, a folder as an absolute path.
        local = expanded(find_base(config)).is_dir()
        settings.base_model_name_or_path = str(source.resolve() if local else find_base(config))
        # Adapters of embeddings are saved; the embeddings themselves belong to the base model.
        model.save_pretrained(folder, save_embedding_layers=False)
    else:
        if tempered := config.collector.temperature != 1:  # top_k=0: all; default 50
            how = {"do_sample": True, "temperature": config.collector.temperature, "top_k": 0}
            model.generation_config.update(**how)
        model.save_pretrained(folder)
        _restore_config(folder / "config.json", source / "config.json")
        author, ours = (each / "generation_config.json" for each in (source, folder))
        if not tempered:
            ours.unlink(missing_ok=True)
            if author.is_file():
                shutil.copyfile(author, ours)
    for file in {file for pattern in _TOKENIZER for file in source.glob(pattern)}:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def _restore_config(saved: Path, author: Path) -> None:
    """Restore the model author's settings (dropout, pad token, ...) in a saved ``config.json``."""
    ours, theirs = (json.loads(path.read_text(encoding="utf-8")) for path in (saved, author))
    if ours["model_type"] == theirs["model_type"]:
        dropped = {*_OF_WEIGHTS, "torch_dtype"}
        restored = {name: value for name, value in theirs.items() if name not in dropped}
        restored |= {name: ours[name] for name in _OF_WEIGHTS if name in ours}
    else:  # only the text model of a vision or audio model was loaded
        text = theirs.get("text_config", {})
        rates = {name for name in ours if "drop" in name or "jitter" in name}
        restored = {name: value for name, value in ours.items() if name not in rates}
        restored |= {name: text[name] for name in rates if name in text}
    replace_file(saved, json.dumps(restored, indent=2, sort_keys=True) + "\n")


def model_card(
    run: Path, config: LanguageConfig, which: str, title: str, weights: str, hub_id: str | None
) -> str:
    """Return the card of an exported policy. It names files, but no folders of this machine.

    ``config`` is the run's, ``weights`` says what is exported, and ``hub_id`` is the base model's,
    if it has one. The KL is that of the run's evaluation of this checkpoint.
    """
    manifest, (samples, _) = RunFolder(run).manifest, digests(run, which, ()) or (0, {})
    row = {row["samples"]: row for row in read_rows(run / "metrics.jsonl")}.get(samples, {})
    kl = "The run did not measure the KL of this checkpoint."
    for line in kl_lines(row, recorded_domain(manifest)):
        kl = f"{line}: sums over the vocabulary at every token of {row['eval/episodes']:g} "
        kl += "responses of the run's evaluation; +- is the standard error over responses."
    to_base = config.reference.name in ("initial", "adapter_off") and config.actor.init is None
    # A text that is an absolute path, or model:PATH, loses its folders.
    text = re.sub(r'"(model:)?[~/][^"]*/(?=[^"])', r'"\1', json.dumps(canonical(config)))
    settings = json.loads(text)
    base = settings["actor"]["model"] or "klrl's base model of env=sort_digits"
    data = {"library_name": "peft" if weights == "adapters" else "transformers", "tags": ["klrl"]}
    data |= {"pipeline_tag": "text-generation", **({"base_model": hub_id} if hub_id else {})}
    return f"""\
---
{yaml.safe_dump(data)}---

# {title}

Run `{manifest["id"]}` of klrl {manifest["klrl"]}: {weights} of the {which} checkpoint, after
{samples:,} samples, trained from {base}.
The policy is softmax(logits / {config.collector.temperature:g}).

The reference is {"the base model" if to_base else f"reference={config.reference.name}"}.
{kl}

The settings that change the result:

```yaml
{yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=100)}```
"""
