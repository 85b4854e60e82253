"""The update's CUDA code, compiled without a GPU: ``python -m tests.device.cross_compile sm_90``.

klrl compiles as for a GPU, on the stand-in: Inductor writes each graph's code, Triton compiles its
kernels. The graph then runs eagerly, since nothing here can launch them. Matrix products are
cuBLAS's. Exit 1 where a graph falls short.
"""

from __future__ import annotations

from tests.device import standin  # isort: skip  before torch

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch import config as aot_config
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

import klrl
from klrl.base.text import text_table
from tests.control.updates import made

COPYING = ("env=gym", "env.id=tests.control.toys:klrl-test/Copying-v0")
FAMILIES = {
    "normal": ("env=pendulum",),
    "tanh_normal": ("env=pendulum", "actor=tanh_normal"),
    "categorical": ("env=cartpole",),
    "multi_categorical": (*COPYING, "+env.kwargs.action=multi_discrete"),
    "bernoulli": (*COPYING, "+env.kwargs.action=multi_binary"),
}
LOSSES = ("klpen", "klpen_held", "clip")
PLACEMENTS = {"reward": (), "loss": ("kl.placement=loss", "kl.estimator=k2")}
SMALL = (
    *("env.num_envs=4", "collector.steps=32", "learner.minibatches=4", "learner.compile=jit"),
    *("learner.epochs=1", "logger=none", "eval.every=0", "device=cuda:0"),
)
MOST_KERNELS = 40
HEAD = ["family", "loss", "KL in", "arch", "kernels", "launches", "CPU s"]

_codes: list[str] = []
_cubins: dict[str, list[bytes]] = {}


class Driver(CudaDriver):
    """Names the target and asks no libcuda, which is not here."""

    def __init__(self, arch: int) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", arch, 32)


def _precompile(kernel: CachingAutotuner, *_: Any, **__: Any) -> None:
    """As torch's, every configuration, but no launchers."""
    kernel._precompile_worker()
    for result in kernel.compile_results:
        compiled = result.kernel
        _cubins.setdefault(compiled.metadata.name, []).append(compiled.asm["cubin"])


def _backend(traced: Any, example: Any) -> Any:
    compile_fx(traced, example)
    return traced


def _cross_compile_for(arch: int) -> None:
    standin._PROPERTIES.major, standin._PROPERTIES.minor = divmod(arch, 10)
    torch.cuda.get_device_capability = lambda _=None: divmod(arch, 10)
    torch._C._cuda_getCurrentRawStream = lambda _: 0
    driver.set_active(Driver(arch))
    torch.compile = lambda f, **how: standin._torchs_compile(f, backend=_backend, **how)
    CachingAutotuner.precompile = _precompile
    GraphLowering.save_output_code = staticmethod(_codes.append)
    aot_config.enable_autograd_cache = config.fx_graph_cache = False  # each code is written
    config.shape_padding = False  # it times matrix products on the device
    config.compile_threads, config.use_static_triton_launcher = 1, False


def _faults(code: str, arch: int) -> Iterator[str]:
    kernels = set(re.findall(r"async_compile\.triton\('(\w+)'", code))
    cubins = [cubin for name in kernels for cubin in _cubins.get(name, [b""])]
    # An ELF header's flags name the architecture.
    if not all(cubin[:4] == b"\x7fELF" and arch in cubin[48:52] for cubin in cubins):
        yield f"not every kernel is a cubin for sm_{arch}"
    if not 0 < len(kernels) <= MOST_KERNELS:
        yield f"{len(kernels)} kernels"
    if host := re.findall(r"async_compile\.cpp\w*|(?<== )empty_strided_cpu\w*(?=\()", code):
        yield f"work on the host: {', '.join(sorted(set(host)))}"


def main(arch: int) -> None:
    """A row per family and loss; sm_80 has the KL where the others do not: reward or loss."""
    _cross_compile_for(arch)
    rows, faults = [], []
    for i, (family, of_family) in enumerate(FAMILIES.items()):
        for j, loss in enumerate(LOSSES):
            placement = list(PLACEMENTS)[(i + j + (arch == 80)) % 2]
            words = (*SMALL, *of_family, f"loss={loss}", *PLACEMENTS[placement])
            training, batch = made(klrl.compose, *words)
            said: list[str] = []
            training.parts.learner.steps.say = said.append
            _codes.clear()
            _cubins.clear()
            before = sum(os.times()[:4])
            training.parts.learner.update(batch, 0.0, 0.3)
            seconds = sum(os.times()[:4]) - before
            found = [fault for code in _codes for fault in _faults(code, arch)]
            if said != ["update: torch.compile, captured as a CUDA graph"] or len(_codes) != 1:
                found.append(f"{len(_codes)} graphs; {' '.join(said)}")
            faults += [f"{family}, {loss}, KL in the {placement}: {fault}" for fault in found]
            code = "".join(_codes)
            launches = len(re.findall(r"^ +triton_\w+\.run\(|^ +extern_kernels\.", code, re.M))
            kernels = code.count("async_compile.triton(")
            counts = [f"{kernels}", f"{launches}", f"{seconds:.1f}"]
            rows.append([family, loss, placement, f"sm_{arch}", *counts])
    print(text_table([HEAD, *rows], right=[4, 5, 6]))
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main(int(sys.argv[1].removeprefix("sm_")))
