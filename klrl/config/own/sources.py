"""Records the sources of custom parts, and refuses parts with changed sources."""

from __future__ import annotations

import sys
import types
from collections.abc import Collection
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.sources import Source, find, source_of
from klrl.config.choices import CHOICES
from klrl.config.jobs import Env, JobConfig
from klrl.config.own.find import import_target, setting_text, typed_args
from klrl.config.own.parts import env_code, own_parts, top_level
from klrl.config.own.trust import name_code

#: Name of a top-level module -> the module, if imported, and its source when klrl first looked.
_IMPORTED: dict[str, tuple[types.ModuleType | None, Source]] = {}


def check_sources(config: JobConfig) -> None:
    """Refuse a job if a custom part, other than a logger, has changed since the run began."""
    for line in changed_sources(config, [group for group in CHOICES if group != "logger"]):
        raise ConfigError(f"{line}; restore it, or start a new run")


def changed_sources(config: JobConfig, groups: Collection[str] = tuple(CHOICES)) -> list[str]:
    """Describe, in one line each, the parts whose sources differ from those in the settings.

    ``groups`` selects parts; ``env.id`` and ``env.reward`` are always compared.
    """
    before, now = dict(config.env.sources), named_sources(config.env)
    for setting, part in own_parts(config):
        if setting.partition(".")[0] in groups:
            import_target(setting, part)
            text = setting_text(setting, part)
            before[text] = str(Source(str(part.path), part.source, part.version))
            now[text] = str(current_source(text, part.target))
    return [
        f"{what}: has changed since this run began (it had {old}, now {now[what]})"
        for what, old in before.items()
        if now.get(what, old) != old
    ]


def named_sources(env: Env) -> dict[str, str]:
    """Map values of ``env.id`` and ``env.reward`` that name code to its digest or version."""
    found = {}
    for setting, value, _ in env_code(env):
        if find(top_level(value), [str(Path.cwd())]):  # else a later import reports the error
            found[value] = str(current_source(f"{setting}={value}", value))
    return found


def current_source(text: str, target: str) -> Source:
    """Return the source of ``package.module:Name`` that this process imported, or would import.

    Raises:
        ConfigError: the files have changed since the import, or there are none. The message starts
            with ``text``.
    """
    top = top_level(target)
    try:
        now = source_of(top, [str(Path.cwd())])
    except ImportError as error:
        remedy = "put its code into a .py file that Python can import"
        raise ConfigError(f"{text}: {error}; {remedy}") from error
    module, before = _IMPORTED.get(top, (None, now))
    if module is None or module is not sys.modules.get(top):  # not imported, or imported again
        before = now
    _IMPORTED[top] = sys.modules.get(top), before
    if before != now:
        raise ConfigError(
            f"{text}: the files of {top} have changed since this process imported "
            "them; start klrl again (a notebook: restart its kernel)"
        )
    return now


def complete(config: JobConfig) -> None:
    """Complete the custom parts of a job in place: convert their args, record their sources."""
    for setting, part in own_parts(config):
        if part.path is not None and not Path(part.path).is_dir():
            remedy = f"give the folder of {top_level(part.target)}, or drop it"
            raise ConfigError(f"{setting}.path={part.path}: no such folder; {remedy}")
        part.args = typed_args(setting, part)
        source = current_source(setting_text(setting, part), part.target)
        part.path, part.source, part.version = source.folder, source.digest, source.version
        if setting == "env":
            config.env.id = part.target  # the task's name
    config.env.sources = named_sources(config.env)
    name_code(config)
