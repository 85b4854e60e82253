"""A run is disturbed at one file operation, killed or refused by its disk: what is left?"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from benchmarks.reliability.ended import Ended, in_fork
from benchmarks.reliability.folder import OTHER, iterations, names, part_of, whole_entries
from benchmarks.reliability.operations import Action, Operations
from benchmarks.reliability.report import Report, said
from benchmarks.reliability.small_run import FRAMES, RUN, WORDS, klrl, stand_in

#: Iterations, each with a checkpoint, before the one that is disturbed.
BEFORE = 3
#: Exit codes that are right where the disk refuses, if not 0 or 1: a picture stops no run, and one
#: that could not begin was refused.
_CODES = {"curves": [0], "settings": [0, 1, 2], "manifest": [0, 1, 2], OTHER: [0, 1, 2]}


def kill(name: str) -> None:
    """End this process as SIGKILL does, with nothing flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(number: int, name: str) -> None:
    """Fail as the system does."""
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


def _is_below(path: Path, folder: Path) -> bool:
    return path.is_relative_to(folder) and path != folder


class Bench:
    """A run as it was before the fault, and how it goes on."""

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
            Figure.savefig = stand_in
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
        report.wrong(wrong, f"--of {part!r} --fault {name!r} --at {at}")
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
