"""What mixed precision and micro-batches cost: CPU seconds and peak memory of an iteration.

    python -m benchmarks.mixed                 # about half an hour on one core; prints only
    python -m benchmarks.mixed --model FOLDER --tokens 64
    python -m benchmarks.mixed --set learner.minibatches=1    # micro-batches of one large step

``experiment=smollm`` (or its task with the model of a folder) learns for a few iterations, in turn
in float32, mixed, and both in micro-batches, each in a process of its own with one thread. Times
are CPU seconds of sampling, of the KL and of the update, and of all per 1,000 response tokens:
precisions draw other responses, of other lengths. Memory is the highest resident size. Needs /proc,
that is Linux; bfloat16 is fast on CPUs with AMX (``amx_bf16`` in /proc/cpuinfo).

Target: mixed takes at most .85 of float32's CPU seconds on a CPU with AMX.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, environment, table
from benchmarks.watched import status_mb

COMMON = (
    *("experiment=smollm", "logger=none", "device=cpu", "threads=1", "eval.every=0"),
    "collector.samples_every=0",
)
WAYS = {
    "float32": ("actor.dtype=float32",),
    "mixed": ("actor.dtype=bfloat16",),
    "float32, micro_batch=1": ("actor.dtype=float32", "learner.micro_batch=1"),
    "mixed, micro_batch=1": ("actor.dtype=bfloat16", "learner.micro_batch=1"),
}
PHASES = ("sampling", "KL", "update")
ENOUGH = 0.85


def measure(words: Sequence[str], iterations: int) -> dict[str, Any]:
    """CPU seconds of each phase, tokens (medians without the first iteration), peak resident MB."""
    import torch

    from klrl.__main__ import compose
    from klrl.config.checks import to_config
    from klrl.language.batch import response_mask
    from klrl.train.loop import Training

    torch.set_num_threads(1)
    training = Training(to_config(compose(list(words))))
    parts, seconds, tokens = training.parts, [], []
    rollout = parts.rollout(0, print)
    for _ in range(iterations + 1):
        marks = [time.process_time()]
        batch = rollout.collect()
        marks.append(time.process_time())
        parts.charge_kl(batch)
        parts.estimate_advantage(batch)
        marks.append(time.process_time())
        training.learn(batch)
        marks.append(time.process_time())
        seconds.append([after - before for before, after in pairwise(marks)])
        tokens.append(int(response_mask(batch).sum()))
    medians = [statistics.median(phase) for phase in zip(*seconds[1:], strict=True)]
    peak = status_mb(os.getpid(), "VmHWM")
    return {"seconds": medians, "tokens": statistics.median(tokens[1:]), "peak": peak}


def in_a_process(words: Sequence[str], iterations: int) -> dict[str, Any]:
    """:func:`measure` in a new process."""
    command = [sys.executable, "-m", "benchmarks.mixed", "--child", str(iterations), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> None:
    if "--child" in sys.argv:
        iterations, *words = sys.argv[2:]
        print(json.dumps(measure(words, int(iterations))))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=1, help="measured in each process")
    parser.add_argument("--tokens", type=int, default=32, help="of a response")
    parser.add_argument("--model", help="a folder of save_pretrained")
    parser.add_argument(
        "--set", nargs="+", default=[], help="settings of all, as learner.minibatches=1"
    )
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.only}
    words = [*COMMON, f"collector.max_new_tokens={args.tokens}", *args.set]
    if args.model is not None:
        words.append(f"actor.model={args.model}")
    for _ in range(args.rounds):
        for name in args.only:
            found[name].append(in_a_process([*words, *WAYS[name]], args.iterations))
            print(name, found[name][-1], flush=True)
    rows, totals = [], {}
    for name, rounds in found.items():
        each = [r["seconds"] for r in rounds]
        phases = [statistics.median(phase) for phase in zip(*each, strict=True)]
        totals[name] = statistics.median(map(sum, each))
        per_token = statistics.median(1000 * sum(r["seconds"]) / r["tokens"] for r in rounds)
        peak = statistics.median(r["peak"] for r in rounds)
        numbers = [f"{x:.1f}" for x in (*phases, totals[name], per_token)]
        rows.append([name, *numbers, f"{peak:,.0f}"])
    heads = [*(f"{p}, CPU s" for p in PHASES), "all", "all / 1,000 tokens", "peak MB"]
    print(table(["", *heads], rows))
    if {"float32", "mixed"} <= set(totals):
        ratio = totals["mixed"] / totals["float32"]
        print(f"mixed: {ratio:.2f} of float32's CPU seconds")
        if ratio > ENOUGH and "amx_bf16" in Path("/proc/cpuinfo").read_text():
            sys.exit(1)


if __name__ == "__main__":
    main()
