"""Is a file of another run noticed? Each is put into a run folder, and klrl goes on there.

    python -m benchmarks.reliability.one_run                       # this checkout's klrl
    python -m benchmarks.reliability.one_run --tree ../before      # another's

A line for each: refused, told (what klrl said of it on stderr), put right, or taken in silence. The
exit code is 1 where one was taken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.results import ROOT, environment

WORDS = (
    *("env=pendulum", "frames=128", "env.num_envs=2", "collector.steps=32", "actor.hidden=[8]"),
    *("learner.minibatches=2", "learner.epochs=1", "eval.every=0", "checkpoint.every=1"),
    "logger=none",
)
RUN, OTHER, SWEEP = Path("run"), Path("other"), Path("outputs/s")
ENTRY = "checkpoints/last/frames-000000000128"
RESUME = ("resume=run", "frames=192")
AGAIN = ("-m", "sweep=s", *WORDS, "seed=0,1")


def swap(name: str) -> None:
    """Put the other run's file or folder in the place of the run's."""
    if (RUN / name).is_dir():
        shutil.rmtree(RUN / name)
        shutil.copytree(OTHER / name, RUN / name)
    else:
        shutil.copyfile(OTHER / name, RUN / name)


def rows(change: Callable[[list[str]], list[str]]) -> None:
    """Change the lines of the run's rows."""
    path = RUN / "metrics.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def foreign(lines: list[str]) -> list[str]:
    """The other run's rows behind the run's."""
    return lines + (OTHER / "metrics.jsonl").read_text().splitlines(keepends=True)


def unmounted() -> None:
    """A job that was interrupted, whose checkpoints are a link that leads nowhere."""
    job = SWEEP / "seed=0"
    shutil.rmtree(job / "checkpoints")
    (job / "checkpoints").symlink_to("/nowhere/checkpoints")
    manifest = json.loads((job / "manifest.json").read_text())
    (job / "manifest.json").write_text(json.dumps({**manifest, "status": "interrupted"}))
    (job / "notes.txt").write_text("mine")


def linked() -> None:
    """``cp -al run copy``, in whose place the run is then looked at."""
    shutil.copytree(RUN, "copy", copy_function=os.link)


#: What was seen -> how it comes about, and the command that follows.
FAULTS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    **{
        f"{name} of a run of another seed": (lambda name=name: swap(name), RESUME)
        for name in ("manifest.json", ".hydra/config.yaml", "metrics.jsonl", "checkpoints", ENTRY)
    },
    "an entry renamed": (
        lambda: (RUN / ENTRY).rename(RUN / "checkpoints/last/frames-000000000999"),
        RESUME,
    ),
    "rows doubled": (lambda: rows(lambda lines: lines * 2), RESUME),
    "rows reversed": (lambda: rows(lambda lines: lines[::-1]), RESUME),
    "rows of another run behind its own": (lambda: rows(foreign), RESUME),
    "a new run behind old rows": (
        lambda: [shutil.rmtree(RUN / "checkpoints"), (RUN / "manifest.json").unlink()],
        (*WORDS, "hydra.run.dir=run"),
    ),
    "a finished job without its manifest": (
        lambda: (SWEEP / "seed=0/manifest.json").unlink(),
        AGAIN,
    ),
    "a job's checkpoints on a disk that is not mounted": (unmounted, AGAIN),
    "a copy by hard links that goes on": (linked, ("resume=copy", "frames=192")),
}


def klrl(*words: str, tree: Path) -> subprocess.CompletedProcess[str]:
    """A command of a checkout's klrl."""
    return subprocess.run(
        [sys.executable, "-m", "klrl", *words],
        capture_output=True,
        text=True,
        env={**environment(), "PYTHONPATH": str(tree)},
    )


def contents() -> dict[str, bytes]:
    """Every file of the run and of the sweep's first job."""
    folders = (RUN, SWEEP / "seed=0")
    return {str(p): p.read_bytes() for f in folders for p in f.rglob("*") if p.is_file()}


def verdict(name: str, tree: Path) -> str:
    """What became of one fault."""
    make, words = FAULTS[name]
    make()
    before = contents()
    ended = klrl(*words, tree=tree)
    untouched = contents() == before
    if untouched and ended.returncode == 0 and words[0] == "resume=copy":
        return "the run is as it was"
    lines = (RUN / "metrics.jsonl").read_text().splitlines()
    if name == "rows doubled" and [json.loads(each)["iteration"] for each in lines] == [1, 2, 3]:
        return "put right: each row is there once"
    said = ended.stderr.strip().splitlines()
    if ended.returncode and untouched:
        return f"refused: {said[-1]}"
    return f"told: {said[0]}" if said else "TAKEN IN SILENCE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout (default: this one)")
    tree = parser.parse_args().tree.resolve()
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        for words in (("seed=0", "hydra.run.dir=run"), ("seed=1", "hydra.run.dir=other")):
            klrl(*WORDS, *words, tree=tree).check_returncode()
        klrl(*AGAIN, tree=tree).check_returncode()
        stock = [path for path in (RUN, OTHER, Path("outputs")) if path.is_dir()]
        verdicts = []
        for number, name in enumerate(FAULTS):
            place = Path(work, f"case{number}")
            for path in stock:
                shutil.copytree(Path(work, path), place / path)
            os.chdir(place)
            verdicts.append(verdict(name, tree))
            print(f"{name}\n    {verdicts[-1].replace(str(place), '')}", flush=True)
        os.chdir(ROOT)
    sys.exit(any(each.isupper() for each in verdicts))


if __name__ == "__main__":
    main()
