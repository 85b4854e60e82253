"""Checks of two settings at once, by the setting that they refuse; two ask what was typed.

unread.py: settings that no job reads. objective.py: halves of an objective.
"""

from __future__ import annotations

from klrl.base.errors import ConfigError


def refuse_empty(setting: str, path: str | None, remedy: str) -> None:
    """Refuse an empty path, which would be the current folder: an unset variable of the shell.

    Args:
        setting: that names it.
        path: None is no path, and passes.
        remedy: what to do about it.

    Raises:
        ConfigError: it is empty or blank.
    """
    if path is not None and not path.strip():
        raise ConfigError(f"{setting}: has no value; {remedy}")
