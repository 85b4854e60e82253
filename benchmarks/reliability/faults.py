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
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reliability.bits import flip_bits
from benchmarks.reliability.folder import OTHER, PARTS
from benchmarks.reliability.places import FAULTS, Bench, try_operations
from benchmarks.reliability.report import Report, show
from benchmarks.reliability.small_run import import_all


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
