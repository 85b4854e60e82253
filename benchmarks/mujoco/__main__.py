"""``python -m benchmarks.mujoco``: run what is missing of the page, part by part, then write it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.mujoco import search, second
from benchmarks.mujoco.cells import run_cells
from benchmarks.mujoco.page import write_page
from benchmarks.mujoco.runs import SEEDS, cells_of, lines_of
from benchmarks.shipped.page import write_index

SECOND = "second"
PARTS = (*SEEDS, SECOND)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mujoco", description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--draw", action="store_true", help="no runs; write from those there are")
    args = parser.parse_args(argv)
    for setting in args.settings:
        if setting not in PARTS:
            parser.error(f"{setting}: choose {', '.join(PARTS)}")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: give 1 or more")
    failed = []
    for setting in () if args.draw else args.settings or PARTS:
        if setting == SECOND:
            failed += search.run(args.jobs) or run_cells(second.cells(), second.lines(), args.jobs)
        else:
            failed += run_cells(cells_of(setting), lines_of(setting), args.jobs)
        write_page()
    if args.draw:
        write_page()
    write_index()
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
