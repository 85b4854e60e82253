"""Does a sweep take as long as its plan says? ``python -m benchmarks.plan_accuracy [WORDS]``

Plans and then runs a sweep of pendulum, both by their command lines, and prints both times. What
else the machine does meanwhile is in the answer: run it on an idle one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import ROOT

WORDS = ("env=pendulum", "kl=legacy,retrieve", "seed=0,1,2")


def main(words: list[str]) -> None:
    given = words or [*WORDS]
    with tempfile.TemporaryDirectory() as folder:
        planned = said_by("klrl.plan", given, folder)
        expected = re.search(r"expected: (?:(\d+):)?(\d+):(\d+)", planned)
        assert expected is not None, planned
        hours, minutes, seconds = (int(part or 0) for part in expected.groups())
        plan = 3600 * hours + 60 * minutes + seconds
        started = time.perf_counter()
        said_by("klrl", given, folder)
        took = time.perf_counter() - started
    print(planned)
    print(f"planned {plan} s, took {took:.0f} s: {took / plan - 1:+.0%}")


def said_by(module: str, words: list[str], folder: str) -> str:
    """What a command printed, run in a folder; its errors go to the terminal."""
    done = subprocess.run(
        [sys.executable, "-m", module, "-m", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(ROOT).resolve())},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main(sys.argv[1:])
