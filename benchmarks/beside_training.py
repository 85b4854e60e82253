"""CPU seconds of the main job beside its training, this tree's and another's in turn.

    python -m benchmarks.beside_training --tree ../before --rounds 3

Beside training is all that a process does before its first rollout and after its last update:
imports, composing, checks, building, closing, curves. Each tree has a cache of its own, filled by a
run that is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WORDS = ("env=pendulum", "kl.coef=0.1", "logger=none")
HERE = Path(__file__).resolve().parent.parent

#: Notes in the other process: CPU time as the first rollout begins, the last update ends, all ends.
TIMED = """
import atexit, json, sys, time
marks = {}
def told():
    marks["end"] = time.process_time()
    print("\\n" + json.dumps(marks))
atexit.register(told)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in ("klrl.control.vector", "klrl.train.learner"):
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec
        spec = find_spec(name)
        sys.meta_path.insert(0, self)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            watch(module)
        spec.loader.exec_module = exec_module
        return spec
def watch(module):
    if module.__name__ == "klrl.train.learner":
        update = module.Learner.update
        def timed(self, *a, **k):
            out = update(self, *a, **k)
            marks["last"] = time.process_time()
            return out
        module.Learner.update = timed
    else:
        collect = module.VectorRollout.collect
        def timed(self):
            marks.setdefault("first", time.process_time())
            return collect(self)
        module.VectorRollout.collect = timed
sys.meta_path.insert(0, Finder())
sys.argv = ["klrl", *sys.argv[1:]]
from klrl.__main__ import main
main()
"""


def seconds(tree: Path, cache: Path, words: tuple[str, ...]) -> tuple[float, float]:
    """(CPU seconds beside training, of training)."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "XDG_CACHE_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", TIMED, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    marks = json.loads(done.stdout.strip().splitlines()[-1])
    training = marks["last"] - marks["first"]
    return marks["end"] - training, training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tree", type=Path, required=True, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("words", nargs="*", default=WORDS)
    args = parser.parse_args()
    trees = {"before": args.tree.resolve(), "now": HERE}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as caches:
        for name, tree in trees.items():
            seconds(tree, Path(caches, name), tuple(args.words))
        for _ in range(args.rounds):
            for name, tree in trees.items():
                found[name].append(seconds(tree, Path(caches, name), tuple(args.words)))
                beside, training = found[name][-1]
                print(f"{name}: {beside:.2f} s beside training, {training:.2f} s of it", flush=True)
    medians = {name: statistics.median(each[0] for each in rows) for name, rows in found.items()}
    print(json.dumps({**medians, "ratio": medians["now"] / medians["before"]}))


if __name__ == "__main__":
    main()
