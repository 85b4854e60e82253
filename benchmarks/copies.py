"""CPU time per frame from 1 to 4,096 pendulums, of klrl, Stable-Baselines3 and a TorchRL loop.

    python -m benchmarks.copies            # 40 minutes; writes results/copies.json and the picture
    python -m benchmarks.copies --most 64 --no-save

All with equal work (:mod:`benchmarks.throughput`), in turn, on one thread; klrl compiled (aot).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

from benchmarks.results import FOLDER, ROOT, commit, machine
from benchmarks.rounds import Line, error_in, rounds
from benchmarks.throughput import KLRL, SB3, TORCHRL, Workload

#: Copies -> steps of each per rollout.
SIZES = {1: 2048, 8: 256, 64: 64, 512: 32, 4096: 24}
CONTENDERS = {"klrl": KLRL[-1], SB3.name: SB3, "TorchRL": TORCHRL}
#: The largest sizes take the peers 20 to 60 s an iteration.
FEWEST_FRAMES = 20_000


def measure(most: int, count: int) -> Line:
    """us of CPU per frame by contender and copies."""
    found: Line = {}
    for n, t in SIZES.items():
        if n > most:
            continue
        print(f"{n} x {t}", flush=True)
        size = Workload("pendulum", n, t), 1 + max(2, FEWEST_FRAMES // (n * t))
        tasks = {name: lambda _, c=c, size=size: c.run(*size) for name, c in CONTENDERS.items()}
        for name, told in rounds(tasks, count).items():
            if not error_in(told):
                cost = [1e6 / line["frames_per_cpu_second"] for line in told]
                found.setdefault(name, {})[n] = {"us": statistics.median(cost), "rounds": cost}
    return found


def draw(found: Line) -> None:
    """Cost against copies, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, sizes in found["us"].items():
        axes.loglog(list(map(int, sizes)), [x["us"] for x in sizes.values()], "o-", label=name)
    axes.set(xlabel="copies of Pendulum-v1", ylabel="us of CPU per frame")
    axes.set_xticks(list(SIZES), [f"{n:,}" for n in SIZES])
    axes.legend()
    figure.savefig(ROOT / "docs" / "copies.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--most", type=int, default=max(SIZES), help="copies at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args, load = parser.parse_args(), os.getloadavg()[0]
    found = {"us": measure(args.most, args.rounds), "machine": machine(), "commit": commit()}
    found["load"] = [load, os.getloadavg()[0]]
    print(json.dumps(found["us"], indent=1))
    if not args.no_save:
        (FOLDER / "copies.json").write_text(json.dumps(found, indent=1) + "\n")
        draw(found)


if __name__ == "__main__":
    main()
