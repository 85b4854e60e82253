"""klrl on a CUDA device: does it agree with the CPU, and how fast is it?

    python -m benchmarks.gpu              # writes benchmarks/results/gpu.json
    python -m benchmarks.gpu --no-save

One update and one rollout's actions are compared with the CPU's; then the main job runs through the
public runner; then iterations are timed: the update eager, compiled, and compiled and captured.
Exit 1 where the two devices differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import klrl.control.compiled
from benchmarks.results import ROOT
from klrl.__main__ import compose
from klrl.config.checks import to_config
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training

TOLERANCE = 1e-4
SMALL = ("env=pendulum", "env.num_envs=8", "collector.steps=256", "learner.minibatches=32")
LARGE = (
    *("env=half_cheetah", "env.num_envs=64", "collector.steps=64", "learner.minibatches=4"),
    "actor.hidden=[1024,1024]",
)
SIZES = {"Pendulum 8 x 256, 64-64": SMALL, "HalfCheetah 64 x 64, 1024-1024": LARGE}


def experiment(device: str, *words: str) -> Training:
    common = ("logger=none", "eval.every=0", "kl.coef=0.1", f"device={device}")
    return Training(to_config(compose([*common, *words])))


def charged(made: Training) -> Any:
    rollout = made.parts.rollout(0)
    batch = rollout.collect()
    rollout.close()
    made.parts.charge_kl(batch)
    made.parts.estimate_advantage(batch)
    return batch


def disagreement(mode: str, *words: str) -> float:
    """Largest difference of a parameter between one iteration's update here and on the CPU."""
    words = (*words, "learner.epochs=2", "kl.placement=split", "kl.estimator=exact")
    cpu = experiment("cpu", *words, "learner.compile=false")
    batch = charged(cpu)
    gpu = experiment("cuda", *words, f"learner.compile={mode}")
    gpu.parts.agent.modules.load_state_dict(cpu.parts.agent.modules.state_dict())
    for made in (cpu, gpu):
        torch.manual_seed(1)  # the order of the minibatches
        made.parts.learner.update(copy.deepcopy(batch).to(made.parts.device), 0.0, 0.1)
    return float(
        (gpu.parts.learner.steps.optimizer.flat.cpu() - cpu.parts.learner.steps.optimizer.flat)
        .abs()
        .max()
    )


def acting_disagreement() -> float:
    """Largest difference of an action between the captured forward and the CPU's numpy."""
    from klrl.control.acting import make_acting

    cpu, gpu = (experiment(device, *SMALL) for device in ("cpu", "cuda"))
    gpu.parts.agent.modules.load_state_dict(cpu.parts.agent.modules.state_dict())
    observation = torch.randn(8, 3).numpy()
    actions = [
        make_acting(m.parts.agent, m.parts.device).sample(0, observation) for m in (cpu, gpu)
    ]
    return float(abs(actions[0] - actions[1]).max())


def frames_per_second(name: str, *words: str, iterations: int = 8) -> float:
    """Whole iterations by the wall clock, median, the first one left out."""
    mode = "false" if name == "eager" else "jit"
    captured = klrl.control.compiled.Captured
    if name == "compiled":
        klrl.control.compiled.Captured = lambda step, _: step
    try:
        made = experiment("cuda", *words, f"learner.compile={mode}")
        rollout = made.parts.rollout(0)
        speeds = []
        for _ in range(iterations):
            started = time.perf_counter()
            batch = rollout.collect()
            made.parts.charge_kl(batch)
            made.parts.estimate_advantage(batch)
            made.learn(batch)
            torch.cuda.synchronize()
            speeds.append(batch.numel() / (time.perf_counter() - started))
        rollout.close()
    finally:
        klrl.control.compiled.Captured = captured
    return statistics.median(speeds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch sees no CUDA device; nothing was measured")
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "largest_difference_from_the_cpu": {
            "actions, captured": acting_disagreement(),
            **{
                f"parameters after an update, {name}": disagreement(mode, *SMALL)
                for name, mode in (("eager", "false"), ("compiled and captured", "jit"))
            },
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        experiment("cuda", "env=pendulum", "frames=20480").train(RunFolder(Path(folder) / "run"))
        found["main_job_seconds"] = round(time.perf_counter() - started, 1)
    found["frames_per_second"] = {
        size: {
            name: round(frames_per_second(name, *words))
            for name in ("eager", "compiled", "captured")
        }
        for size, words in SIZES.items()
    }
    print(json.dumps(found, indent=2))
    if not args.no_save:
        path = ROOT / "benchmarks" / "results" / "gpu.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(max(found["largest_difference_from_the_cpu"].values()) > TOLERANCE)


if __name__ == "__main__":
    main()
