"""``klrl [COMMAND] ...``: finds the command and runs it.

A command's module is imported only if the command runs, so that ``--version`` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from klrl import __version__
from klrl.base.errors import ConfigError
from klrl.base.streams import lasting, open_closed_streams
from klrl.cli.wrapper import DONE, exit_code, run_command

#: Command -> its description; ``run`` is the default.
COMMANDS = {
    "run": "train, sweep or resume a run; may be left out",
    "evaluate": "play the policy of a run",
    "record": "write demonstrations by a run's policy",
    "kl": "how far are two policies apart?",
    "ls": "the progress of runs and sweeps",
    "report": "compare runs in one offline page",
    "figure": "a metric of runs as PDF or SVG, for a paper",
    "diff": "two runs side by side",
    "export": "a policy as an ONNX file, or in Hugging Face's format",
    "verify": "is the record of a run true?",
    "plan": "what a sweep would run",
    "doctor": "has a loss the right gradient?",
    "completion": "a script that completes words in bash, zsh or fish",
}
#: The word of another program -> the command.
_ALSO = {
    **dict.fromkeys(("train", "fit", "learn", "start", "sweep", "resume"), "run"),
    **dict.fromkeys(("eval", "test", "play", "enjoy", "predict", "render"), "evaluate"),
    **{"compare": "diff", "list": "ls", "status": "ls", "plot": "figure", "check": "verify"},
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command, and exit with its exit code, see docs/runs.md."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments and arguments[0] in COMMANDS else ""
    shown = "klrl" if name in ("", "run") else f"klrl {name}"
    command = partial(run_command, name) if name else _unnamed
    if name in ("", "run") and "--version" in arguments:
        command = _print_versions
    open_closed_streams()
    with lasting("stderr"):
        # run_command imports the command inside exit_code, which handles Ctrl-C during the import.
        code = exit_code(shown, command, arguments)
    sys.exit(code)


def _unnamed(argv: list[str]) -> int:
    """Run the default command ``run``, unless the first argument is a misspelt command."""
    first = argv[0] if argv and argv[0].isalpha() else ""
    if first == "help":
        return run_command("run", ["--help"])
    close = get_close_matches(first, COMMANDS, n=1, cutoff=0.75)
    if name := _ALSO.get(first, "".join(close)):
        raise ConfigError(f"{first}: no such command; did you mean {name}? ({COMMANDS[name]})")
    return run_command("run", argv)


def _print_versions(argv: list[str]) -> int:
    """Print the versions of klrl, torch, torchrl and Hydra, without importing the packages."""
    print(f"klrl {__version__}")
    for package in ("torch", "torchrl", "hydra-core"):
        try:
            print(package.removesuffix("-core"), version(package))
        except PackageNotFoundError:
            print(f"{package} is not installed")
    return DONE
