"""``--cfg job``: all settings of a job as YAML, each with its comment."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import Container, OmegaConf

from klrl.base.errors import ConfigError
from klrl.config import ALL_CHOICES, conf_dir
from klrl.config.checks import NoValueError
from klrl.config.choices import NAME, Choice
from klrl.config.compose import compose, job_config, keys
from klrl.config.nodes import notes_of
from klrl.config.own import own_parts

#: Settings of ``env=gym`` that a custom environment has others for.
_OF_GYM = ("id", "kwargs")
#: What klrl notes of a custom part, which no YAML describes.
_FOUND = {
    "source": "a digest over its local files, part of the job's identity; klrl's to set",
    "version": "of its distribution, where it has one; klrl's to set",
}
#: The package of a preset, whose settings may be of any group.
_GLOBAL = ""


def show_job(overrides: list[str], args: argparse.Namespace) -> str:
    """The text that ``--cfg job`` prints; a job that only lacks values has ``???`` in their place.

    Of ``args`` it reads Hydra's flags ``config_dir``, ``config_name``, ``package``, ``resolve``.
    """
    config = None
    with suppress(NoValueError):
        config = job_config(overrides, args.config_dir, args.config_name)
    cfg = compose(overrides, args.config_dir, args.config_name)
    notes = comments(overrides, args.config_dir, args.config_name)
    if config is not None:
        for setting, own in own_parts(config):
            if setting.endswith("]"):  # a wrapper is shown as it was given
                continue
            found = {k: v for k, v in dataclasses.asdict(own).items() if k not in _OF_GYM}
            OmegaConf.update(cfg, setting, found, merge=False, force_add=True)
            notes |= {f"{setting}.{name}": note for name, note in _FOUND.items()}
    package = None if args.package == "_global_" else args.package
    part = cfg if package is None else OmegaConf.select(cfg, package)
    if part is None:
        raise ConfigError(f"--package {package}: the job has no such part; see --cfg job")
    if not isinstance(part, Container):
        return f"{part}\n"
    if args.resolve:
        OmegaConf.resolve(part)
    text = OmegaConf.to_yaml(part)
    if package is None:
        return annotated(text, notes)
    below = f"{package}."
    notes = {key[len(below) :]: note for key, note in notes.items() if key.startswith(below)}
    return f"# @package {package}\n{annotated(text, notes)}"


def comments(
    overrides: Sequence[str], config_dir: str | None = None, config_name: str | None = None
) -> dict[str, str]:
    """Dotted key -> comment, from the choices and YAMLs of which a job is composed.

    The last file that sets a value gives its comment, as it gives the value. A preset's comment on
    its own value (``env=hopper``) is left out where the overrides set another value.
    """
    given = keys(overrides)
    notes: dict[str, str] = {}
    for path, package in _parts(overrides, config_dir, config_name):
        if isinstance(path, Choice):
            notes |= {f"{package}.{NAME}": "set by the choice"}
            notes |= {f"{package}.{key}": note for key, note in notes_of(path.schema).items()}
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for key, line, end in _places(yaml.compose(text, yaml.SafeLoader)):
            note = lines[line][end:].strip()
            if not note.startswith("#") or key.split(".")[0] in ("defaults", "hydra"):
                continue
            dotted = f"{package}.{key}" if package else key
            if not (package == _GLOBAL and dotted in given and dotted in notes):
                notes[dotted] = note.lstrip("# ")
    return notes


def _parts(
    overrides: Sequence[str], config_dir: str | None, config_name: str | None
) -> Iterator[tuple[Path | Choice, str]]:
    """The choices and YAMLs of a job, in Hydra's order of merging, each with its package."""
    extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    with hydra.initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        merged = loader.compute_defaults_list(
            config_name or "config", [*overrides, *extra], RunMode.RUN
        )
    # As in Hydra's search path, klrl's own choices come first.
    folders = [conf_dir(), *([Path(config_dir)] if config_dir else [])]
    for each in merged.defaults:
        files = (folder / f"{each.config_path}.yaml" for folder in folders)
        path = next((file for file in files if file.is_file()), None)
        group, _, name = str(each.config_path).partition("/")
        part = path or ALL_CHOICES.get(group, {}).get(name)
        if part is not None:
            yield part, each.package or _GLOBAL


def annotated(text: str, notes: dict[str, str]) -> str:
    """A YAML of :func:`OmegaConf.to_yaml` with each comment added to its setting's line."""
    lines = text.splitlines()
    for key, line, end in _places(yaml.compose(text, yaml.SafeLoader)):
        # A comment must not follow the first line of a text over several lines.
        if key in notes and not lines[line][end:].strip():
            lines[line] += f"  # {notes[key]}"
    return "".join(f"{line}\n" for line in lines)


def _places(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Each setting of a YAML with the line and column after which its comment goes."""
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        key, line = f"{prefix}{name.value}", name.start_mark.line
        if value.end_mark.line == line:
            # The comment after actor: {init_std: 0.5} belongs to actor.init_std.
            leaves = list(_leaves(value, key))
            yield (leaves[0] if len(leaves) == 1 else key), line, value.end_mark.column
        elif isinstance(value, yaml.CollectionNode) and not value.flow_style:
            yield key, line, name.end_mark.column + 1
            yield from _places(value, f"{key}.")


def _leaves(node: yaml.Node, key: str) -> Iterator[str]:
    """The settings of a flow mapping; the key itself for any other node, or an empty mapping."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        yield key
        return
    for name, value in node.value:
        yield from _leaves(value, f"{key}.{name.value}")
