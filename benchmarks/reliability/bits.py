"""A bit of each file of a run is flipped, and every command reads it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

from benchmarks.reliability.folder import readable_rows, snapshot
from benchmarks.reliability.places import BEFORE, Bench
from benchmarks.reliability.report import Report, said
from benchmarks.reliability.small_run import RUN, klrl

#: How each command reads a run folder; ``other`` is a whole run beside it.
COMMANDS: dict[str, tuple[str, ...]] = {
    "evaluate": ("evaluate", str(RUN), "--episodes", "1"),
    "ls": ("ls", "."),
    "report": ("report", str(RUN), "other", "-o", "report"),
    "diff": ("diff", str(RUN), "other"),
}


def flip(path: Path, seed: int) -> int:
    """Flip one bit of a file; which one."""
    content = bytearray(path.read_bytes())
    place = random.Random(f"{path.name} {len(content)} {seed}").randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)
    return place


def flip_bits(bench: Bench, seeds: Iterable[int], report: Report, files: str = "") -> None:
    """A bit of each file, then every command that reads a run."""
    bench.start_anew()
    another_run(bench.run, bench.work / "other")
    listed = sorted(path for path in bench.run.rglob("*") if path.is_file() and path.stat().st_size)
    for seed in seeds:
        for path in listed:
            if files in str(path.relative_to(bench.run)):
                _flipped(bench, path, seed, report)


def another_run(run: Path, copy: Path) -> None:
    """Copy a run as one of its own, with an id of its own in all but its checkpoints."""
    shutil.copytree(run, copy, dirs_exist_ok=True)
    own = json.loads((run / "manifest.json").read_bytes())["id"].encode()
    for path in (*copy.glob("*.json*"), *copy.glob(".hydra/*")):
        path.write_bytes(path.read_bytes().replace(own, own[::-1]))


def _flipped(bench: Bench, path: Path, seed: int, report: Report) -> None:
    name = str(path.relative_to(bench.run))
    bench.start_anew()
    whole = path.read_bytes()
    place = flip(path, seed)
    touched = rows_touched(whole, place)
    damaged = snapshot(bench.run)
    line = report.line(f"bit of {name}")
    line.places += 1
    wrong = []
    for command, words in COMMANDS.items():
        ended = klrl(words, bench.work)
        wrong += [f"{command}, bit {place} of {name}: {each}" for each in ended.faults([0, 2])]
        line.ended[f"{command} {ended.code}"] += 1
    shutil.rmtree(bench.work / "report", ignore_errors=True)
    if snapshot(bench.run) != damaged:
        wrong.append(f"reading a run with bit {place} of {name} flipped changed its files")
    ended = bench.resume()
    wrong += [f"resume, bit {place} of {name}: {each}" for each in ended.faults([0, 2])]
    line.ended[f"resume {ended.code}"] += 1
    expected = BEFORE if ended.code else BEFORE + 2
    lost = expected - touched - len(readable_rows(bench.run))
    if lost > 0:
        wrong.append(f"resume, bit {place} of {name}: {lost} rows are lost")
    line.kept[said(ended) or f"{len(readable_rows(bench.run))} rows"] += 1
    report.wrong(wrong, f"--of bits --file {name!r} --seed {seed}")


def rows_touched(content: bytes, place: int) -> int:
    """How many rows the flipped bit may cost: the end of a line parts two."""
    return 2 if content[place // 8 : place // 8 + 1] == b"\n" else 1
