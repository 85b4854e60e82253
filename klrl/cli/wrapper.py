"""Runs a command: turns its outcome into an exit code, and prints an error in one line."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

from klrl.base import ranks
from klrl.base.cache import trust
from klrl.base.errors import FAILURES, ConfigError, Interrupted
from klrl.base.imports import collection_paused
from klrl.base.interrupt import stop_signals
from klrl.base.screen import show
from klrl.base.streams import to_null
from klrl.base.text import escaped, nearest_option, warn
from klrl.config.fields import Settings

#: A function from a command's arguments to its exit code.
Command = Callable[[list[str]], int]

DONE, FAILED, REFUSED = 0, 1, 2


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError for wrong arguments."""

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError, where argparse would exit; suggest the nearest option."""
        meant = nearest_option(message, self.format_usage())
        raise ConfigError(f"{message}{meant}; see {self.prog} --help")

    def add_flag(self, name: str, help: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=help)


def run_command(name: str, argv: list[str]) -> int:
    """Import and run the command ``klrl.cli.NAME.NAME_command``; return its exit code."""
    with collection_paused():
        command: Command = getattr(import_module(f"klrl.cli.{name}"), f"{name}_command")
    if name in _IMPORTING:
        trusted = [word for word in argv if word.startswith("trust=")]
        argv = [word for word in argv if word not in trusted]
        for word in trusted:
            trust(word.partition("=")[2])
    return command(argv)


#: Commands that may import the code that a run's settings name. They accept ``trust=RUN``.
_IMPORTING = ("run", "evaluate", "record", "kl", "export", "verify", "plan")


def exit_code(name: str, command: Command, argv: list[str]) -> int:
    """Run a command and return its exit code; print an error to stderr in one line.

    Returns:
        0: done. 1: failed. 2: refused. 128 + n: stopped by signal n, so 130 after Ctrl-C.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # a printed path may be invalid UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with stop_signals(_stop):
            code = command(argv)
            sys.stdout.flush()
            return code
    except ConfigError as error:
        if not ranks.rank():  # each process of torchrun raises it
            _print_error(f"{name}: {error}")
        return REFUSED
    except AttributeError as error:
        if not isinstance(error.obj, Settings):
            raise
        kind = type(error.obj).__name__
        _print_error(f"{name}: {kind} has no setting {error.name}; declare it there")
        return REFUSED
    except (*FAILURES, OSError) as error:
        if not (isinstance(error, BrokenPipeError) and _stdout_closed()):
            _print_error(f"{name}: failed: {error}")
        _drop_unwritten()
        return FAILED
    except Interrupted as stop:
        return stop.exit_code
    except KeyboardInterrupt:
        warn("")
        warn(f"{name}: stopped")
        return 128 + signal.SIGINT


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal outside a run; a run has its own handler."""
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise Interrupted(signum)


def _drop_unwritten() -> None:
    """Redirect a broken stdout to the null device, so that Python's flush at exit succeeds."""
    try:
        sys.stdout.flush()
    except OSError:
        to_null(sys.stdout)


def _print_error(line: str) -> None:
    """Print an error in one line, after its traceback if HYDRA_FULL_ERROR is set."""
    if os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0"):
        traceback.print_exc()
    with suppress(OSError):
        show(escaped(line), sys.stderr, "red")


def _stdout_closed() -> bool:
    """Return whether the reader of stdout has closed the pipe, as in ``klrl ls | head -1``."""
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # stdout is no file, as in a notebook
        return False
    poll = select.poll()
    poll.register(stdout, select.POLLOUT)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
