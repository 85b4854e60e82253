"""The gradient step of MLPs as one function of C++, ``kernel.cpp``, for ``learner.compile=kernel``.

A compiler builds the file once for a processor, in two seconds; it serves every size and setting.
The library is machine code in the user's cache, loaded as a package is: only if no other user can
write its folder, and if its hash equals the one that the build stored.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from klrl.base.cache import (
    Untrusted,
    cache_dir,
    check_digest,
    compiling,
    private_folder,
    write_digest,
)
from klrl.base.errors import ConfigError, first_line, in_one_line
from klrl.base.files import replacing
from klrl.control.policy.distributions import Categorical, Family, Normal, TanhNormalFamily
from klrl.control.policy.networks import Agent, Networks, PolicyNet, ValueNet, linears
from klrl.control.run.step import Step, StepParts
from klrl.losses.policy import ClipLoss, KLPENLoss, PolicyLoss, TRPOLoss
from klrl.runs.machine import cxx

SOURCE = Path(__file__).with_suffix(".cpp")
#: Not -ffast-math, since a NaN has to end a run.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC"),
)

# In the order of the enumerations of kernel.cpp.
_FAMILIES: tuple[type[Family], ...] = (Normal, TanhNormalFamily, Categorical)
_LOSSES: tuple[type[PolicyLoss], ...] = (ClipLoss, KLPENLoss, TRPOLoss)
_ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.Tanh, nn.ReLU, nn.ELU)
_CRITICS = ("l1", "l2", "smooth_l1")
_ESTIMATORS = (None, "exact", "k1", "k2", "k3")
DEEPEST = 16  # hidden layers

_WHOLE = (
    *("inputs", "actions", "depth", "family", "loss", "activation", "critic", "estimator"),
    *("normalize", "sum", "samples", "parameters", "columns", "log_std"),
)
_COLUMNS = (
    *("observation", "sample", "old_log_prob", "advantage", "value_target", "state_value"),
    *("loc", "scale", "ref_log_prob", "ref_loc", "ref_scale", "entropy_noise"),
)
_REAL = (
    *("clip_low", "clip_high", "critic_coeff", "clip_value", "entropy_bonus", "reward_scale"),
    *("log_half_widths", "eps", "max_grad_norm", "weight_decay"),
)
_Array = ctypes.POINTER(ctypes.c_int64)


class Spec(ctypes.Structure):
    """The settings of a run, as ``struct Spec`` of kernel.cpp has them."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _WHOLE),
        *(("widths", _Array), ("places", _Array)),
        *((name, ctypes.c_int64) for name in _COLUMNS),
        *((name, ctypes.c_double) for name in _REAL),
    )


def unfit(agent: Agent, loss: PolicyLoss) -> str | None:
    """Say what of a job the kernel does not compute; None if it computes the whole step.

    This depends on the job's settings alone, not on the machine.
    """
    policy, value, divergence = agent.policy_net, agent.value_net, loss.divergence
    reasons = {
        f"loss={loss.config.name}": type(loss) not in _LOSSES,
        "loss.kl_old=sampled": loss.kl_old == "sampled",
        "kl.estimator=custom": loss.reference_estimator not in _ESTIMATORS,
        f"kl.divergence={divergence.name}": loss.reference_estimator and not divergence.is_reverse,
        f"a distribution {agent.family.name}": type(agent.family) not in _FAMILIES,
        "action masks": policy.masked,
        "actor.share_trunk=true": policy.trunk is value.trunk,
        "these networks, only MLPs with tanh, relu or elu": (
            (type(policy), type(value)) != (PolicyNet, ValueNet)
            or _shape(policy) is None
            or _shape(policy) != _shape(value)
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _shape(net: PolicyNet | ValueNet) -> tuple[list[int], type[nn.Module]] | None:
    """Widths and activation of the hidden layers, if the kernel has such networks."""
    layers, between = linears(net.trunk), list(net.trunk)[1::2]
    plain = all(type(x) is nn.Linear and x.bias is not None for x in (*layers, net.head))
    kinds = {type(x) for x in between}
    if not plain or len(kinds) != 1 or not len(layers) == len(between) <= DEEPEST:
        return None
    kind = kinds.pop()
    return ([x.out_features for x in layers], kind) if kind in _ACTIVATIONS else None


# ------------------------------------------------------------------------------------ the library


def library(processor: str) -> tuple[Path, bool]:
    """Return the path of the kernel's library, and whether it was built now.

    ``processor``: a description; source, flags, compiler and processor determine the machine code.

    Raises:
        OSError, RuntimeError, Untrusted: there is no compiler, it failed, or the cache is unusable.
    """
    compiler = cxx()
    if compiler is None:
        raise RuntimeError("no C++ compiler is installed")
    version = _run(compiler, "--version")
    parts = (SOURCE.read_bytes(), FLAGS, version, processor)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
    path = cache_dir() / "update" / f"kernel-{key}.so"
    private_folder(path.parent)
    if path.exists():
        with suppress(Untrusted, FileNotFoundError):  # if damaged or without digest, build it again
            check_digest(path)
            return path, False
    with compiling(), replacing(path) as partial:
        _run(compiler, *FLAGS, "-o", str(partial), str(SOURCE))
        write_digest(path, partial)
    return path, True


def _run(*command: str) -> str:
    """Run a compiler, away from the current folder, which may be a stranger's."""
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", errors="replace")
    if done.returncode:
        said = first_line(RuntimeError(done.stderr.strip() or "it said nothing"))
        raise RuntimeError(f"{command[0]} failed with exit code {done.returncode}: {said}")
    return done.stdout


def same_library(processor: str, before: str | None) -> list[str]:
    """Find the kernel for a run that resumes; return a line if it is not the library ``before``.

    Raises:
        ConfigError: the kernel cannot be built.
    """
    try:
        path, _ = library(processor)
    except (OSError, RuntimeError, Untrusted) as error:
        raise ConfigError(
            "learner.compile: the run's update ran in the kernel (learner.compile=kernel), but "
            f"{in_one_line(error)}; resume it with a C++ compiler, since other updates round "
            "differently"
        ) from error
    if before in (None, path.stem):
        return []
    return [
        "resume: another compiler, processor or version of klrl built the kernel; "
        "the next rows may round differently"
    ]


# --------------------------------------------------------------------------------------- the step


def kernel_step(problem: StepParts, library: Path) -> Step:
    """Make the step from a :func:`library`; its tensors must be contiguous."""
    native = ctypes.CDLL(str(library))
    native.klrl_memory.restype = ctypes.c_int64
    steps = native.klrl_steps
    steps.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 2
    steps.restype = None
    spec = _spec(problem)
    floats = native.klrl_memory(ctypes.byref(spec), ctypes.c_int64(ctypes.sizeof(spec)))
    assert floats >= 0, "struct Spec of kernel.cpp has other fields"
    memory = torch.zeros(floats + 16)
    memory = memory[-memory.data_ptr() % 64 // 4 :]  # vectors start at multiples of 64 bytes
    count, at = len(problem.loss.measures) + 1, ctypes.byref(spec)  # keeps spec

    def step(*arguments: Tensor, batch: int = 0) -> Tensor:
        """As in step.py; with ``batch``, a step on each so many rows: metrics [steps, M]."""
        *state, rows, coef = arguments
        total = rows.shape[0]
        shape = (-(-total // batch), count) if batch else (count,)
        metrics = torch.empty(shape)
        places = (x.data_ptr() for x in (memory, *state, rows))
        steps(at, *places, total, batch or total, coef.data_ptr(), metrics.data_ptr())
        return metrics

    return step


def _spec(problem: StepParts) -> Spec:
    """Describe networks, loss, optimiser and the columns of a minibatch."""
    agent, loss, c = problem.agent, problem.loss, problem.loss.config
    policy, family, columns = agent.policy_net, agent.family, problem.columns
    starts = dict(zip(columns.shapes, _starts(columns.widths), strict=True))
    names = dict(zip(("loc", "scale"), family.param_keys, strict=False))
    keys = {"sample": family.sample_key, "old_log_prob": "action_log_prob", **names}
    keys |= {f"ref_{name}": f"ref_{key}" for name, key in names.items()}
    noise = columns.shapes.get("entropy_noise")
    widths = [layer.out_features for layer in linears(policy.trunk)]
    places, parameters, log_std = _places(agent.networks)
    low = high = 0.0
    if isinstance(loss, ClipLoss):
        low = loss.config.clip_epsilon
        high = loss.config.clip_epsilon_high or low
    half_width = family.half_width if isinstance(family, TanhNormalFamily) else torch.ones(1)
    return Spec(
        inputs=policy.inputs,
        actions=policy.outputs,
        depth=len(widths),
        family=_FAMILIES.index(type(family)),
        loss=_LOSSES.index(type(loss)),
        activation=_ACTIVATIONS.index(type(policy.trunk[1])),
        critic=_CRITICS.index(c.loss_critic_type),
        estimator=_ESTIMATORS.index(loss.reference_estimator),
        normalize=c.normalize_advantage,
        sum=c.reduction == "sum",
        samples=noise[0][0] if noise else 0,
        parameters=parameters,
        columns=sum(columns.widths),
        widths=(ctypes.c_int64 * len(widths))(*widths),
        places=(ctypes.c_int64 * len(places))(*places),
        log_std=log_std,
        **{name: starts.get(keys.get(name, name), 0) for name in _COLUMNS},
        clip_low=1 - low,
        clip_high=1 + high,
        critic_coeff=c.critic_coeff,
        clip_value=c.clip_value or 0,
        entropy_bonus=loss.entropy_bonus,
        reward_scale=loss.reward_scale,
        log_half_widths=float(half_width.double().log().sum()),
        eps=problem.optim.eps,
        max_grad_norm=problem.optim.max_grad_norm,
        weight_decay=problem.optim.weight_decay,
    )


def _starts(widths: Sequence[int]) -> list[int]:
    return [sum(widths[:i]) for i in range(len(widths))]


def _places(networks: Networks) -> tuple[list[int], int, int]:
    """Where (weight, bias) of each layer start in flat, policy first; its size; log_std's place."""
    order = networks.in_order()
    starts = _starts([p.numel() for p in order])
    at = {id(p): start for p, start in zip(order, starts, strict=True)}
    nets = (networks.policy, networks.value)
    layers = [layer for net in nets for layer in (*linears(net.trunk), net.head)]
    places = [at[id(p)] for layer in layers for p in (layer.weight, layer.bias)]
    log_std = networks.policy.log_std
    return places, sum(p.numel() for p in order), 0 if log_std is None else at[id(log_std)]
