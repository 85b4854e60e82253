"""Cost of a frame against copies and width: klrl, Stable-Baselines3, TorchRL; and klrl's memory.

    python -m benchmarks.copies             # 10 minutes; writes copies.json and docs/copies.png
    python -m benchmarks.copies --draw      # docs/copies.png again, from the file
    python -m benchmarks.copies --memory    # 2 minutes; prints klrl's arrays and peaks

All with equal work (:mod:`benchmarks.throughput`), in turn, on one thread; klrl with its kernel.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from benchmarks.results import FOLDER, ROOT, about, table
from benchmarks.rounds import Line, error_in, loads, rounds
from benchmarks.throughput import KERNEL, SB3, Contender, Workload

#: Copies -> steps of each per rollout: 32 minibatches of 64 frames, from 64 copies on of more.
STEPS = {1: 2048, 8: 256, 64: 64, 512: 32, 4096: 24}
WIDTHS = (64, 128, 256, 512, 1024)
KLRL = replace(KERNEL, name="klrl", iterations=20)
BATCH = replace(KLRL, name="klrl, TorchRL's pendulum", words=(*KLRL.words, "--env=pendulum_batch"))
TORCHRL = Contender("TorchRL", "torchrl_loop", iterations=4)
FILE, PICTURE = FOLDER / "copies.json", ROOT / "docs" / "copies.png"
#: Also in grey, each line is another.
LOOKS = {
    KLRL.name: {"color": "#1a237e", "marker": "o"},
    BATCH.name: {"color": "#5c6bc0", "marker": "o", "linestyle": "--", "markerfacecolor": "white"},
    SB3.name: {"color": "#d84315", "marker": "s", "linestyle": "-."},
    TORCHRL.name: {"color": "#757575", "marker": "^", "linestyle": ":"},
}


@dataclass(frozen=True)
class Point:
    contender: Contender
    copies: int
    width: int = 64

    @property
    def name(self) -> str:
        return f"{self.contender.name}, {self.copies} x {STEPS[self.copies]}, {self.width} wide"

    def run(self, _: int = 0) -> Line:
        """Measure it for a few seconds: for fewer frames where these cost more."""
        work = Workload("pendulum", self.copies, STEPS[self.copies], (), self.width)
        frames = min(self.contender.iterations * 2048 * 64 // self.width, 4096 * self.copies)
        return self.contender.run(work, 1 + max(1, frames // (work.n * work.t)))


POINTS = (
    *(Point(each, n) for n in STEPS for each in (KLRL, BATCH, SB3, TORCHRL)),
    *(Point(each, n, width) for width in WIDTHS[1:] for each, n in ((KLRL, 8), (SB3, 8))),
    *(Point(KLRL, 64, width) for width in WIDTHS[1:]),
)


def measure(count: int) -> Line:
    """us of CPU per frame and peak MB of every point that ended well."""
    told = rounds({point.name: point.run for point in POINTS}, count)
    found = [
        {
            **{"contender": point.contender.name, "copies": point.copies, "width": point.width},
            "us": [round(1e6 / line["frames_per_cpu_second"], 2) for line in told[point.name]],
            "peak_mb": max(line["peak_mb"] for line in told[point.name]),
        }
        for point in POINTS
        if not error_in(told[point.name])
    ]
    return {**about(), "load": loads(told), "points": found}


def line(found: Line, name: str, **of: int) -> list[tuple[int, float]]:
    """(copies or width, mean us) of a contender at one width, or number of copies."""
    (key,) = {"copies", "width"} - set(of)
    points = [p for p in found["points"] if {**p, **of, "contender": name} == p]
    return sorted((p[key], sum(p["us"]) / len(p["us"])) for p in points)


def draw(found: Line) -> Figure:
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, look in LOOKS.items():
        left.loglog(*zip(*line(found, name, width=64), strict=True), label=name, **look)
    for name, n, look in (
        (KLRL.name, 64, {**LOOKS[KLRL.name], "marker": "D", "linestyle": "--"}),
        (KLRL.name, 8, LOOKS[KLRL.name]),
        (SB3.name, 8, LOOKS[SB3.name]),
    ):
        widths, us = zip(*line(found, name, copies=n), strict=True)
        right.loglog(widths, [1e6 / x for x in us], label=f"{name}, {n} copies", **look)
    left.set(xlabel="copies of the pendulum (two layers of 64)", ylabel="us of CPU per frame")
    right.set(xlabel="width of both layers", ylabel="frames per CPU-second")
    for axes, ticks in ((left, STEPS), (right, WIDTHS)):
        axes.set_xticks(list(ticks), [f"{n:,}" for n in ticks])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.legend(fontsize=8)
    _, most, cores = found["load"]
    if most > cores:
        figure.suptitle(f"LOADED: {most} on {cores} cores", color="#d84315")
    return figure


def memory() -> str:
    """klrl's arrays of a rollout, in bytes per frame, and the peaks of 4,096 x 24 and x 512."""
    peaks: dict[int, Any] = {}
    for t in (24, 512):  # further epochs need no more
        short = replace(KLRL, words=(*KLRL.words, "--epochs=1"))
        peaks[t] = short.run(Workload("pendulum", 4096, t, ()), 2)
    arrays = peaks[24]["bytes_per_frame"]
    rows = [[name, str(size)] for name, size in arrays.items()]
    rows.append(["all", str(sum(arrays.values()))])
    few, many = (peaks[t]["peak_mb"] for t in (24, 512))
    more = 4096 * (512 - 24)
    told = f"Peak: 4,096 x 24 {few:,} MB, 4,096 x 512 {many:,} MB: "
    told += f"{(many - few) * 2**20 / more:.0f} bytes for each further frame."
    return f"{table(['array', 'bytes per frame'], rows)}\n\n{told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--memory", action="store_true", help="print the memory alone")
    args = parser.parse_args()
    if args.memory:
        print(memory())
        return
    if not args.draw:
        FILE.write_text(json.dumps(measure(args.rounds), indent=1) + "\n")
    draw(json.loads(FILE.read_text())).savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
