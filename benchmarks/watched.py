"""A run through the command line, watched from outside while it goes on. Needs /proc: Linux."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.results import environment


def watch(words: Sequence[str], look: Callable[[int, Path], None], every: float) -> None:
    """Run klrl in a folder of its own; ``look(pid, run folder)`` every so many seconds.

    Raises:
        SystemExit: the run failed; the message is the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        run = Path(folder, "run")
        process = subprocess.Popen(
            [sys.executable, "-m", "klrl", *words, f"hydra.run.dir={run}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment(),
        )
        try:
            while process.poll() is None:
                look(process.pid, run)
                time.sleep(every)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(words)}: {output.read()[-2000:]}")


def status_mb(pid: int, field: str) -> float | None:
    """``VmRSS`` (resident size) or ``VmHWM`` (its peak) of a process; None where it has ended.

    Not getrusage: its ru_maxrss of a child begins with what the parent held.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    size = [line.split()[1] for line in status.splitlines() if line.startswith(field)]
    return int(size[0]) / 1024 if size else None
