"""Does another version of klrl compute the same? 16 small jobs of both domains, all their rows.

    python -m benchmarks.same_rows --against-tree ../before     # a checkout of the version before

All numbers of metrics.jsonl must be equal, times left out, and what --ignore names: with "--ignore
eval/" a row that holds an evaluation alone, before the first iteration, counts as none. Where they
are not, job, iteration and metric of the first difference are told, with both values, the other
version's first, and the exit code is 1. Words of jobs must be valid in both versions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from benchmarks.results import ROOT, environment
from benchmarks.rounds import last_words
from benchmarks.small_jobs import FILES, JOBS, MODEL, SLOW_JOBS, Job
from klrl.language.data.sort_digits import BASE_MODEL
from klrl.report.diff import differences

Row = dict[str, float]
Rows = dict[str, list[Row]]

TIMEOUT = 600
TIMES = "time/"
#: The id of a row's run.
RUN = "run"


# ---------------------------------------------------------------------------------------- running


def run_jobs(jobs: Sequence[Job], tree: Path, work: Path, at_once: int) -> Rows:
    """Rows by job, times left out, of all jobs with a checkout's klrl.

    ``work`` is empty; the cache is in it, so that two versions share none.
    """
    if not (tree / "klrl" / "__init__.py").is_file():
        raise SystemExit(f"{tree}: no klrl/ in it; give a checkout")
    for name, text in FILES.items():
        (work / name).write_text(text)
    (work / MODEL).symlink_to(BASE_MODEL)
    started: dict[str, Future[list[Row]]] = {}

    def run(job: Job) -> list[Row]:
        for name in job.after:
            started[name].result()
        return run_job(job, tree, work)

    with ThreadPoolExecutor(at_once) as pool:
        for job in jobs:
            started[job.name] = pool.submit(run, job)
        try:
            return {name: future.result() for name, future in started.items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def run_job(job: Job, tree: Path, work: Path) -> list[Row]:
    """Its rows, once it finished."""
    begun = time.perf_counter()
    fixed = {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(work / "cache")}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "klrl", *job.command],
            capture_output=True,
            text=True,
            cwd=work,
            env={**environment(), **fixed},
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{job.name}: not done in {TIMEOUT} s") from error
    if done.returncode:
        raise SystemExit(f"{job.name}: {last_words(done.stderr)} ({' '.join(job.command)})")
    rows = read_rows(work / job.folder / "metrics.jsonl")
    seconds = time.perf_counter() - begun
    print(f"  {job.name}: {len(rows)} rows, {seconds:.1f} s", flush=True)
    return rows


def read_rows(path: Path) -> list[Row]:
    """Lines of a metrics.jsonl without their times."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [timeless(json.loads(line)) for line in lines]


def timeless(row: Row) -> Row:
    return {key: value for key, value in row.items() if not key.startswith((TIMES, RUN))}


# -------------------------------------------------------------------------------------- comparing


def compare(recorded: Rows, found: Rows, first: int) -> bool:
    """Tell the first differences of each job, as ``klrl diff --bits``; whether there are none."""
    different = 0
    for name in recorded:
        told = list(differences(recorded[name], found[name]))
        different += bool(told)
        for difference in told[:first]:
            print(f"{name}, {difference}")
        if len(told) > first:
            print(f"{name}: {len(told) - first} more")
    count = sum(len(rows) for rows in recorded.values())
    verdict = f"{different} of {len(recorded)} jobs differ" if different else "equal"
    print(f"{count} rows of {len(recorded)} jobs: {verdict}")
    return not different


def ignoring(rows: Rows, prefixes: Sequence[str]) -> Rows:
    """Rows less the metrics that begin so; where nothing but its place is left, less the row."""
    if not prefixes:
        return rows
    kept = {
        name: [{k: v for k, v in row.items() if not k.startswith(tuple(prefixes))} for row in lines]
        for name, lines in rows.items()
    }
    places = {"iteration", "frames", "samples"}
    return {name: [row for row in lines if row.keys() - places] for name, lines in kept.items()}


# -------------------------------------------------------------------------------------------- main


def main() -> None:
    args = _parse()
    jobs = (*JOBS, *SLOW_JOBS) if args.slow else JOBS
    if args.only:
        jobs = picked(jobs, args.only)
    before, now = (_run(jobs, tree, args.at_once) for tree in (args.against_tree, args.tree))
    before, now = (ignoring(each, args.ignore) for each in (before, now))
    sys.exit(0 if compare(before, now, args.first) else 1)


def picked(jobs: Sequence[Job], names: Sequence[str]) -> tuple[Job, ...]:
    """The jobs of these names, and those whose folders they read."""
    wanted, known = list(names), {job.name: job for job in jobs}
    for name in wanted:
        if name not in known:
            raise SystemExit(f"--only {name}: choose among {', '.join(known)}")
        wanted += known[name].after
    return tuple(job for job in jobs if job.name in wanted)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--against-tree", type=Path, required=True, help="a checkout to compare with"
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument(
        "--ignore", nargs="+", default=[], metavar="PREFIX", help="metrics, as eval/"
    )
    parser.add_argument("--first", type=int, default=1, help="differences told per job (default 1)")
    parser.add_argument("--only", nargs="+", metavar="JOB", help="these jobs, and what they need")
    parser.add_argument("--slow", action="store_true", help="with a compiled job")
    parser.add_argument("--at-once", type=int, default=2, help="jobs at a time (default 2)")
    return parser.parse_args()


def _run(jobs: Sequence[Job], tree: Path, at_once: int) -> Rows:
    begun = time.perf_counter()
    print(f"{len(jobs)} jobs with {tree}", flush=True)
    with tempfile.TemporaryDirectory() as work:
        told = run_jobs(jobs, tree.resolve(), Path(work), at_once)
    print(f"  all: {time.perf_counter() - begun:.0f} s", flush=True)
    return told


if __name__ == "__main__":
    main()
