"""Rules that check the settings of a job against each other.

Each function in ``control.py``, ``language.py`` and ``both.py`` is a rule. It takes a job of its
domain, and raises a ConfigError that names setting, value and remedy. ``unread.py`` checks the
command line: it refuses settings that the job does not read, and an objective's loss without its
advantage. ``klrl.runs.machine`` and each domain's ``job_checks`` check the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import isfunction
from typing import Any


def rules_of(domain: str) -> list[Callable[[Any], None]]:
    """Return the rules of a domain, then those of both domains."""
    files = [import_module(f"{__name__}.{name}") for name in (domain, "both")]
    found = [(file.__name__, each) for file in files for each in vars(file).values()]
    return [each for file, each in found if isfunction(each) and each.__module__ == file]
