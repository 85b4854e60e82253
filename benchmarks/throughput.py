"""Frames per CPU-second of klrl and of its peers on the same work, beside the processor's limit.

    python -m benchmarks.throughput                   # all parts: 30 minutes; writes the results
    python -m benchmarks.throughput pendulum copies   # some parts; what is not measured stays
    python -m benchmarks.throughput --quick           # two short rounds of pendulum; writes nothing

Contenders are processes of their own, one at a time, alternated (A B C A B C), on one thread.
Imports, compilation and the first iteration are not counted. Ratios are taken within a round. A
round that began at a load above the number of cores is marked: load slows eager peers more.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.limit import limit
from benchmarks.peers.common import ENV_IDS
from benchmarks.results import ROOT, about, save, throughput
from benchmarks.rounds import (
    Line,
    Told,
    complete,
    error_in,
    loads,
    median_phases,
    rounds,
    run_line,
    spread,
)


@dataclass(frozen=True)
class Contender:
    """How to run one; ``iterations`` give each a few seconds of CPU."""

    name: str
    module: str
    words: tuple[str, ...] = ()
    iterations: int = 40
    python: Path = Path(sys.executable)

    def run(self, workload: Workload, iterations: int) -> Line:
        given = ["--iterations", str(iterations), *workload.words, *self.words]
        return run_line([str(self.python), "-m", f"benchmarks.peers.{self.module}", *given])


EAGER, AOT, KERNEL = KLRL = tuple(
    Contender(f"klrl {name}", "klrl_loop", ("--compile", compile), iterations)
    for name, compile, iterations in (
        *(("eager", "false", 8), ("package", "aot", 40), ("kernel", "kernel", 40)),
    )
)
#: A MuJoCo preset's loss.
TRPO = Contender("klrl kernel, trpo", "klrl_loop", (*KERNEL.words, "loss=trpo"))
SB3 = Contender("Stable-Baselines3", "sb3", iterations=8)
CLEANRL = Contender("Stable-Baselines3, CleanRL's settings", "sb3", ("--cleanrl",), 8)
#: In an environment of its own: make bench-jax.
JAX = Contender("JAX", "jax_loop", python=ROOT / ".venv-jax" / "bin" / "python")


@dataclass(frozen=True)
class Workload:
    env: str
    n: int
    t: int
    contenders: tuple[Contender, ...]
    width: int = 64
    about: str = ""

    @property
    def name(self) -> str:
        return self.about or f"{ENV_IDS[self.env]}, {self.n} x {self.t}"

    @property
    def words(self) -> list[str]:
        words = ["--env", self.env, "--n", str(self.n), "--t", str(self.t)]
        return [*words, "--width", str(self.width)]


#: klrl from 1 to 1024 copies, the frames of a rollout held: a contender's words come last.
COPIES = tuple(
    Contender(
        f"{n} x {4096 // n}", "klrl_loop", ("--n", f"{n}", "--t", f"{4096 // n}", *KERNEL.words)
    )
    for n in (1, 4, 16, 64, 256, 1024)
)
WORKLOADS = {
    "pendulum": Workload("pendulum", 8, 256, (*KLRL, SB3, CLEANRL, JAX)),
    "cartpole": Workload("cartpole", 8, 256, (*KLRL, SB3, CLEANRL)),
    "half_cheetah": Workload("half_cheetah", 1, 2048, (AOT, KERNEL, TRPO, SB3, CLEANRL)),
    "hopper": Workload("hopper", 8, 256, (AOT, KERNEL, TRPO, SB3, CLEANRL)),
    "wide": Workload(
        "pendulum", 8, 256, (KERNEL, EAGER, SB3), 1024, "Pendulum-v1, 8 x 256, 1,024 wide"
    ),
    "copies": Workload("pendulum", 1, 4096, COPIES, about="Pendulum-v1, klrl kernel, copies"),
}
AGAINST = (SB3.name, JAX.name)


def summarise(found: dict[str, list[Told]]) -> dict[str, Line]:
    """Per contender: speeds, ratios within a round and phases."""
    summary: dict[str, Line] = {}
    for name, told in found.items():
        if error := error_in(told):
            summary[name] = {"error": error}
            continue
        speed = [line["frames_per_cpu_second"] for line in told]
        summary[name] = {
            "frames_per_cpu_second": spread(speed),
            "rounds": speed,
            "ratios": {
                other: spread(np.divide(speed, [x["frames_per_cpu_second"] for x in found[other]]))
                for other in AGAINST
                if other != name and other in found and complete(found[other], len(speed))
            },
            "phases": median_phases(told),
            "peak_mb": told[0].get("peak_mb"),
        }
    return summary


def compare(workload: Workload, args: argparse.Namespace) -> Line:
    print(f"{workload.name}", flush=True)
    length = args.length * 64 / workload.width
    tasks = {
        c.name: lambda _, c=c: c.run(workload, max(3, round(c.iterations * length)))
        for c in workload.contenders
        if c.python.exists()
    }
    told = rounds(tasks, args.rounds)
    bound = limit(workload.env, workload.width)
    return {**about(), "load": loads(told), "limit": bound, "contenders": summarise(told)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, help="default 5, quick 2")
    parser.add_argument("--length", type=float, help="factor on all iterations: 1, quick 0.25")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    parts = args.parts or (["pendulum"] if args.quick else list(WORKLOADS))
    if unknown := sorted({*parts} - {*WORKLOADS}):
        parser.error(f"{unknown[0]}: is none of {', '.join(WORKLOADS)}")
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.length = args.length or (0.25 if args.quick else 1.0)
    data = {WORKLOADS[part].name: compare(WORKLOADS[part], args) for part in parts}
    if args.quick or args.no_save:
        print(throughput(data))
    else:
        print(save("throughput", data).relative_to(ROOT))
    if '"error"' in json.dumps(data):
        sys.exit(1)


if __name__ == "__main__":
    main()
