"""Thousands of command lines and YAMLs, most of them wrong: is each answered as it should be?

    make fuzz
    python -m benchmarks.reliability.fuzz --count 300 --seed 1
    python -m benchmarks.reliability.fuzz --seed 1 --only 17       # one input, and all it says

Right is: what is valid is accepted; what is not is refused with exit code 2 and a line or two,
which name setting and value; no traceback, no warning, no hang, no folder left. Nothing is trained:
a job counts as accepted when its first iteration would begin. Each input runs in a fork of this
process and is made from the seed and its number alone. Exit code 1 where anything is wrong; each
violation comes with the command that repeats it.
"""

from __future__ import annotations

import argparse
import random
import resource
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.reliability import inputs
from benchmarks.reliability.ended import Ended, in_fork
from benchmarks.reliability.inputs import Input
from benchmarks.reliability.small_run import import_all, make_model
from klrl.base.errors import Interrupted

#: GB that a command may add to the start's.
MEMORY = 6.0
#: What makes an input -> its share.
_MAKERS = {
    inputs.valid: 0.33,
    inputs.out_of_range: 0.17,
    inputs.misspelt: 0.1,
    inputs.odd_value: 0.25,
    inputs.yamls: 0.15,
}


def make_input(seed: int, number: int) -> Input:
    """Input number n of a seed."""
    r = random.Random(f"klrl {seed} {number}")
    (make,) = r.choices([*_MAKERS], [*_MAKERS.values()])
    return make(r)


# ---------------------------------------------------------------------------------------- running


class Accepted(Interrupted):
    """The job would train now: it ends with 0, and its folder goes, as it did not begin."""

    exit_code = 0

    def __init__(self) -> None:
        super().__init__(0)


def _accept(*args: Any, **options: Any) -> NoReturn:
    raise Accepted


def run(given: Input, folder: Path) -> tuple[Ended, list[str]]:
    """Give an input to klrl in an empty folder, up to the first iteration; what is new there."""
    (folder / "model").symlink_to("../model")
    given.prepare(folder)
    before = names(folder)

    def go() -> None:
        import klrl.sweep.run
        import klrl.sweep.search
        import klrl.train.loop
        from klrl.cli.main import main

        klrl.train.loop.Training._open = _accept  # type: ignore[method-assign]
        klrl.sweep.run.run_jobs = klrl.sweep.search.run_jobs = _accept
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = used + int(MEMORY * 1e9)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        main(given.words)

    ended = in_fork(go, folder)
    # An empty outputs/ is where the next run will be.
    return ended, sorted(names(folder) - before - {"outputs"})


def verdict(given: Input, ended: Ended, new: Sequence[str]) -> list[str]:
    """What is wrong with an answer."""
    codes = {True: [0], False: [2], None: [0, 2]}[given.valid]
    wrong = ended.faults(codes, most_lines=2)
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


def names(folder: Path) -> set[str]:
    """Everything in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# --------------------------------------------------------------------------------------- the rest


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
    with tempfile.TemporaryDirectory() as work:
        built = in_fork(lambda: make_model(Path("model")), Path(work))
        if built.code:
            raise SystemExit(f"the model fails: {built.err}")
        for done, number in enumerate(numbers):
            given = make_input(seed, number)
            with tempfile.TemporaryDirectory(dir=work) as folder:
                ended, new = run(given, Path(folder).resolve())
            kind = {True: "valid", False: "invalid", None: "either"}[given.valid]
            counts[f"{given.kind}, {kind}, exit {ended.code}"] += 1
            for each in verdict(given, ended, new):
                again = f"python -m benchmarks.reliability.fuzz --seed {seed} --only {number}"
                violations.append(f"{given.kind}: {each}\n    {shown(given)}\n    {again}")
                print(f"WRONG {violations[-1]}", flush=True)
            if talk:
                print(shown(given), f"exit {ended.code} in {ended.seconds:.1f} s", sep="\n")
                print(ended.out, ended.err, sep="")
            elif done % 100 == 99:
                print(f"{done + 1} of {len(numbers)}, {len(violations)} violations", flush=True)
    return counts, violations


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--count", type=int, default=2000)
    add("--start", type=int, default=0, help="number of the first")
    add("--seed", type=int, default=0)
    add("--only", type=int, help="one input")
    args = parser.parse_args(argv)
    import_all("peft", "transformers")
    numbers = range(args.start, args.start + args.count) if args.only is None else [args.only]
    counts, violations = fuzz(args.seed, numbers, talk=args.only is not None)
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")
    print(f"{len(numbers)} inputs, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
