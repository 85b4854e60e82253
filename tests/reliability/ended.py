"""Commands of klrl in forks, and what none of them may do."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

#: Seconds for one command, on a machine that does other things too.
LIMIT = 60.0
#: Of libraries, as pyproject.toml and tests/conftest.py list them, with the reasons.
LIBRARY_WARNINGS = (
    r"Creating \w+Updater\w* which inherits",
    r"`torch.jit.script_method` is deprecated",
    r"The PyTorch API of nested tensors is in prototype stage",
    r".*The environment .* is out of date",
)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int  # its exit code; minus the number of the signal that ended it
    out: str  # what it wrote to stdout
    err: str  # what it wrote to stderr
    seconds: float  # its wall time
    hung: bool = False  # whether it was killed at the limit

    @property
    def lines(self) -> list[str]:
        """Of stderr."""
        return self.err.strip().splitlines()

    def faults(self, codes: Sequence[int], *, most_lines: int = 1) -> list[str]:
        """What is wrong with it, whatever it was given."""
        last = self.lines[-1] if self.lines else ""
        wrong = []
        if self.hung:
            wrong.append(f"hangs: not done in {self.seconds:.0f} s")
        elif self.code not in codes:
            wrong.append(f"exit {self.code}, not {' or '.join(map(str, codes))}: {last[:200]}")
        if "Traceback (most recent call last)" in self.err + self.out:
            wrong.append(f"traceback: {last[:200]}")
        elif "Warning: " in self.err:
            wrong.append(f"warns: {self.err.strip()[:200]}")
        elif len(self.lines) > most_lines:
            wrong.append(f"{len(self.lines)} lines on stderr: {self.err.strip()[:300]!r}")
        elif self.code in (1, 2) and not self.lines:
            wrong.append(f"exit {self.code} without a word")
        return wrong


def in_fork(function: Callable[[], Any], folder: Path, limit: float = LIMIT) -> Ended:
    """Call a function in a fork of this process, which has imported what it needs."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begun = time.monotonic()
        code, hung = _wait(_fork(function, folder, out.fileno(), err.fileno()), limit)
        return Ended(code, _read(out), _read(err), time.monotonic() - begun, hung)


def _fork(function: Callable[[], Any], folder: Path, out: int, err: int) -> int:
    """Begin to call a function in a fork that writes to two descriptors, and go on; its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _child(function, folder, out, err)
    return pid


def _child(function: Callable[[], Any], folder: Path, out: int, err: int) -> NoReturn:
    """Never returns: neither to the caller, nor through the exit handlers of the parent."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        for number, descriptor in enumerate((null, out, err)):
            os.dup2(descriptor, number)
        # A parent that captures output has put its own objects there.
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(
            2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        os.chdir(folder)
        warnings.showwarning = _show_warning
        warnings.resetwarnings()
        warnings.simplefilter("always")
        for text in LIBRARY_WARNINGS:
            warnings.filterwarnings("ignore", text)
        function()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = code or 1
        os._exit(code)


def _show_warning(message: Any, category: Any, filename: str, lineno: int, *more: Any) -> None:
    """As Python does; a parent that collects warnings has put its own function there."""
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


def _wait(pid: int, limit: float) -> tuple[int, bool]:
    """Exit code of a child, and whether it had to be killed."""
    due, pause = time.monotonic() + limit, 0.002
    while time.monotonic() < due:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), False
        time.sleep(pause)
        pause = min(0.05, pause * 1.2)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), True


def _read(file: Any) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
