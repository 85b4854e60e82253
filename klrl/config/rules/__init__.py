"""Checks of two settings at once, in the file of their domain; one file asks what was typed.

To add one: a function in ``control.py``, ``language.py`` or ``both.py``, where every function is a
rule: it takes a typed job of its domain, and raises a ConfigError that names setting, value and
remedy. ``unread.py``: settings that no job reads, halves of an objective. No torch in here;
``klrl.runs.machine`` and each domain's ``preflight`` check what depends on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import isfunction
from typing import Any

from klrl.base.errors import ConfigError


def rules_of(domain: str) -> list[Callable[[Any], None]]:
    """The rules of a domain, then those of both; the first that fails is reported."""
    files = [import_module(f"{__name__}.{name}") for name in (domain, "both")]
    found = [(file.__name__, each) for file in files for each in vars(file).values()]
    return [each for file, each in found if isfunction(each) and each.__module__ == file]


def refuse_empty(setting: str, path: str | None, remedy: str) -> None:
    """Refuse an empty path, which would be the current folder: an unset variable of the shell."""
    if path is not None and not path.strip():
        raise ConfigError(f"{setting}: has no value; {remedy}")
