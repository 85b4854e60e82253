"""``--cfg job``: all settings of a job as YAML, each with its comment from conf/."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import Container, OmegaConf

from klrl.base.errors import ConfigError
from klrl.config import conf_dir
from klrl.config.compose import compose, job_config, keys

#: The package of a preset, whose settings may be of any group.
_GLOBAL = ""


def show_job(words: list[str], args: argparse.Namespace) -> str:
    """What ``--cfg job`` prints.

    Args:
        words: the job's.
        args: Hydra's flags: ``config_dir``, ``config_name``, ``package``, ``resolve``.

    Raises:
        ConfigError: the job is refused, or has no part of the name that ``--package`` asks for.
    """
    job_config(words, args.config_dir, args.config_name)
    cfg = compose(words, args.config_dir, args.config_name)
    package = None if args.package == "_global_" else args.package
    part = cfg if package is None else OmegaConf.select(cfg, package)
    if part is None:
        raise ConfigError(f"--package {package}: the job has no such part; see --cfg job")
    if not isinstance(part, Container):
        return f"{part}\n"
    if args.resolve:
        OmegaConf.resolve(part)
    text = OmegaConf.to_yaml(part)
    found = comments(words, args.config_dir, args.config_name)
    if package is None:
        return annotated(text, found)
    below = f"{package}."
    mine = {key[len(below) :]: note for key, note in found.items() if key.startswith(below)}
    return f"# @package {package}\n{annotated(text, mine)}"


def comments(
    words: Sequence[str], config_dir: str | None = None, config_name: str | None = None
) -> dict[str, str]:
    """Dotted key -> comment, of the YAMLs that a job is composed of.

    The last file that sets a value has the say, as in composing. What a preset (``env=hopper``)
    says of its own value is left out where the words set another one.
    """
    given = keys(words)
    found: dict[str, str] = {}
    for path, package in _files(words, config_dir, config_name):
        for key, note in _noted(path.read_text(encoding="utf-8")):
            dotted = f"{package}.{key}" if package else key
            if not (package == _GLOBAL and dotted in given and dotted in found):
                found[dotted] = note
    return found


def _files(
    words: Sequence[str], config_dir: str | None, config_name: str | None
) -> Iterator[tuple[Path, str]]:
    """The YAMLs of a job in the order in which Hydra merges them, each with its package."""
    extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    with hydra.initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        merged = loader.compute_defaults_list(
            config_name or "config", [*words, *extra], RunMode.RUN
        )
    # As in Hydra's search path, where klrl's own come first.
    folders = [conf_dir(), *([Path(config_dir)] if config_dir else [])]
    for each in merged.defaults:
        files = (folder / f"{each.config_path}.yaml" for folder in folders)
        path = next((file for file in files if file.is_file()), None)
        if path is not None:
            yield path, each.package or _GLOBAL


def _noted(text: str) -> Iterator[tuple[str, str]]:
    """The settings of a YAML that have a comment behind them on their line."""
    lines = text.splitlines()
    root = yaml.compose(text, yaml.SafeLoader)
    for key, line, end in _places(root):
        rest = lines[line][end:].strip()
        if rest.startswith("#") and key.split(".")[0] not in ("defaults", "hydra"):
            yield key, rest.lstrip("# ")


def annotated(text: str, notes: dict[str, str]) -> str:
    """A YAML of :func:`OmegaConf.to_yaml` with a comment behind each setting that has one."""
    lines = text.splitlines()
    for key, line, end in _places(yaml.compose(text, yaml.SafeLoader)):
        # Nothing may follow on the first line of a text that goes on below.
        if key in notes and not lines[line][end:].strip():
            lines[line] += f"  # {notes[key]}"
    return "".join(f"{line}\n" for line in lines)


def _places(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int, int]]:
    """Each setting of a YAML with the line, and the column on it, behind which its comment stands.

    A text over several lines has no such place. The comment behind ``actor: {init_std: 0.5}`` is
    that of ``actor.init_std``.
    """
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        key, line = f"{prefix}{name.value}", name.start_mark.line
        if value.end_mark.line == line:
            leaves = list(_leaves(value, key))
            yield (leaves[0] if len(leaves) == 1 else key), line, value.end_mark.column
        elif isinstance(value, yaml.CollectionNode) and not value.flow_style:
            yield key, line, name.end_mark.column + 1
            yield from _places(value, f"{key}.")


def _leaves(node: yaml.Node, key: str) -> Iterator[str]:
    """The settings of a flow mapping; the key itself of anything else, an empty one too."""
    if not isinstance(node, yaml.MappingNode) or not node.value:
        yield key
        return
    for name, value in node.value:
        yield from _leaves(value, f"{key}.{name.value}")
