"""The source of a part of the user's own: as imported, as a run began with it, in a manifest."""

from __future__ import annotations

import sys
import types
from collections.abc import Collection

from klrl.base.errors import ConfigError
from klrl.base.sources import Source, source_of
from klrl.config.choices import CHOICES
from klrl.config.fields import OwnPart
from klrl.config.jobs import JobConfig
from klrl.config.own.find import find_target, named, split
from klrl.config.own.parts import own_parts

#: Top-level module -> the module and its source when this process imported it.
_IMPORTED: dict[str, tuple[types.ModuleType | None, Source]] = {}


def check_sources(config: JobConfig) -> None:
    """Refuse a job whose parts are not those that it was checked with, or begun with.

    Raises:
        ConfigError: a source has changed since.
    """
    for line in changed_sources(config, [group for group in CHOICES if group != "logger"]):
        raise ConfigError(f"{line}; bring it back, or start another run")


def changed_sources(config: JobConfig, groups: Collection[str] = tuple(CHOICES)) -> list[str]:
    """One line for each part whose source is not the one in the settings of the job.

    Args:
        config: the job.
        groups: whose parts count.
    """
    lines = []
    for setting, part in own_parts(config):
        if setting.partition(".")[0] not in groups:
            continue
        find_target(setting, part)
        now = own_source(setting, part)
        told, version = (part.source, part.version), (now.digest, now.version)
        if told != version:
            lines.append(
                f"{named(setting, part)}: has changed since this run began "
                f"(it had {_shown(part.source, part.version)}, now "
                f"{_shown(now.digest, now.version)})"
            )
    return lines


def _shown(digest: str | None, version: str | None) -> str:
    return f"source {digest}" if digest else f"version {version}"


def manifest_of(config: JobConfig) -> dict[str, dict[str, str | None]]:
    """What a manifest holds of the parts: setting -> target, source, version."""
    names = ("target", "source", "version")
    return {
        setting: {name: getattr(part, name) for name in names}
        for setting, part in own_parts(config)
    }


def own_source(setting: str, part: OwnPart) -> Source:
    """The source of a part as this process imported it.

    Raises:
        ConfigError: the files were changed after that.
    """
    top = split(setting, part)[0].partition(".")[0]
    try:
        now = source_of(top)
    except ImportError as error:
        raise ConfigError(f"{named(setting, part)}: {error}; write it into a file") from error
    module, before = _IMPORTED.get(top, (None, now))
    if module is not sys.modules.get(top):  # imported anew
        before = now
    _IMPORTED[top] = sys.modules.get(top), before
    if before != now:
        raise ConfigError(
            f"{named(setting, part)}: the files of {top} have changed since this process imported "
            "them; start klrl again (a notebook: restart its kernel)"
        )
    return now
