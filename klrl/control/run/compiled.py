"""Prepare the gradient step of an update in the mode of ``learner.compile``.

    false   eager
    jit     torch.compile: 20 to 30 s in each new process, some seconds with a warm cache
    aot     an ahead-of-time package: a C++ compiler builds it once, in half a minute; later runs
            load it from the user's cache in a hundredth of a second
    kernel  the step of MLPs in C++, built once for all shapes in two seconds (kernel.py)
    auto    on a GPU jit; on a CPU kernel if it computes the step, on one thread, and the run is not
            short (:data:`KERNEL_STEPS`); else aot if the run is long (:data:`AUTO_STEPS`), else
            false; whatever lies in the cache: equal settings give equal rows

:func:`prepare` makes the step at the first minibatch. If anything fails, the update runs eagerly,
and a printed line gives the reason. On a GPU, ``aot`` and ``kernel`` mean jit, and a compiled step
is also captured as a CUDA graph.

A package is machine code. It is loaded only if no other user can write its folder, and if its hash
equals the hash that the build stored (klrl/base/cache.py). If its inputs differ from the build's in
shape, stride or dtype, a package silently computes wrong numbers;
:func:`klrl.control.run.step.check_inputs` refuses such inputs.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klrl.base.cache import (
    Untrusted,
    cache_dir,
    check_digest,
    compiling,
    private_folder,
    write_digest,
)
from klrl.base.errors import first_line, in_one_line
from klrl.base.files import replacing
from klrl.base.processor import instructions
from klrl.config import Config, OwnPart, RetrieveKLConfig
from klrl.control.policy.networks import Agent
from klrl.control.run.step import Step, StepParts, eager_step, input_layout, pure_step
from klrl.losses.policy import PolicyLoss
from klrl.runs.machine import cxx

#: ``auto`` takes the kernel if a run has at least this many gradient steps. Its build costs 2 CPU
#: seconds, and it is faster than eager mode by about 0.8 ms a step.
KERNEL_STEPS = 2_500

#: ``auto`` builds a package if a run has at least this many gradient steps. The first build costs
#: 17 CPU seconds, and a package is faster than eager mode by about 0.7 ms a step.
AUTO_STEPS = 24_000

#: Loss settings that a package does not depend on: a step does not read them, or reads their value
#: from a tensor.
NOT_COMPILED = {
    *("beta", "dtarg", "dtarg_end", "dtarg_per", "increment", "decrement", "beta_rule", "gain"),
    *("line_search", "max_alpha", "beta_min", "beta_max", "target_kl", "own_beta_rule"),
    *("cg_steps", "damping"),
}

#: The source files and folders that determine a step; their hash is part of a package's key.
_SOURCES = (
    *("control/policy/distributions.py", "control/policy/actor.py", "control/policy/networks.py"),
    *("control/policy/encoders.py", "control/env/observation.py"),
    *("control/run/step.py", "control/run/compiled.py"),
    *("losses", "kl/charge.py", "kl/divergences.py", "kl/estimators.py"),
)


def decide(
    requested: str, config: Config, device: torch.device, unfit: Callable[[], str | None]
) -> str:
    """Choose the mode by settings and device type alone, whether or not the cache has a package.

    ``unfit`` says what of the job the kernel does not compute.
    """
    if device.type == "cuda":
        return "jit" if requested in ("auto", "aot", "kernel") else requested
    if requested != "auto":
        return requested
    steps, alone = config.gradient_steps, config.threads == 1  # the kernel uses one thread
    # Without rewards the critic's error is the kernel's rounding alone, which Adam would scale up.
    rewarded = config.advantage.reward_weight > 0
    known = alone and rewarded and not config.reads_sampler
    if steps >= KERNEL_STEPS and known and unfit() is None:
        return "kernel"
    return "aot" if steps >= AUTO_STEPS else "false"


def choose(
    requested: str,
    config: Config,
    device: torch.device,
    package: Callable[[], Path],
    unfit: Callable[[], str | None],
) -> tuple[str, str | None]:
    """Choose false, jit, aot or kernel here; also return the reason for a fallback, or None.

    Builds nothing. ``package`` returns the path of the step's package, which may not exist; it is
    called only for aot on a CPU. ``unfit`` says what of the job the kernel does not compute.
    """
    own = [group for group in ("loss", "actor") if isinstance(getattr(config, group), OwnPart)]
    if isinstance(config.kl, RetrieveKLConfig) and config.kl.placement != "reward":
        charged = {"estimator": config.kl.estimator, "divergence": config.kl.divergence}
        own += [f"kl.{name}" for name, chosen in charged.items() if chosen == "custom"]
    if own and requested != "jit":
        # A package's key does not cover the user's sources.
        return "false", f"custom {' and '.join(own)} (compiled only with learner.compile=jit)"
    mode = decide(requested, config, device, unfit)
    if device.type != "cpu":
        return mode, None
    if mode == "kernel" and (what := unfit()):
        return "false", f"learner.compile=kernel does not compute {what}"
    if mode == "aot":
        try:
            if _load(package()) is not None:
                return "aot", None
        except Untrusted as error:
            return "false", str(error)
        except BadPackage:
            pass  # it is built again, with a line
    if mode != "false" and not cxx():
        return "false", f"learner.compile={mode} needs a C++ compiler; none is installed"
    return mode, None


@dataclass(frozen=True)
class Prepared:
    """A gradient step that is ready to be called."""

    step: Step
    mode: str  # false, jit, aot or kernel
    description: str  # the mode, in a line for the user
    library: str | None = (
        None  # of the kernel: its name has a hash of source, compiler and processor
    )


def prepare(
    requested: str,
    config: Config,
    problem: StepParts,
    example: Sequence[Tensor],
    say: Callable[[str], None] = lambda _: None,
) -> Prepared:
    """Make the step in the mode that :func:`choose` returns, or an eager step if that fails.

    ``example``: a step's arguments (flat, exp_avg, exp_avg_sq, count, rows, coefficients); the
    arguments of later calls must have the same layout.
    """
    package = partial(package_path, problem, example)
    unfit = partial(kernel_unfit, problem.agent, problem.loss)
    mode, why = choose(requested, config, example[0].device, package, unfit)
    try:
        if mode == "kernel":
            return _kernel(problem, example)
        if mode == "jit":
            return _jit(problem, example)
        if mode == "aot":
            return _package(problem, example, package(), say)
    except Exception as error:  # training can go on without compiler and cache
        why = f"learner.compile={mode} failed: {in_one_line(error)}"
    line = "update: eager" if why is None else f"update: eager; {why}"
    return Prepared(eager_step(problem), "false", line)


def _jit(problem: StepParts, example: Sequence[Tensor]) -> Prepared:
    """Compile a step now, by a trial call that leaves the parameters unchanged."""
    with _torchs_own_warnings(), compiling():
        # Without isolation, torch compiles at most eight different steps in a process.
        how = {"fullgraph": True, "dynamic": False, "isolate_recompiles": True}
        step: Step = torch.compile(pure_step(problem), **how)  # type: ignore[call-overload]
        if example[0].device.type == "cuda":
            captured = Captured(step, example)
            return Prepared(captured, "jit", "update: torch.compile, captured as a CUDA graph")
        step(*_copies(example))
    return Prepared(step, "jit", "update: torch.compile")


def kernel_unfit(agent: Agent, loss: PolicyLoss) -> str | None:
    """Say what of a job the kernel does not compute; its module is loaded only if it is asked."""
    from klrl.control.run.kernel import unfit

    return unfit(agent, loss)


def _kernel(problem: StepParts, example: Sequence[Tensor]) -> Prepared:
    """Load the kernel, and build it if the cache does not have it."""
    from klrl.control.run import kernel

    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in example)
    path, built = kernel.library(instructions())
    how = f"compiled, stored in {path.parent} for later runs" if built else "found in the cache"
    step = kernel.kernel_step(problem, path)
    return Prepared(step, "kernel", f"update: kernel in C++, {how}", path.stem)


# ------------------------------------------------------------------------------------ packages


def package_path(problem: StepParts, example: Sequence[Tensor]) -> Path:
    """Return the path of the step's package, which may not exist."""
    return cache_dir() / "update" / f"{package_key(problem, example)}.pt2"


def package_key(problem: StepParts, example: Sequence[Tensor]) -> str:
    """Return the name of the step's package: a hash of everything that determines the package.

    The hash covers the step's sources, settings and inputs' layout, the networks, the bounds or
    counts of the actions, torch's version and number of threads, and the processor.
    """
    family = problem.agent.family
    parts = (
        torch.__version__,
        torch.get_num_threads(),
        instructions(),
        _sources(),
        type(problem.loss).__name__,
        {k: v for k, v in asdict(problem.loss.config).items() if k not in NOT_COMPILED},
        problem.loss.anchor,
        problem.loss.reference_estimator,
        problem.loss.divergence.name,
        problem.loss.reference_estimator and problem.loss.reward_scale,
        problem.optim,
        str(problem.agent.policy_net),
        str(problem.agent.value_net),
        problem.agent.policy_net.masked,
        problem.agent.value_net.detach_trunk,
        problem.agent.policy_net.trunk is problem.agent.value_net.trunk,
        type(family).__name__,
        {k: v.tolist() if isinstance(v, Tensor) else v for k, v in vars(family).items()},
        str(problem.columns.shapes),
        [input_layout(value) for value in example],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _package(
    problem: StepParts, example: Sequence[Tensor], path: Path, say: Callable[[str], None]
) -> Prepared:
    description = f"update: package {path.name[:8]} found in the cache"
    try:
        loader = _load(path)
    except BadPackage as error:
        say(f"{error}")
        loader = None
    if loader is None:
        say("compiling the update, once for these settings (learner.compile=false skips this)")
        started = time.perf_counter()
        build_package(problem, example, path)
        seconds = time.perf_counter() - started
        description = f"update: compiled in {seconds:.0f} s, stored in {path.parent} for later runs"
        loader = _load(path)
    run = loader.run

    def step(*given: Tensor) -> Tensor:
        return run(list(given))[0]

    return Prepared(step, "aot", description)


class BadPackage(Exception):
    """A package that is damaged, belongs to a different user or cannot be loaded."""


def _load(path: Path) -> Any:
    """Load a package for calls from a single thread; return None if it does not exist."""
    try:
        if not path.exists():
            return None
    except PermissionError:  # the cache belongs to a different user
        return None
    private_folder(path.parent)
    try:
        check_digest(path)
        return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    except (Untrusted, OSError, RuntimeError) as error:
        raise BadPackage(f"package {path.name[:8]} is not used: {first_line(error)}") from error


def build_package(problem: StepParts, example: Sequence[Tensor], path: Path) -> None:
    """Trace, export and compile the step; write the package atomically."""
    from torch._inductor import aoti_compile_and_package
    from torch.fx.experimental.proxy_tensor import make_fx

    private_folder(path.parent)
    # A precompiled header costs a third of a build, and saves time only in later ones.
    how = {"aot_inductor.precompile_headers": any(path.parent.glob("*.pt2"))}
    with _torchs_own_warnings(), compiling(), replacing(path) as partial:
        # The step changes its arguments, so trace with copies.
        graph = make_fx(pure_step(problem))(*_copies(example))
        exported = torch.export.export(graph, tuple(_copies(example)))
        aoti_compile_and_package(exported, package_path=str(partial), inductor_configs=how)
        write_digest(path, partial)


@contextmanager
def _torchs_own_warnings() -> Iterator[None]:
    """Ignore warnings that torch 2.13 causes itself; ``-W error`` would turn them into errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        warnings.filterwarnings("ignore", "`torch.jit.script_method`", DeprecationWarning)
        warnings.filterwarnings("ignore", "Can't find Python.h", UserWarning)  # not needed here
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)  # on a GPU
        yield


def _copies(example: Sequence[Tensor]) -> list[Tensor]:
    return [value.detach().clone() for value in example]


def _sources() -> str:
    here = Path(__file__).parents[2]
    files = [f for name in _SOURCES for f in sorted((here / name).rglob("*.py")) or [here / name]]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------- GPU


class Captured:
    """A step as one CUDA graph; a call copies its minibatch to the graph's inputs."""

    def __init__(self, step: Step, example: Sequence[Tensor]) -> None:
        *self._state, rows, coef = example
        self._rows, self._coef = rows.clone(), coef.clone()
        before = _copies(self._state)
        try:
            from klrl.base.cuda_graph import capture

            self._graph, self._metrics = capture(
                lambda: step(*self._state, self._rows, self._coef), rows.device
            )
        finally:
            for value, old in zip(self._state, before, strict=True):
                value.copy_(old)

    def __call__(self, *given: Tensor) -> Tensor:
        """Run the graph; return a copy of the metrics, since the next run overwrites them."""
        *_, rows, coef = given
        self._rows.copy_(rows)
        self._coef.copy_(coef)
        self._graph.replay()
        return self._metrics.clone()
