"""Is a run that was killed, and resumed, equal to the bit to one that never was?

    make kills
    python -m benchmarks.reliability.kills                      # 50 kills over the small jobs
    python -m benchmarks.reliability.kills --kills 15 --only main clip held
    python -m benchmarks.reliability.kills --slow               # with a compiled job

Each job runs once undisturbed. Then it is started anew and gets SIGKILL at a random moment after
its first checkpoint; it is resumed, and one in three is killed once more. All rows, times aside,
and the parameters of the last checkpoint must be those of the undisturbed run. Exit code 1 where
one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reliability.ended import Ended
from benchmarks.reliability.small_run import begin, import_all, klrl, text_files
from benchmarks.small_jobs import JOBS, MODEL, SLOW_JOBS, Job
from klrl.language.data.sort_digits import BASE_MODEL

#: Seconds for a run: one compiles.
_LIMIT = 600.0
#: As many times the frames of the small jobs, and a checkpoint in every iteration.
LONGER = 4


def jobs_of(slow: bool) -> list[Job]:
    """All with an exact resume that are not resumed themselves; those that others need first."""
    every = [*JOBS, *(SLOW_JOBS if slow else ())]
    left_out = ("resume=", "collector=torchrl")
    return [_longer(job) for job in every if not any(word in job.words for word in left_out)]


def _longer(job: Job) -> Job:
    frames = re.sub(r"\bframes=(\d+)", lambda match: f"frames={LONGER * int(match[1])}", job.words)
    words = frames.replace("checkpoint.every=2", "checkpoint.every=1 eval.final=2")
    return Job(job.name, words, job.after)


def killed(words: Sequence[str], work: Path, run: Path, rows: int, share: float) -> bool:
    """Start or resume a run, and kill it after a share of the rows that are still to come.

    Whether it was killed; else it was done before.
    """
    pid = begin(words, work)
    begun = _rows(run)
    due, last = begun + share * (rows - begun), (begun, time.monotonic(), 0.0)
    while not os.waitpid(pid, os.WNOHANG)[0]:
        now, entries = _rows(run), list((run / "checkpoints" / "last").glob("frames-*"))
        if now != last[0]:
            last = (now, time.monotonic(), (time.monotonic() - last[1]) / (now - last[0]))
        since = time.monotonic() - last[1]
        if entries and now >= int(due) and since >= (due - int(due)) * last[2]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return True
        time.sleep(0.001)
    return False


def _rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def disturbed(job: Job, number: int, work: Path, chance: random.Random) -> tuple[str, int]:
    """Kill a run of the job, resume it to its end, compare: what differs, and how often killed."""
    from klrl.report.diff import compare_bits

    run = Path(f"killed/{job.name}-{number}")
    words = [word.replace(str(job.folder), str(run)) for word in job.command[-1:]]
    rows = _rows(work / job.folder)
    kills = int(killed([*job.command[:-1], *words], work, work / run, rows, chance.random()))
    if chance.random() < 1 / 3:
        kills += killed([f"resume={run}"], work, work / run, rows, chance.random())
    _require(klrl([f"resume={run}"], work, limit=_LIMIT), job, "the resumed run")
    equal, told = compare_bits(work / job.folder, work / run)
    shutil.rmtree(work / run)
    return ("" if equal else told), kills


def _require(ended: Ended, job: Job, what: str) -> None:
    if ended.code:
        raise SystemExit(f"{job.name}: {what} fails: {ended.err[-2000:]} ({' '.join(job.command)})")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    jobs = jobs_of(args.slow)
    names = [job.name for job in jobs]
    if unknown := [name for name in args.only if name not in names]:
        raise SystemExit(f"--only {unknown[0]}: choose among {', '.join(names)}")
    wanted = [job for job in jobs if not args.only or job.name in args.only]
    needed = {name for job in wanted for name in job.after}
    import_all()
    counted: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        os.environ["XDG_CACHE_HOME"] = str(work / "cache")
        text_files(work)
        (work / MODEL).symlink_to(BASE_MODEL)
        for job in jobs:
            if job in wanted or job.name in needed:
                ended = klrl(job.command, work, limit=_LIMIT)
                _require(ended, job, "the undisturbed run")
                tier = json.loads((work / job.folder / "manifest.json").read_text()).get("resume")
                print(f"{job.name}: {ended.seconds:.1f} s undisturbed, resume: {tier}", flush=True)
        begun, number = time.monotonic(), 0
        while sum(counted.values()) < args.kills:
            job = wanted[number % len(wanted)]
            chance = random.Random(f"{args.seed} {job.name} {number}")
            difference, kills = disturbed(job, number, work, chance)
            counted[job.name] += kills
            number += 1
            if difference:
                wrong.append(f"{job.name}, number {number}: {difference}")
                print(f"WRONG: {wrong[-1]}", flush=True)
    told = ", ".join(f"{name} {count}" for name, count in counted.items())
    print(f"{sum(counted.values())} kills in {time.monotonic() - begun:.0f} s ({told})")
    print(f"{number - len(wrong)} of {number} runs are equal to the bit to undisturbed ones")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--kills", type=int, default=50, help="at least so many in all")
    add("--only", nargs="+", default=[], metavar="JOB", help="these jobs")
    add("--seed", type=int, default=0, help="of the moments")
    add("--slow", action="store_true", help="with a compiled job")
    return parser


if __name__ == "__main__":
    sys.exit(main())
