"""A long run, and many short ones in one process: do memory, files and threads stay flat?

    make soak
    python -m benchmarks.reliability.soak --frames 100000 --runs 20

First one run of pendulum in a process of its own, watched from inside after each iteration; then
many short runs of :func:`klrl.run` in one process, control and some language, watched after each.
Of resident memory, open files, threads and files left in the temporary folder the median of the
first fifth (after a warm-up) and of the last must agree within the tolerance. Exit code 1 where one
does not.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.reliability.small_run import TEXT, make_model, text_files
from benchmarks.results import environment
from benchmarks.small_jobs import CONTROL, LANGUAGE

#: Quantity -> most that its median may grow from the first fifth to the last.
#: MB of memory: an allocator keeps some of what is freed, but not more of it each time.
GROWTH = {"memory MB": 24.0, "files": 0.0, "threads": 0.0, "temporary files": 0.0}
#: The same as a share of the first median, for short soaks.
SHARE = 0.04
#: Share of the samples that come before it counts: imports, caches, the first pictures.
WARM_UP = 0.2

Sample = dict[str, float]


def sample() -> Sample:
    """What this process holds now."""
    status = Path("/proc/self/status").read_text()
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    # Counting them opens one.
    files = len(list(Path("/proc/self/fd").iterdir())) - 1
    return {
        "memory MB": int(values["VmRSS"].split()[0]) / 1024,
        "files": float(files),
        "threads": float(values["Threads"]),
        "temporary files": float(len(list(Path(tempfile.gettempdir()).iterdir()))),
    }


@dataclass(frozen=True)
class Trend:
    """How a quantity went."""

    name: str  # of the quantity
    first: float  # median of the first fifth after the warm-up
    last: float  # median of the last fifth
    most: float  # growth that is allowed

    @property
    def flat(self) -> bool:
        """Whether it grew by no more than it may."""
        return self.last - self.first <= self.most


def trend(name: str, values: Sequence[float]) -> Trend:
    """The trend of a quantity; ``values`` has at least five samples."""
    kept = values[int(WARM_UP * len(values)) :]
    fifth = max(1, len(kept) // 5)
    first, last = median(kept[:fifth]), median(kept[-fifth:])
    most = max(GROWTH[name], SHARE * first) if name == "memory MB" else GROWTH[name]
    return Trend(name, first, last, most)


# --------------------------------------------------------------------------------- the two soaks

_PENDULUM = "env=pendulum device=cpu logger=none eval.every=20 checkpoint.every=5"
#: Every so many runs one is of language.
LANGUAGE_EVERY = 10
_SHORT = (
    "env=pendulum",
    "env=cartpole loss=clip kl=legacy reference=ema reference.decay=0.8",
    "env=pendulum collector=torchrl actor=tanh_normal controller=dual",
)


def one_run(frames: int) -> list[Sample]:
    """One long run of pendulum in this process; a sample for each iteration."""
    import klrl
    from klrl.train.callbacks import Callback

    samples: list[Sample] = []

    class Watch(Callback):
        def iterated(self, training: Any, row: Any, batch: Any) -> None:
            samples.append(sample())

    words = _PENDULUM.split()
    klrl.run(*words, f"frames={frames}", folder="long", callbacks=[Watch()])
    return samples


def many_runs(count: int) -> list[Sample]:
    """Short runs one after the other in this process; a sample after each."""
    import klrl

    text_files(Path())
    make_model(Path("model"))
    language = f"{TEXT} kl.placement=split kl.estimator=exact {LANGUAGE}"
    control = [f"{words} {CONTROL}" for words in _SHORT]
    samples = []
    # One of each kind first: what they import stays.
    for number in range(-len(_SHORT) - 1, count):
        of_language = number % LANGUAGE_EVERY == LANGUAGE_EVERY - 1
        words = language if of_language else control[number % len(control)]
        klrl.run(*words.split(), f"seed={abs(number)}", folder=f"runs/{number}")
        gc.collect()  # what waits for the collector is no leak
        if number >= 0:
            samples.append(sample())
    return samples


_SOAKS: dict[str, Callable[[int], list[Sample]]] = {"one run": one_run, "many runs": many_runs}


def soak(name: str, size: int) -> list[Trend]:
    """One of the soaks in a process of its own, with its own folder for temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        (work / "tmp").mkdir()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.reliability.soak", "--inside", name, str(size)],
            cwd=work,
            env={**environment(), "TMPDIR": str(work / "tmp"), "XDG_CACHE_HOME": str(work / "c")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{name} of {size}: {done.stderr[-2000:]}")
        samples = json.loads((work / "samples.json").read_text())
    return [trend(name, [sample[name] for sample in samples]) for name in GROWTH]


def show(name: str, size: int, trends: Sequence[Trend]) -> bool:
    """Print the trends; whether all are flat."""
    print(f"{name}, {size:,}:")
    for t in trends:
        said = "flat" if t.flat else f"GROWS by more than {t.most:.2f}"
        print(f"  {t.name}: {t.first:.2f} -> {t.last:.2f}, {said}", flush=True)
    return all(t.flat for t in trends)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--frames", type=int, default=3_000_000, help="of the one run; 0: none")
    add("--runs", type=int, default=200, help="short runs in one process; 0: none")
    add("--inside", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside:
        name, size = args.inside
        samples = _SOAKS[name](int(size))
        Path("samples.json").write_text(json.dumps(samples))
        return 0
    sizes = {"one run": args.frames, "many runs": args.runs}
    flat = [show(name, size, soak(name, size)) for name, size in sizes.items() if size]
    return 0 if all(flat) else 1


if __name__ == "__main__":
    sys.exit(main())
