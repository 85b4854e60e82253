"""``--cfg job``: prints all settings of a job as YAML, each with its comment."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from contextlib import suppress

from omegaconf import OmegaConf

from klrl.config import CHOICES, OwnPart, Ungrouped
from klrl.config.checks import NoValueError
from klrl.config.choices import NAME, choice_of
from klrl.config.compose import Composer, compose
from klrl.config.given import Given
from klrl.config.nodes import notes_of
from klrl.config.own import own_parts

#: Settings of ``env=gym`` that a custom environment does not read.
_OF_GYM = ("id", "kwargs")


def show_job(given: list[Given], config_dir: str | None) -> str:
    """Return the text of ``--cfg job``, with ``???`` for missing values."""
    config = None
    with suppress(NoValueError):
        config = Composer(config_dir).job_config(given)
    cfg = compose(given, config_dir)
    notes = notes_of(Ungrouped)
    for group in CHOICES:
        schema = choice_of(group, cfg[group][NAME]).schema
        notes |= notes_of(schema, f"{group}.") | {f"{group}.{NAME}": "set by the choice"}
    for setting, own in own_parts(config) if config is not None else ():
        if not setting.endswith("]"):  # show entries of env.wrappers as given
            found = {k: v for k, v in dataclasses.asdict(own).items() if k not in _OF_GYM}
            OmegaConf.update(cfg, setting, found, merge=False, force_add=True)
            notes |= notes_of(OwnPart, f"{setting}.")
    return annotated(OmegaConf.to_yaml(cfg), notes)


def annotated(text: str, notes: Mapping[str, str]) -> str:
    """Add each note to its setting's line in the output of :func:`OmegaConf.to_yaml`."""
    lines, path = [*text.splitlines(), ""], [""]
    for i, line in enumerate(lines):
        if found := re.match(r"( *)(\w+):( .)?", line):
            path = [*path[: len(found[1]) // 2], found[2]]
            note = notes.get(".".join(path))
            # YAML would read a comment in a string of several lines as part of the string.
            goes_on = found[3] and lines[i + 1].startswith(f"{found[1]} ")
            lines[i] += f"  # {note}" if note and not goes_on else ""
    return "\n".join(lines)
