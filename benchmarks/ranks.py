"""Seconds of an iteration of a language run by one process and by two, in turn, a thread each.

    python -m benchmarks.ranks        # SmolLM2, and 15M random weights; writes the results

Efficiency is wall(1) / (2 wall(2)), within a round. Start and first iteration are not counted. CPU
is the sum over the processes; the phases are wall seconds of rank 0.
"""

import json
import sys
import tempfile
import time
from statistics import fmean

from benchmarks.results import SECONDS, about, save
from benchmarks.rounds import Line, loads, rounds, run_line, spread

#: 32 responses of 32 tokens an iteration.
WORK = (
    *("experiment=smollm", "actor.dtype=float32", "collector.prompts=4", "learner.minibatches=2"),
    *("eval.every=0", "checkpoint.every=1000000000", "threads=1", "device=cpu", "logger=none"),
)
#: Of SmolLM2's settings, for 15M weights.
SMALL = {"hidden_size": 180, "intermediate_size": 480, "num_hidden_layers": 18, "head_dim": 20}


def save_small(folder: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from klrl.language.model.smollm import smollm

    config = AutoConfig.from_pretrained(smollm())
    config.update(SMALL)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm()).save_pretrained(folder)


def run(words: list[str]) -> None:
    """Train as one process of torchrun; rank 0 prints the line."""
    import klrl
    from klrl.base import ranks as processes
    from klrl.train.callbacks import Callback

    laps = []

    class Clock(Callback):
        def iterated(self, training, row, batch):
            laps.append((time.perf_counter(), time.process_time(), row))

    with processes.joined():
        klrl.run(*WORK, *words, folder="run", callbacks=[Clock()])
        (wall, cpu, _), (wall_end, cpu_end, _), count = laps[0], laps[-1], len(laps) - 1
        told = {"wall": (wall_end - wall) / count}
        told["CPU"] = sum(processes.gathered((cpu_end - cpu) / count))
        told |= {x: fmean(row[f"time/{x}"] for _, _, row in laps[1:]) for x in SECONDS[2:]}
        if not processes.rank():
            print(json.dumps(told), flush=True)


def measure(words: list[str], count: int = 2) -> Line:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
    tasks = {
        name: lambda _, n=n: run_line([*start, str(n), "-m", "benchmarks.ranks", *words])
        for n, name in ((1, "one process"), (2, "two processes"))
    }
    found = rounds(tasks, count, lambda line: f"{line['wall']:.1f} s, CPU {line['CPU']:.1f} s")
    each = {n: {x: spread([y[x] for y in told]) for x in SECONDS} for n, told in found.items()}
    pairs = zip(*found.values(), strict=True)
    efficiency = spread([one["wall"] / two["wall"] / 2 for one, two in pairs])
    return {**about(), "load": loads(found), "contenders": each, "efficiency": efficiency}


if __name__ == "__main__":
    if sys.argv[1:]:
        run(sys.argv[1:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            save_small(folder)
            jobs = {"15M": [f"actor.model={folder}", "frames=96"], "SmolLM2-135M": ["frames=96"]}
            for name, words in jobs.items():
                save("ranks", {name: measure(words)})
