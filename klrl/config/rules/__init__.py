"""Checks of two settings at once, in the file of their domain; one file asks what was typed.

To add one: a function in ``control.py``, ``language.py`` or ``both.py``, marked :func:`rule`.
``unread.py``: settings that no job reads, halves of an objective. No torch in
here; ``klrl.runs.machine`` and each domain's ``preflight`` check what depends on the machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from klrl.base.errors import ConfigError

#: Takes a typed job of its domain; raises a ConfigError that names setting, value and remedy.
Check = Callable[[Any], None]
Rule = TypeVar("Rule", bound=Check)
#: Module of this folder -> its rules, in the order of the file.
_RULES: defaultdict[str, list[Check]] = defaultdict(list)


def rule(check: Rule) -> Rule:
    """Have a check made of every job of the domain that its file is named for."""
    _RULES[check.__module__].append(check)
    return check


def rules_of(domain: str) -> list[Check]:
    """The rules of a domain, then those of both; the first that fails is reported."""
    files = [import_module(f"{__name__}.{name}").__name__ for name in (domain, "both")]
    return [check for file in files for check in _RULES[file]]


def refuse_empty(setting: str, path: str | None, remedy: str) -> None:
    """Refuse an empty path, which would be the current folder: an unset variable of the shell."""
    if path is not None and not path.strip():
        raise ConfigError(f"{setting}: has no value; {remedy}")
