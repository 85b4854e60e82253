"""Frames and CPU seconds to a return: klrl beside Stable-Baselines3.

    python -m benchmarks.sample_efficiency                      # both tasks
    python -m benchmarks.sample_efficiency --tasks pendulum --seeds 0 1

pendulum: the preset with kl.coef=0 beside rl-baselines3-zoo's settings, until the last 20 training
episodes return -200 on average. Stable-Baselines3 is asked after every step, klrl after every
iteration. half_cheetah: equal settings for both, the training return at the end.

CPU seconds count from the first step: imports and building are not in, nor what a first iteration
takes beyond the median one where something is compiled. No side evaluates.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.results import ROOT, save, table
from benchmarks.rounds import Failed, Line, run_line

TARGET = -200.0
WINDOW = 20
PENDULUM_FRAMES = 100_000
CHEETAH = ["--env", "half_cheetah", "--n", "1", "--t", "2048", "--reward-scale", "0.1"]


def run(module: str, seed: int, iterations: int, words: Sequence[str]) -> Line:
    given = ["--curve", "--seed", str(seed), "--iterations", str(iterations), *words]
    return run_line([sys.executable, "-m", f"benchmarks.peers.{module}", *given])


def crossing(line: Line) -> tuple[float, float]:
    """Frames and CPU seconds when the last 20 episodes first reach the target; inf if never."""
    last: deque[float] = deque(maxlen=WINDOW)
    for point in line["curve"]:
        last.extend(point["returns"])
        if len(last) == WINDOW and statistics.mean(last) >= TARGET:
            return point["frames"], point["cpu"] - line["compile_cpu_seconds"]
    return float("inf"), float("inf")


def final_return(line: Line) -> float:
    """Mean of the last 20 episodes."""
    return statistics.mean([r for point in line["curve"] for r in point["returns"]][-WINDOW:])


def excluded(line: Line) -> str:
    """What the CPU seconds leave out."""
    return (
        f"imports {line['import_cpu_seconds']:.1f}, building {line['build_seconds']:.1f}, "
        f"compilation {line['compile_cpu_seconds']:.1f}"
    )


def spread(values: Sequence[float], digits: int = 0) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} [{low:,.{digits}f}, {high:,.{digits}f}]"


def collect(
    seeds: Sequence[int], jobs: dict[str, tuple], tell: Callable[[Line], str]
) -> dict[str, list[Line]]:
    """All seeds of all contenders, in turn; the lines by contender."""
    lines: dict[str, list[Line]] = {name: [] for name in jobs}
    for seed in seeds:
        for name, (module, iterations, words) in jobs.items():
            line = run(module, seed, iterations, words)
            lines[name].append(line)
            said = f"{tell(line)}; not counted: {excluded(line)} s"
            print(f"  seed {seed}: {name}: {said}", flush=True)
    return lines


def told_crossing(line: Line) -> str:
    frames, cpu = crossing(line)
    return f"{frames:,.0f} frames, {cpu:.2f} CPU-s; at the end {final_return(line):.0f}"


def klrl_words(args: argparse.Namespace) -> list[str]:
    return ["--compile", args.compile]


def pendulum(args: argparse.Namespace) -> dict[str, Any]:
    """Must show: 40k frames in the median, all by 60k, a sixth of the peer's CPU seconds."""
    print(f"Pendulum-v1 to {TARGET:.0f}", flush=True)
    ours = f"klrl ({args.compile}), preset, kl.coef=0"
    zoo = "Stable-Baselines3, rl-baselines3-zoo"
    iterations = -(-PENDULUM_FRAMES // 4096)
    preset = [*klrl_words(args), "--preset", "kl.coef=0", f"frames={PENDULUM_FRAMES}"]
    jobs = {ours: ("klrl_loop", 2, preset), zoo: ("sb3", iterations, ["--zoo"])}
    rows, cpu = [], {}
    for name, lines in collect(args.seeds, jobs, told_crossing).items():
        reached = [crossing(line) for line in lines]
        cpu[name] = statistics.median(seconds for _, seconds in reached)
        rows.append(
            [
                name,
                spread([frames for frames, _ in reached]),
                spread([seconds for _, seconds in reached], 2),
                excluded(lines[-1]),
            ]
        )
    ratio = cpu[zoo] / cpu[ours]
    print(f"  CPU seconds: {zoo} / {ours} = {ratio:.1f}")
    return {
        "about": f"Pendulum-v1, until the last {WINDOW} training episodes return {TARGET:.0f} "
        f"(seeds {told(args.seeds)}); the peer takes {ratio:.1f} x the CPU seconds",
        "header": ["", "frames", "CPU seconds", "not counted, s"],
        "rows": rows,
    }


def half_cheetah(args: argparse.Namespace) -> dict[str, Any]:
    """Must show: klrl's median is not below the peer's minimum."""
    print(f"HalfCheetah-v5, {args.cheetah_frames:,} frames", flush=True)
    iterations = -(-args.cheetah_frames // 2048)
    words = [*klrl_words(args), *CHEETAH, "kl.coef=0"]
    jobs = {
        f"klrl ({args.compile}), klpen": ("klrl_loop", iterations, words),
        f"klrl ({args.compile}), clip": ("klrl_loop", iterations, [*words, "loss=clip"]),
        "Stable-Baselines3": ("sb3", iterations, CHEETAH),
    }
    lines = collect(args.cheetah_seeds, jobs, lambda x: f"return {final_return(x):.0f}")
    return {
        "about": f"HalfCheetah-v5, {args.cheetah_frames:,} frames of 1 x 2048, equal settings "
        f"(rewards x 0.1 for the learner, lr 3e-4 throughout, kl.coef=0), "
        f"seeds {told(args.cheetah_seeds)}; mean of the last {WINDOW} training episodes",
        "header": ["", "training return", "frames per CPU-second"],
        "rows": [
            [
                name,
                spread([final_return(line) for line in found]),
                spread([line["frames_per_cpu_second"] for line in found]),
            ]
            for name, found in lines.items()
        ],
    }


def told(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


TASKS = {"pendulum": pendulum, "half_cheetah": half_cheetah}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--cheetah-seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--cheetah-frames", type=int, default=300_000)
    parser.add_argument("--compile", choices=("false", "jit", "aot"), default="aot")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    data, failed = {}, False
    for name in args.tasks:
        try:
            data[name] = TASKS[name](args)
        except Failed as error:
            print(f"{name}: failed: {error}", file=sys.stderr)
            failed = True
            continue
        print(f"\n{data[name]['about']}:\n\n{table(data[name]['header'], data[name]['rows'])}\n")
    if not args.no_save and not failed:
        print(save("learning", data).relative_to(ROOT))
    sys.exit(failed)


if __name__ == "__main__":
    main()
