"""How the update's step runs: eager, compiled in this process, or from a package built once.

    false   eager
    jit     torch.compile: 20 to 30 s in each new process, some seconds with a warm cache
    aot     an ahead-of-time package: built once (half a minute, with a C++ compiler), kept in the
            user's cache, loaded in a hundredth of a second
    auto    a package that the cache holds; else aot for a run with enough steps to pay for the
            build, else false; on a GPU jit

The mode is chosen before the first rollout (:func:`choose`), for the manifest; the step is made at
the first minibatch (:func:`prepare`). On a GPU a compiled step is also captured as a CUDA graph,
and ``aot`` means jit. A package computes wrong numbers in silence when its inputs have other
shapes, strides or types: they are checked before each rollout's updates.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klrl.base.cache import cache_dir
from klrl.base.files import replacing
from klrl.config import Config, LossConfig
from klrl.control.cuda_graph import capture
from klrl.control.step import Problem, Step, eager_step, pure_step

#: From so many gradient steps on, building a package pays: it saves about 2 ms for every three.
AUTO_STEPS = 10_000

#: The loss's settings that a step does not read, or gets as a tensor: one package serves all their
#: values.
NOT_COMPILED = {
    *("beta", "dtarg", "increment", "decrement", "beta_rule", "gain"),
    *("line_search", "beta_min", "beta_max", "target_kl"),
}

#: The files that a step is made of.
_SOURCES = (
    *("control/distributions.py", "control/actor.py", "control/networks.py"),
    *("control/score.py", "control/step.py", "control/compiled.py"),
    *("losses", "kl/charge.py", "kl/estimators.py"),
)


def decide(config: Config, device: torch.device, asked: str | None = None) -> str:
    """What a mode stands for, by the settings and the kind of device alone.

    Args:
        config: the job.
        device: where its update runs.
        asked: auto, false, jit or aot; default ``learner.compile``.
    """
    asked = config.learner.compile if asked is None else asked
    if device.type == "cuda":
        return "jit" if asked in ("auto", "aot") else asked
    if asked == "auto":
        return "aot" if config.gradient_steps >= AUTO_STEPS else "false"
    return asked


@dataclass(frozen=True)
class Choice:
    """How a run's step will run.

    Attributes:
        mode: false, jit or aot.
        why: told where it is not what the settings would have given.
    """

    mode: str
    why: str | None = None


def choose(asked: str, config: Config, device: torch.device, package: Callable[[], Path]) -> Choice:
    """What a mode comes to on this machine; nothing is built.

    Args:
        asked: auto, false, jit or aot.
        config: the job.
        device: where its update runs.
        package: tells where the step's package would lie; called for auto and aot on a CPU.
    """
    mode = decide(config, device, asked)
    if device.type != "cpu":
        return Choice(mode)
    path = package() if asked in ("auto", "aot") else None
    if path is not None and _load(path) is not None:
        return Choice("aot")
    if mode != "false" and not _compiler():
        return Choice("false", f"learner.compile={mode} needs a C++ compiler, and there is none")
    if mode == "false" and path is not None and _there(path):
        name = path.name[:8]
        return Choice(mode, f"package {name} cannot be loaded, learner.compile=aot builds it anew")
    return Choice(mode)


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to be called.

    Attributes:
        step: the function.
        told: what was done, for people.
    """

    step: Step
    told: str


def prepare(
    mode: str,
    problem: Problem,
    example: Sequence[Tensor],
    say: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Make the step of a mode.

    Args:
        mode: false, jit or aot, as :func:`choose` gave it.
        problem: what the step is built from.
        example: (flat, exp_avg, exp_avg_sq, count, rows, coefficients) as they will come.
        say: told before something takes long.
    """
    if mode == "false":
        return Prepared(eager_step(problem), "update: eager")
    if mode == "jit":
        step = torch.compile(pure_step(problem), fullgraph=True, dynamic=False)
        told = "update: torch.compile, at the first minibatch"
        return _captured_on_gpu(Prepared(step, told), example)
    return _package(problem, example, say)


def check_inputs(example: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Refuse inputs that a package would misread.

    Raises:
        RuntimeError: another shape, stride, type or device.
    """
    for i, (expected, value) in enumerate(zip(example, given, strict=True)):
        theirs, ours = _layout(value), _layout(expected)
        if theirs != ours:
            raise RuntimeError(f"input {i} of the compiled update is {theirs}, built for {ours}")


def _layout(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype, value.device


# ------------------------------------------------------------------------------------ packages


def package_path(problem: Problem, example: Sequence[Tensor]) -> Path:
    """Where the step's package lies, or would."""
    return cache_dir() / "update" / f"{package_key(problem, example)}.pt2"


def package_key(problem: Problem, example: Sequence[Tensor]) -> str:
    """A name that two updates share when one package serves both.

    It covers klrl's sources, every setting that the step reads, the layout of its inputs, the
    networks, the action's bounds, torch's version, its threads and the processor.
    """
    family = problem.agent.family
    told = (
        torch.__version__,
        torch.get_num_threads(),
        _processor(),
        _sources(),
        type(problem.loss).__name__,
        _compiled_settings(problem.loss.config),
        problem.loss.reference_estimator,
        problem.optim,
        str(problem.agent.policy_net),
        str(problem.agent.value_net),
        problem.agent.value_net.detach_trunk,
        problem.agent.policy_net.trunk is problem.agent.value_net.trunk,
        type(family).__name__,
        {k: v.tolist() for k, v in vars(family).items() if isinstance(v, Tensor)},
        str(problem.columns.shapes),
        [_layout(value) for value in example],
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:24]


def _compiled_settings(config: LossConfig) -> dict[str, Any]:
    return {key: value for key, value in asdict(config).items() if key not in NOT_COMPILED}


def _package(problem: Problem, example: Sequence[Tensor], say: Callable[[str], None]) -> Prepared:
    path = package_path(problem, example)
    loader = _load(path)
    told = f"update: package {path.name[:8]} found in the cache"
    if loader is None:
        say("compiling the update, once for this kind of run (learner.compile=false does without)")
        started = time.perf_counter()
        build_package(problem, example, path)
        seconds = time.perf_counter() - started
        told = f"update: compiled in {seconds:.0f} s, kept in {path.parent} for the next runs"
        loader = _load(path)
    run = loader.run

    def step(*given: Tensor) -> Tensor:
        return run(list(given))[0]

    return Prepared(step, told)


def _load(path: Path) -> Any:
    """The package, on one thread's inputs; None where there is none that can be read."""
    if not _there(path):
        return None
    try:
        return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    except RuntimeError:  # cut off by a full disk, say; a build replaces it
        return None


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # the cache is not this user's: then there is no package
        return False


def build_package(problem: Problem, example: Sequence[Tensor], path: Path) -> None:
    """Trace, export and compile the step; the file appears whole or not at all."""
    from torch._inductor import aoti_compile_and_package
    from torch.fx.experimental.proxy_tensor import make_fx

    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), replacing(path) as partial:
        # torch 2.13's exporter warns about its own use of LeafSpec.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        # The step writes into its arguments: tracing must not touch the run's own.
        graph = make_fx(pure_step(problem))(*_copies(example))
        exported = torch.export.export(graph, tuple(_copies(example)))
        aoti_compile_and_package(exported, package_path=str(partial))


def _copies(example: Sequence[Tensor]) -> list[Tensor]:
    return [value.detach().clone() for value in example]


def _compiler() -> str | None:
    """The C++ compiler that torch would call."""
    return next((found for name in ("c++", "g++", "clang++") if (found := _which(name))), None)


def _which(name: str) -> str | None:
    return shutil.which(os.environ.get("CXX", name))


def _processor() -> str:
    """Model and instruction set: a package holds machine code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    seen = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return torch.backends.cpu.get_cpu_capability() + "".join(sorted(set(seen)))


def _sources() -> str:
    """A hash over the files that the step is made of."""
    here = Path(__file__).parents[1]
    files = [f for name in _SOURCES for f in sorted((here / name).rglob("*.py")) or [here / name]]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------- GPU


def _captured_on_gpu(prepared: Prepared, example: Sequence[Tensor]) -> Prepared:
    if example[0].device.type != "cuda":
        return prepared
    told = f"{prepared.told}, captured as a CUDA graph"
    return Prepared(Captured(prepared.step, example), told)


class Captured:
    """A step as one CUDA graph: parameters and moments where they lie, minibatches copied in.

    Args:
        step: changes its first four arguments in place.
        example: its arguments; the first four are the ones that it will always get.
    """

    def __init__(self, step: Step, example: Sequence[Tensor]) -> None:
        *self._state, rows, coef = example
        self._rows, self._coef = rows.clone(), coef.clone()
        before = _copies(self._state)
        self._graph, self._metrics = capture(
            lambda: step(*self._state, self._rows, self._coef), rows.device
        )
        for value, old in zip(self._state, before, strict=True):
            value.copy_(old)

    def __call__(
        self,
        flat: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        count: Tensor,
        rows: Tensor,
        coef: Tensor,
    ) -> Tensor:
        """Run the graph; its metrics are copied out, since the next run overwrites them."""
        self._rows.copy_(rows)
        self._coef.copy_(coef)
        self._graph.replay()
        return self._metrics.clone()
