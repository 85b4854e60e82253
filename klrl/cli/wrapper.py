"""What every command shares: its exit code, and each error in one line."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import FrameType
from typing import NoReturn

from klrl.base.errors import FAILURES, ConfigError, Interrupted
from klrl.base.imports import collection_paused

#: From a command's words to its exit code.
Command = Callable[[list[str]], int]

DONE, FAILED, REFUSED = 0, 1, 2


class Parser(argparse.ArgumentParser):
    """An argument list whose errors are a ConfigError like all others."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message}; see {self.prog} --help")


def run_command(name: str, words: list[str]) -> int:
    """Import a command, ``klrl.cli.NAME.NAME_command``, and run it; returns its exit code."""
    with collection_paused():
        command: Command = getattr(import_module(f"klrl.cli.{name}"), f"{name}_command")
    return command(words)


def execute(name: str, argv: Sequence[str] | None = None) -> None:
    """Run a command of the command line; leaves the process unless it ended with 0.

    Args:
        name: of the command, as ``evaluate``.
        argv: its words; None: those of this process.

    Raises:
        SystemExit: with the exit code, where that is not 0.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    code = exit_code(f"klrl {name}", partial(run_command, name), words)
    if code != DONE:
        sys.exit(code)


def exit_code(name: str, command: Command, words: list[str]) -> int:
    """Run a command; its errors become a line on stderr and an exit code.

    Returns:
        0 done, 1 failed, 2 refused, 130 and 143 stopped by Ctrl-C and SIGTERM.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        code = command(words)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        _say(f"{name}: {error}")
        return REFUSED
    except (*FAILURES, OSError) as error:
        if not (isinstance(error, BrokenPipeError) and _reader_is_gone()):
            _say(f"{name}: failed: {error}")
        return FAILED
    except Interrupted as stop:
        return stop.exit_code
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM before a run has begun: leave as Ctrl-C does."""
    raise Interrupted(signum)


def _say(line: str) -> None:
    """Say what went wrong, below its traceback where HYDRA_FULL_ERROR asks for one."""
    if os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0"):
        traceback.print_exc()
    print(line, file=sys.stderr)


def _reader_is_gone() -> bool:
    """Whether nobody reads stdout any more, as after ``klrl ls | head -1``.

    Python would complain once more when it flushes stdout on its way out, hence the null device.
    """
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # not a file, as in a notebook
        return False
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        return False
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stdout)
    os.close(null)
    return True
