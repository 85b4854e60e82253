"""Thousands of command lines and files, most of them wrong: is each answered as it should be?

    make fuzz
    python -m benchmarks.reliability.fuzz --count 300 --seed 1
    python -m benchmarks.reliability.fuzz --seed 1 --only 17       # one input, and all it says

Right is: what is valid is accepted; what is not is refused with exit code 2 and one line, which
names setting and value; no traceback, no warning, no hang, no folder left. Nothing is trained: a
job counts as accepted when its first iteration would begin. Of ten inputs nine run in forks of this
process, one in a process of its own. An input is made from the seed and its number alone. Exit code
1 where anything is wrong; each violation stands with the command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.reliability import damage, words
from benchmarks.reliability.ended import Ended, as_process, in_fork
from benchmarks.reliability.folder import names
from benchmarks.reliability.small_run import FRAMES, WORDS, klrl, make_model
from benchmarks.reliability.small_run import import_all as import_commands
from benchmarks.reliability.untrained import without_training
from benchmarks.reliability.words import Input

#: Seconds, on a machine that does other things too, and GB that a command may add to the start's.
LIMIT, MEMORY = 60.0, 6.0
#: One input in so many is a process of its own.
REAL = 10

#: Kind -> its share, and what makes it.
_MAKERS: tuple[tuple[float, Callable[[random.Random, Path], Input]], ...] = (
    (0.20, lambda r, stock: words.valid(r)),
    (0.10, lambda r, stock: words.out_of_range(r)),
    (0.06, lambda r, stock: words.misspelt(r)),
    (0.04, lambda r, stock: words.conflicting(r)),
    (0.15, lambda r, stock: words.odd_value(r)),
    (0.08, lambda r, stock: words.garbled(r)),
    (0.10, lambda r, stock: damage.prompts(r)),
    (0.09, lambda r, stock: damage.yamls(r)),
    (0.12, damage.run_folder),
    (0.06, damage.path_input),
)


def make_input(seed: int, number: int, stock: Path) -> Input:
    """Input number n of a seed."""
    r = random.Random(f"klrl {seed} {number}")
    weights, makers = zip(*_MAKERS, strict=True)
    (make,) = r.choices(makers, weights)
    return make(r, stock)


# ---------------------------------------------------------------------------------------- running


def run(given: Input, folder: Path, *, real: bool) -> Ended:
    """Give an input to klrl, in a fork or in a process of its own."""
    if real and not any("\0" in word for word in given.words):
        module = "klrl" if given.valid is False else "benchmarks.reliability.untrained"
        return as_process([sys.executable, "-m", module, *given.words], folder, LIMIT)

    def go() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = used + int(MEMORY * 1e9)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        os.environ["WANDB_MODE"] = "offline"
        without_training(given.words)

    return in_fork(go, folder, LIMIT)


def verdict(given: Input, ended: Ended, new: Sequence[str]) -> list[str]:
    """What is wrong with an answer."""
    codes = {True: [0], False: [2], None: [0, 2]}[given.valid]
    wrong = ended.faults(codes)
    if ended.code == 2 and ended.lines:
        line = ended.lines[-1]
        if not line.startswith(("klrl: ", "klrl ")):
            wrong.append(f"does not say who speaks: {line[:200]}")
        missing = [name for name in given.names if name not in line]
        if given.valid is False and missing:
            wrong.append(f"does not name {missing[0]}: {line[:200]}")
        if new:
            wrong.append(f"refused, and leaves {', '.join(new[:3])}")
    return wrong


def try_input(given: Input, folder: Path, *, real: bool) -> tuple[Ended, list[str]]:
    """Run an input in an empty folder; the answer, and what is wrong with it."""
    given.prepare(folder)
    before = names(folder)
    ended = run(given, folder, real=real)
    # An empty outputs/ is where the next run will be.
    new = sorted(names(folder) - before - {"outputs"})
    return ended, verdict(given, ended, new)


def make_stock(folder: Path) -> None:
    """A small run, as ``run`` in a folder, and a small model beside it."""
    made = klrl([*WORDS, f"frames={2 * FRAMES}", "hydra.run.dir=run"], folder)
    if made.code:
        raise SystemExit(f"the run to be read fails: {made.err}")
    built = in_fork(lambda: make_model(Path("model")), folder)
    if built.code:
        raise SystemExit(f"the model fails: {built.err}")


def import_all() -> None:
    """What the commands import, so that each fork need not, and what they compose."""
    import_commands()
    import peft
    import transformers

    from klrl.config.compose import job_config

    assert peft
    assert transformers
    job_config(list(WORDS))


# --------------------------------------------------------------------------------------- the rest


def again(seed: int, number: int) -> str:
    """The command that repeats an input."""
    return f"python -m benchmarks.reliability.fuzz --seed {seed} --only {number}"


def shown(given: Input) -> str:
    """An input's command line, cut where it is long."""
    line = " ".join(shlex.quote(word) for word in given.words)
    line = line.encode("ascii", "backslashreplace").decode()
    return line if len(line) < 400 else f"{line[:400]}..."


def fuzz(
    seed: int, numbers: Sequence[int], *, talk: bool = False
) -> tuple[Counter[str], list[str]]:
    """Try inputs; counts by kind and answer, and every violation."""
    counts: Counter[str] = Counter()
    violations: list[str] = []
    begun = shown_at = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        stock = Path(work, "stock").resolve()
        stock.mkdir()
        make_stock(stock)
        for done, number in enumerate(numbers):
            given = make_input(seed, number, stock)
            real = number % REAL == 0
            with tempfile.TemporaryDirectory(dir=work) as folder:
                ended, wrong = try_input(given, Path(folder).resolve(), real=real)
                with suppress(OSError):
                    Path(folder, "secret").chmod(0o700)
            _count(counts, given, ended, real=real)
            for each in wrong:
                repeat = f"    {shown(given)}\n    {again(seed, number)}"
                violations.append(f"{number}, {given.kind}: {each}\n{repeat}")
                print(f"WRONG {violations[-1]}", flush=True)
            if talk:
                print(shown(given), f"exit {ended.code} in {ended.seconds:.1f} s", sep="\n")
                print(ended.out, ended.err, sep="")
            elif time.monotonic() - shown_at > 30:
                shown_at = time.monotonic()
                progress = f"{done + 1} of {len(numbers)} in {shown_at - begun:.0f} s"
                print(f"{progress}, {len(violations)} violations", flush=True)
    return counts, violations


def _count(counts: Counter[str], given: Input, ended: Ended, *, real: bool) -> None:
    kind = {True: "valid", False: "invalid", None: "either"}[given.valid]
    answer = {0: "accepted", 2: "refused"}.get(ended.code, f"exit {ended.code}")
    counts[f"{given.kind}, {kind}, {answer}"] += 1
    counts[kind] += 1
    counts["in processes of their own" if real else "in forks"] += 1


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    import_all()
    numbers = range(args.start, args.start + args.count) if args.only is None else [args.only]
    counts, violations = fuzz(args.seed, numbers, talk=args.only is not None)
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")
    print(f"{len(numbers)} inputs, {len(violations)} violations")
    return 1 if violations else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--count", type=int, default=2000)
    add("--start", type=int, default=0, help="number of the first")
    add("--seed", type=int, default=0)
    add("--only", type=int, help="one input")
    return parser


if __name__ == "__main__":
    sys.exit(main())
