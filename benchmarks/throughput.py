"""Frames per CPU-second of klrl, of its peers and of a floor, on the same work.

    python -m benchmarks.throughput             # about 45 minutes; writes the results
    python -m benchmarks.throughput --quick     # two short rounds of one workload; writes nothing

Contenders are processes of their own, one at a time, alternated (A B C A B C), on one thread.
Imports, compilation and the first iteration are not counted. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.peers.common import ENV_IDS, versions
from benchmarks.results import ROOT, save, throughput
from benchmarks.rounds import (
    Line,
    Told,
    complete,
    error_in,
    median_phases,
    rounds,
    run_line,
    spread,
)


@dataclass(frozen=True)
class Workload:
    env: str
    n: int
    t: int

    @property
    def name(self) -> str:
        return f"{ENV_IDS[self.env]}, {self.n} x {self.t}"

    @property
    def words(self) -> list[str]:
        return ["--env", self.env, "--n", str(self.n), "--t", str(self.t)]


@dataclass(frozen=True)
class Contender:
    """How to run one; ``iterations`` give each a few seconds of CPU."""

    name: str
    module: str
    words: tuple[str, ...] = ()
    iterations: int = 8

    def run(self, workload: Workload, iterations: int, more: Sequence[str] = ()) -> Line:
        given = ["--iterations", str(iterations), *workload.words, *self.words, *more]
        return run_line([sys.executable, "-m", f"benchmarks.peers.{self.module}", *given])


KLRL = tuple(
    Contender(f"klrl {name}", "klrl_loop", ("--compile", compile), iterations)
    for name, compile, iterations in (("eager", "false", 8), ("jit", "jit", 40), ("aot", "aot", 40))
)
SB3 = Contender("Stable-Baselines3", "sb3")
TORCHRL = Contender("TorchRL loop", "torchrl_loop", iterations=5)
FLOOR = Contender("floor", "floor", iterations=40)

WORKLOADS = (
    Workload("pendulum", 8, 256),
    Workload("pendulum", 64, 64),
    Workload("half_cheetah", 1, 2048),
)
AGAINST = (SB3.name, TORCHRL.name, FLOOR.name)
COPIES = (1, 4, 16, 64, 256, 1024)
FRAMES_PER_ROLLOUT = 4096


# ------------------------------------------------------------------------------------- summaries


def summarise(found: dict[str, list[Told]]) -> dict[str, Line]:
    """Per contender: speeds, ratios within a round, phases and compile times."""
    summary: dict[str, Line] = {}
    for name, told in found.items():
        if error := error_in(told):
            summary[name] = {"error": error}
            continue
        speed = [line["frames_per_cpu_second"] for line in told]
        compiled = [line["compile_seconds"] for line in told]
        summary[name] = {
            "frames_per_cpu_second": spread(speed),
            "rounds": speed,
            "ratios": {
                other: spread(
                    [
                        a / b["frames_per_cpu_second"]
                        for a, b in zip(speed, found[other], strict=True)
                    ]
                )
                for other in AGAINST
                if other != name and other in found and complete(found[other], len(speed))
            },
            "compile_seconds": {
                "first": compiled[0],
                "median": statistics.median(compiled[1:] or compiled),
            },
            "phases": median_phases(told),
            **{key: told[0][key] for key in ABOUT if key in told[0]},
        }
    return summary


#: What a contender says of itself beside figures.
ABOUT = ("collector", "compile", "kl", "loss", "peak_mb", "import_cpu_seconds")


# -------------------------------------------------------------------------------------- sections


def compare(workload: Workload, args: argparse.Namespace) -> dict[str, Line]:
    print(f"{workload.name}", flush=True)
    tasks = {
        c.name: lambda _, c=c: c.run(workload, max(3, round(c.iterations * args.length)))
        for c in (*KLRL, SB3, TORCHRL, FLOOR)
    }
    return summarise(rounds(tasks, args.rounds))


def best_klrl(summary: dict[str, Line]) -> Contender:
    """The fastest mode that ran."""
    ran = [c for c in KLRL if "error" not in summary[c.name]] or [KLRL[0]]
    speed = lambda c: summary[c.name].get("frames_per_cpu_second", {}).get("median", 0)  # noqa: E731
    return max(ran, key=speed)


def scale(contender: Contender, args: argparse.Namespace) -> list[Line]:
    """klrl from 1 to 1024 copies, the frames of a rollout held."""
    print(f"scaling of {contender.name}", flush=True)
    sizes = {n: FRAMES_PER_ROLLOUT // n for n in COPIES}
    iterations = max(3, round(contender.iterations * args.length / 2))
    tasks = {
        f"{n} x {t}": lambda _, n=n, t=t: contender.run(Workload("pendulum", n, t), iterations)
        for n, t in sizes.items()
    }
    summary = summarise(rounds(tasks, min(3, args.rounds)))
    return [
        {"n": n, "t": t, "name": contender.name, **summary[f"{n} x {t}"]} for n, t in sizes.items()
    ]


def kl_cost(contender: Contender, args: argparse.Namespace) -> list[Line]:
    """The share of an iteration that measuring and charging the KL to a reference takes."""
    print(f"cost of the KL in {contender.name}", flush=True)
    iterations = max(3, round(contender.iterations * args.length))
    tasks = {
        kl: lambda _, kl=kl: contender.run(WORKLOADS[0], iterations, [f"kl={kl}"])
        for kl in ("legacy", "retrieve")
    }
    rows = []
    for kl, told in rounds(tasks, args.rounds).items():
        row: Line = {"kl": kl, "name": contender.name}
        if error := error_in(told):
            row["error"] = error
        else:
            row["percent"] = spread(
                [x["phases"]["kl"] * 1e-4 * x["frames_per_cpu_second"] for x in told]
            )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, help="default 5, quick 2")
    parser.add_argument("--length", type=float, help="factor on all iterations: 1, quick 0.25")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.length = args.length or (0.25 if args.quick else 1.0)
    workloads = WORKLOADS[:1] if args.quick else WORKLOADS
    data: Line = {"rounds": args.rounds}
    data["workloads"] = {workload.name: compare(workload, args) for workload in workloads}
    if not args.quick:
        best = best_klrl(data["workloads"][WORKLOADS[0].name])
        data["scaling"] = scale(best, args)
        data["kl"] = kl_cost(best, args)
    if args.quick or args.no_save:
        print(throughput({"versions": versions(), **data}))
    else:
        print(save("throughput", data).relative_to(ROOT))
    if '"error"' in json.dumps(data):
        sys.exit(1)


if __name__ == "__main__":
    main()
