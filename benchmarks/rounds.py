"""Contenders as processes of their own, in turn: each prints one line of JSON last.

A line holds the load when its contender began, and is marked if that is above the number of cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, environment

TIMEOUT = 900
CORES = len(os.sched_getaffinity(0))
Line = dict[str, Any]
Told = Line | str  # a line, or the error in its place


class Failed(RuntimeError):
    """A contender ended without its line; the message is the last thing that it said."""


def run_line(command: Sequence[str], tree: Path = ROOT) -> Line:
    """The line of JSON that a contender of a checkout prints last."""
    try:
        # In a folder of its own: MuJoCo leaves its log wherever it runs.
        with tempfile.TemporaryDirectory() as folder:
            env = {**environment(), "PYTHONPATH": str(tree.resolve())}
            how = {"cwd": folder, "env": env, "timeout": TIMEOUT}
            done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"not done in {TIMEOUT} s") from error
    if done.returncode:
        raise Failed(last_words(done.stderr))
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError) as error:
        raise Failed(last_words(done.stdout)) from error


def last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "ended without a word"


def frames_per_cpu_second(line: Line) -> str:
    return f"{line['frames_per_cpu_second']:,.0f} frames per CPU-second"


def rounds(
    tasks: dict[str, Callable[[int], Line]],
    count: int,
    tell: Callable[[Line], str] = frames_per_cpu_second,
) -> dict[str, list[Told]]:
    """Run all tasks in turn, ``count`` times; one that failed is not tried again.

    Each is called with the number of its round, from 0; ``tell`` says its line in words.
    """
    found: dict[str, list[Told]] = {name: [] for name in tasks}
    for number in range(count):
        for name, task in tasks.items():
            if error_in(found[name]):
                continue
            load = round(os.getloadavg()[0], 1)
            try:
                line = {**task(number), "load": load}
                said = tell(line) + f" (LOADED: {load} on {CORES} cores)" * (load > CORES)
                found[name].append(line)
            except Failed as error:
                said = f"failed: {error}"
                found[name].append(str(error))
            print(f"  round {number + 1}: {name}: {said}", flush=True)
    return found


def error_in(told: Sequence[Told]) -> str | None:
    return next((line for line in told if isinstance(line, str)), None)


def complete(told: Sequence[Told], count: int) -> bool:
    return len(told) == count and error_in(told) is None


def loads(found: dict[str, list[Told]]) -> list[float]:
    """Least and greatest load at which a contender began, and the number of cores."""
    at = [line["load"] for told in found.values() for line in told if not isinstance(line, str)]
    return [min(at), max(at), CORES] if at else []


def spread(values: Sequence[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {key: round(float(value), 3) for key, value in found.items()}


def median_phases(lines: Sequence[Line]) -> dict[str, float]:
    rows = [line.get("phases", {}) for line in lines]
    return {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
