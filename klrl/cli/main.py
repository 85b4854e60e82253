"""``klrl [COMMAND] ...``: find the command and run it.

A command's module is imported when it is asked for: ``--version`` and completion answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from klrl.base.errors import ConfigError
from klrl.base.version import __version__
from klrl.cli.wrapper import DONE, exit_code, run_command

#: command -> what it does; run is meant where none is named.
COMMANDS = {
    "run": "train, sweep or go on with a run; may be left out",
    "evaluate": "play the policy of a run",
    "ls": "runs and sweeps, and how far they have come",
    "report": "compare runs in one offline page",
    "diff": "two runs side by side",
    "plan": "what a sweep would cost",
    "doctor": "are this machine's KL numbers true?",
    "completion": "a script that completes words in bash or zsh",
}

_PACKAGES = ("torch", "torchrl", "hydra-core")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command line; exits with 0, 1, 2, 130 or 143 as docs/runs.md says.

    Args:
        argv: its words; None: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and words[0] in COMMANDS else ""
    if name in ("", "run") and "--version" in words:
        print(versions())
        sys.exit(DONE)
    told = "klrl" if name in ("", "run") else f"klrl {name}"
    # Imported within the wrapper, so that Ctrl-C means the same while that goes on.
    sys.exit(exit_code(told, partial(run_command, name) if name else _unnamed, words))


def _unnamed(words: list[str]) -> int:
    """Words without a command are those of ``run``, unless the first is a misspelt command."""
    first = words[0] if words and words[0].isalpha() else ""
    close = get_close_matches(first, COMMANDS, n=1, cutoff=0.75)
    if close:
        raise ConfigError(f"{first}: no such command; did you mean {close[0]}?")
    return run_command("run", words)


def versions() -> str:
    """klrl's version, and of what its numbers depend on; imports none of them."""
    lines = [f"klrl {__version__}"]
    for package in _PACKAGES:
        try:
            lines.append(f"{package.removesuffix('-core')} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} is not installed")
    return "\n".join(lines)
