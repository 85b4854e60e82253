"""A run whose disk fails, whose process is killed, or whose files lie: what is kept?

    make faults
    python -m benchmarks.reliability.faults --of save --fault kill     # some of it
    python -m benchmarks.reliability.faults --of bits
    python -m benchmarks.reliability.faults --of save --fault EIO --at 17    # one, and all it says

A small run is resumed for one iteration; at each of its file operations, one after the other, the
process is killed or the disk refuses. Then it is resumed without a fault. Right is: the last
good checkpoint is kept, no traceback, no hang, at most one line, all rows there, nothing left
behind. Then a bit of each file of the run is flipped, and every command reads it. Exit code 1 where
anything is wrong.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.reliability.ended import Ended, in_fork
from benchmarks.reliability.operations import Action, Operations

RUN = Path("run")
#: Three iterations of a second's run, each with a checkpoint; the third fault falls into the next.
WORDS = (
    *("env=pendulum", "env.num_envs=2", "env.normalize_observation=true", "collector.steps=32"),
    *("learner.minibatches=2", "learner.epochs=1", "learner.compile=false", "actor.hidden=[8]"),
    *("optim.lr_floor=0", "checkpoint.every=1", "eval.every=1", "eval.episodes=1"),
    *("device=cpu", "logger=none"),
)
FRAMES, BEFORE = 64, 3

#: What is written -> whether a path, within the run folder, belongs to it.
PARTS: dict[str, Callable[[Path], bool]] = {
    "save": lambda path: path.parts[0] == "checkpoints",
    "metrics": lambda path: path.name.lstrip(".").startswith("metrics."),
    "manifest": lambda path: len(path.parts) == 1 and path.name.lstrip(".").startswith("manifest."),
    "curves": lambda path: path.name.lstrip(".").startswith("curves."),
    "settings": lambda path: path.parts[0].startswith(".hydra"),
}
OTHER = "other files"
#: Exit codes that are right where the disk refuses, if not 0 or 1: a picture stops no run, and one
#: that could not begin was refused.
_CODES = {"curves": [0], "settings": [0, 1, 2], "manifest": [0, 1, 2], OTHER: [0, 1, 2]}


def part_of(path: Path) -> str:
    """The part of the run folder that a path within it belongs to."""
    return next((name for name, holds in PARTS.items() if holds(path)), OTHER)


# ------------------------------------------------------------------------------------- the faults


def kill(name: str) -> None:
    """End this process as SIGKILL does, with nothing flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(number: int, name: str) -> None:
    """Fail as the system does.

    Raises:
        OSError: always.
    """
    raise OSError(number, os.strerror(number))


@dataclass(frozen=True)
class Fault:
    """What happens at a file operation, and whether it goes on happening."""

    action: Callable[[str], None]
    stays: bool = False


FAULTS = {
    "kill": Fault(kill),
    "ENOSPC": Fault(partial(refuse, errno.ENOSPC)),
    "disk full": Fault(partial(refuse, errno.ENOSPC), stays=True),
    "EIO": Fault(partial(refuse, errno.EIO)),
    "EACCES": Fault(partial(refuse, errno.EACCES)),
}


# ------------------------------------------------------------------------------------ what is seen


@dataclass
class Line:
    """A line of the table.

    Attributes:
        fault: what was done, and to what.
        places: how many places were tried.
        ended: how the command ended -> in how many places.
        kept: what was kept -> in how many places.
    """

    fault: str
    places: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)

    def cells(self) -> tuple[str, ...]:
        return (self.fault, str(self.places), _counted(self.ended), _counted(self.kept))


def _counted(texts: Counter[str]) -> str:
    return "; ".join(f"{count}x {text}" for text, count in texts.most_common())


@dataclass
class Report:
    """The table, and what was wrong with the command that does it again."""

    lines: dict[str, Line] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def line(self, fault: str) -> Line:
        return self.lines.setdefault(fault, Line(fault))

    def wrong(self, faults: Iterable[str], again: str) -> None:
        self.violations += [f"{fault}\n    {again}" for fault in faults]


def klrl(words: Sequence[str], work: Path, operations: Operations | None = None) -> Ended:
    """A command of klrl in a fork.

    Args:
        words: its command line.
        work: the working folder.
        operations: counts its file operations.
    """
    from matplotlib.figure import Figure

    from klrl.cli.main import main

    def go() -> None:
        Figure.savefig = _stand_in
        if operations is not None:
            operations.install()
        main(words)

    return in_fork(go, work)


def _stand_in(figure: Any, path: Path, **options: Any) -> None:
    """Write a file for ``curves.png`` without drawing it, which would be half of all the time."""
    with path.open("wb") as file:
        for piece in (b"\x89PNG", b"in", b"place"):
            file.write(piece)


def said(ended: Ended) -> str:
    """The first words of what it said on stderr, without the run's own numbers."""
    return ended.lines[-1].replace("klrl: ", "", 1)[:90] if ended.lines else ""


def _is_below(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder) and path != folder


def whole_entries(run: Path) -> list[int]:
    """The frames of the entries of ``last`` that every file of which is as it was written."""
    from klrl.runs.entry import DamagedEntry, Entry

    frames = []
    for path in (run / "checkpoints" / "last").glob("frames-*"):
        try:
            entry = Entry(path)
            entry.check()
        except DamagedEntry:
            continue
        frames.append(entry.frames)
    return sorted(frames)


def iterations(run: Path) -> list[int]:
    """Of the rows of ``metrics.jsonl``, each line of which must be one."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["iteration"] for line in lines]


def names(run: Path) -> set[str]:
    """Everything in a run folder; which evaluation was the best depends on where it went on."""
    listed = (str(path.relative_to(run)) for path in run.rglob("*"))
    return {re.sub(r"best/frames-\d+", "best/frames", name) for name in listed}


def snapshot(folder: Path) -> dict[str, bytes]:
    """Name -> content of every file."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ------------------------------------------------------------------------------- file operations


class Bench:
    """A run as it was before the fault, and how it goes on.

    Args:
        work: an empty folder.
    """

    def __init__(self, work: Path) -> None:
        self.work, self.run, self._before = work, work / RUN, work / "before"
        begun = klrl([*WORDS, f"frames={BEFORE * FRAMES}", f"hydra.run.dir={RUN}"], work)
        if begun.code:
            raise SystemExit(f"the run to be disturbed fails: {begun.err}")
        shutil.copytree(self.run, self._before)
        self.operations = self._operations()
        self.resume()
        self._names = names(self.run)

    def start_anew(self) -> None:
        """The run as it was before."""
        shutil.rmtree(self.run)
        shutil.copytree(self._before, self.run)

    def resume(self, more: int = 2) -> Ended:
        """Go on to that many iterations more than before."""
        return klrl([f"resume={RUN}", f"frames={(BEFORE + more) * FRAMES}"], self.work)

    def disturbed(self, at: int, fault: Fault) -> Ended:
        """Resume for one iteration, with a fault at a file operation."""
        return klrl(self._one_more, self.work, self._counting(at, fault.action, fault.stays))

    _one_more = (f"resume={RUN}", f"frames={(BEFORE + 1) * FRAMES}")

    def _counting(self, at: int, action: Action, stays: bool = False) -> Operations:
        within = partial(_is_below, folder=self.run)
        return Operations(at, action, within, stays=stays)

    def _operations(self) -> list[tuple[str, str]]:
        """Part and name of each file operation of one iteration."""
        from matplotlib.figure import Figure

        from klrl.cli.main import main

        listed = self.work / "operations.json"

        def go() -> None:
            operations = self._counting(-1, kill)
            operations.install()
            Figure.savefig = _stand_in
            try:
                main(self._one_more)
            finally:
                log = [(part_of(path.relative_to(self.run)), name) for name, path in operations.log]
                listed.write_text(json.dumps(log))

        ended = in_fork(go, self.work)
        if ended.code:
            raise SystemExit(f"one more iteration fails: {ended.err}")
        return [(part, name) for part, name in json.loads(listed.read_text())]

    # ------------------------------------------------------------------------------ one place

    def places(self, part: str) -> list[int]:
        """The file operations of a part; of many writes in a row the first and the last ones."""
        listed = []
        grouped = groupby(enumerate(self.operations), lambda each: (each[1][0], each[1][1][-5:]))
        for (of, _), run in grouped:
            numbers = [number for number, _ in run]
            if of == part:
                listed += numbers if len(numbers) <= 6 else numbers[:4] + numbers[-2:]
        return listed

    def place(self, at: int, name: str, report: Report) -> Ended:
        """Disturb one file operation, and say what came of it."""
        part, operation = self.operations[at]
        fault = FAULTS[name]
        self.start_anew()
        ended = self.disturbed(at, fault)
        codes = [-signal.SIGKILL] if name == "kill" else _CODES.get(part, [0, 1])
        wrong = [f"{name} at {operation} of {part}: {each}" for each in ended.faults(codes)]
        entries = whole_entries(self.run)
        kept = f"checkpoint {max(entries)}" if entries else "no checkpoint"
        if not entries or max(entries) < BEFORE * FRAMES:
            wrong.append(f"{name} at {operation} of {part}: the last good checkpoint is lost")
        status = self._status()
        wrong += [f"{name} at {operation} of {part}, then resume: {each}" for each in self._after()]
        line = report.line(f"{name}, {part}")
        line.places += 1
        line.ended[f"exit {ended.code}, {status}, {said(ended) or 'no word'}"] += 1
        line.kept[kept if not wrong else f"{kept}, WRONG"] += 1
        report.wrong(wrong, _again(f"--of {part!r} --fault {name!r} --at {at}"))
        return ended

    def _status(self) -> str:
        from klrl.runs.folder import BrokenRun, RunFolder

        try:
            return RunFolder(self.run).status
        except (BrokenRun, OSError) as error:
            return f"no status ({error})"

    def _after(self) -> Iterator[str]:
        """What is wrong with the run once it was resumed without a fault."""
        resumed = self.resume()
        yield from resumed.faults([0])
        if resumed.code:
            return
        recorded = iterations(self.run)
        if recorded != list(range(1, BEFORE + 3)):
            yield f"rows of iterations {recorded}"
        left, missing = names(self.run) - self._names, self._names - names(self.run)
        if left:
            yield f"left behind: {', '.join(sorted(left)[:3])}"
        if missing:
            yield f"missing: {', '.join(sorted(missing)[:3])}"


def try_operations(
    bench: Bench, parts: Sequence[str], faults: Sequence[str], every: int, report: Report
) -> None:
    """Every n-th file operation of some parts, with each fault."""
    for name in faults:
        for part in parts:
            for at in bench.places(part)[::every]:
                bench.place(at, name, report)


# --------------------------------------------------------------------------------- flipped bits

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
    shutil.copytree(bench.run, bench.work / "other", dirs_exist_ok=True)
    listed = sorted(path for path in bench.run.rglob("*") if path.is_file() and path.stat().st_size)
    for seed in seeds:
        for path in listed:
            if files in str(path.relative_to(bench.run)):
                _flipped(bench, path, seed, report)


def _flipped(bench: Bench, path: Path, seed: int, report: Report) -> None:
    name = str(path.relative_to(bench.run))
    bench.start_anew()
    place = flip(path, seed)
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
    lost = _lost_rows(bench.run, BEFORE if ended.code else BEFORE + 2)
    if lost:
        wrong.append(f"resume, bit {place} of {name}: {lost} rows are lost")
    line.kept[said(ended) or f"{len(_readable_rows(bench.run))} rows"] += 1
    report.wrong(wrong, _again(f"--of bits --file {name!r} --seed {seed}"))


def _readable_rows(run: Path) -> list[int]:
    """The iterations of those lines of ``metrics.jsonl`` that are rows."""
    recorded = []
    for line in (run / "metrics.jsonl").read_bytes().split(b"\n"):
        try:
            recorded.append(json.loads(line)["iteration"])
        except (ValueError, KeyError, TypeError):
            continue
    return recorded


def _lost_rows(run: Path, expected: int) -> int:
    """Rows that are gone, beyond the one whose bit was flipped."""
    return max(0, expected - 1 - len(_readable_rows(run)))


# --------------------------------------------------------------------------------------- the rest


def _again(words: str) -> str:
    return f"python -m benchmarks.reliability.faults {words}"


def import_all() -> None:
    """What the commands import, so that each fork need not."""
    import torch

    import klrl.cli.diff
    import klrl.cli.evaluate
    import klrl.cli.ls
    import klrl.cli.report
    import klrl.cli.run
    import klrl.control.parts
    import klrl.domains
    import klrl.report.diff
    import klrl.report.write
    import klrl.runs.curves
    import klrl.runs.resume
    import klrl.train.evaluate
    import klrl.train.loop

    torch.set_num_threads(1)
    klrl.runs.curves.curves_figure([], "", klrl.domains.CONTROL)  # imports matplotlib


def show(report: Report) -> None:
    """Print the table and every violation."""
    from klrl.base.text import text_table

    head = ("fault", "places", "what happened", "what was kept")
    print(text_table([head, *(line.cells() for line in report.lines.values())], right=(1,)))
    for violation in report.violations:
        print(f"WRONG: {violation}")
    tried = sum(line.places for line in report.lines.values())
    print(f"{tried} places, {len(report.violations)} violations")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    import_all()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder).resolve())
        if args.at is not None:
            (fault,) = args.fault
            ended = bench.place(args.at, fault, report)
            print(ended.out, ended.err, sep="", end="")
        else:
            parts = sorted({part for part, _ in bench.operations}) if "all" in args.of else args.of
            parts = [part for part in parts if part != "bits"]
            try_operations(bench, parts, args.fault or list(FAULTS), args.every, report)
        if args.at is None and {"all", "bits"} & set(args.of):
            seeds = range(args.bits) if args.seed is None else [args.seed]
            flip_bits(bench, seeds, report, args.file)
    show(report)
    return 1 if report.violations else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    of = ("all", *PARTS, OTHER, "bits")
    add("--of", nargs="+", choices=of, default=["all"], help="what is disturbed")
    add("--fault", nargs="+", choices=FAULTS, default=[], help="default: all")
    add("--every", type=int, default=1, help="every n-th file operation")
    add("--at", type=int, help="one file operation, with one --fault")
    add("--bits", type=int, default=1, help="bits per file, one after the other")
    add("--seed", type=int, help="one of these bits")
    add("--file", default="", help="only files whose name holds this")
    return parser


if __name__ == "__main__":
    sys.exit(main())
