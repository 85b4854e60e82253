"""Check every job of a command line before the first one runs: settings, then this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from klrl.base.errors import ConfigError
from klrl.base.live import LiveLine
from klrl.config import SWEEP_GROUPS, LauncherConfig, SearchConfig
from klrl.config.checks import check_names_unset, to_settings
from klrl.config.compose import Checked, Composer, checked_config, keys
from klrl.runs.machine import check_machine, check_package


def check_jobs(jobs: Sequence[list[str]], args: argparse.Namespace) -> list[Checked]:
    """Check every job before the first one runs; the machine once per kind of job.

    Raises:
        ConfigError: of the first job that cannot run.
    """
    composer = Composer(args.config_dir, args.config_name)
    checked: list[Checked] = []
    with checking(len(jobs)) as tell:
        for job in jobs:
            config = checked_config(job, composer, args.config_dir)
            checked.append(Checked(job, config))
            tell(len(checked))
    seen = set()
    for each in checked:
        parts = ("env", "actor", "collector", "device", "reference", "logger")
        machine = repr([getattr(each.config, part) for part in parts])
        if machine not in seen:
            check_machine(each.config, keys(each.words))
        seen.add(machine)
    return checked


#: Fewer jobs are checked without a word.
_MANY = 20


@contextmanager
def checking(jobs: int, stream: TextIO | None = None) -> Iterator[Callable[[int], None]]:
    """Tell how far the checking of many jobs is, once it has taken a second (in a log, 5).

    Yields:
        A function of the number of jobs that were checked.
    """
    line = LiveLine(stream or sys.stderr, every=5.0)
    due = time.monotonic() + 1.0

    def tell(done: int) -> None:
        nonlocal due
        now = time.monotonic()
        if jobs >= _MANY and now >= due:
            due = now + 0.2
            line.show(f"checking jobs: {done:,}/{jobs:,}")

    yield tell
    line.clear()


def sweep_settings(
    own: Sequence[str], args: argparse.Namespace
) -> tuple[LauncherConfig, SearchConfig]:
    """Where a sweep's jobs run, and what chooses them.

    Args:
        own: words of the groups ``launcher`` and ``search``.
        args: Hydra's flags.

    Raises:
        ConfigError: a word is refused, or a package is missing.
    """
    words = list(own)
    for word in words:
        if word.partition("=")[0] in SWEEP_GROUPS and "," in word:
            raise ConfigError(f"{word}: a sweep has one {word.partition('=')[0]}; give one")
    cfg = Composer(args.config_dir, "sweep").explained(words)
    check_names_unset(keys(words))
    parts: dict[str, Any] = to_settings(cfg, SWEEP_GROUPS)
    for group, config in parts.items():
        check_package(group, config.name)
    return parts["launcher"], parts["search"]
