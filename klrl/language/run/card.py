"""The model card that ``klrl export`` writes: run, base model, KL to the reference, settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from klrl.config import LanguageConfig
from klrl.config.identity import canonical
from klrl.domains import recorded_domain
from klrl.runs.checkpoint import digests
from klrl.runs.folder import RunFolder
from klrl.runs.returns import kl_lines
from klrl.runs.rows import read_rows


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
