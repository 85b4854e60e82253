"""A CPU build of torch with two CUDA devices: ``python -m tests.device.standin MODULE [ARG ...]``.

The library of ``standin.cpp`` is the device; this file is what ``torch.cuda`` says of it. Importing
it loads both, which must be before torch is imported, in a process of its own. ``torch.compile``
traces and guards as ever and runs eagerly: there is no Triton.
"""

from __future__ import annotations

import ctypes
import runpy
import sys
import warnings
from types import SimpleNamespace
from typing import Any

from tests.device.library import build, torch_folder

DEVICES = 2


def _load() -> None:
    if "torch" in sys.modules:
        raise ImportError("torch is imported already: the stand-in for CUDA comes before it")
    torchs = (f"lib/lib{name}.so" for name in ("c10", "torch_cpu", "torch"))
    for name in (*map(torch_folder().joinpath, torchs), build()):
        ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)


_load()

import torch  # noqa: E402
import torch.cuda.graphs  # noqa: E402
import torch.cuda.random  # noqa: E402

_ops: Any = torch.ops.standin
_cuda: Any = torch.cuda


def counts() -> dict[str, int]:
    """Launches, copies and waits since :func:`clear`, and bytes of memory."""
    pairs = (line.split("=") for line in _ops.counts().split())
    return {name: int(number) for name, number in pairs}


clear, one_stream = _ops.clear, _ops.one_stream


def _index(device: Any = None) -> int:
    if device is None or isinstance(device, int):
        return _ops.current() if device is None else device
    named = torch.device(device).index
    return int(_ops.current() if named is None else named)


class Stream:
    """A name: all work is done at once."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", _index(device))
        self.device_index = self.device.index

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None:
        _ops.synchronize()


class Event:
    """Has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _ops.synchronize()


_default = [Stream(i) for i in range(DEVICES)]
_streams = [*_default]


class StreamContext:
    """As torch's: the stream, and its device."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            i = self.stream.device_index
            self._before = _ops.current(), _streams[i]
            _ops.set_current(i)
            _streams[i] = self.stream

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            device, _streams[self.stream.device_index] = self._before
            _ops.set_current(device)


class CUDAGraph:
    """Recorded calls."""

    _calls: int | None = None

    def capture_begin(self) -> None:
        self._calls = _ops.capture_begin()

    def capture_end(self) -> None:
        if not _ops.capture_end():
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be "
                "captured on wrong device or stream.",
                stacklevel=2,
            )

    def replay(self) -> None:
        _ops.replay(self._calls)

    def __del__(self) -> None:
        if self._calls is not None:
            _ops.forget(self._calls)


class graph:
    """As torch's, which leaves its stream where ``capture_end`` raises."""

    default_capture_stream: Stream | None = None

    def __init__(self, cuda_graph: CUDAGraph, stream: Stream | None = None) -> None:
        if stream is None and graph.default_capture_stream is None:
            graph.default_capture_stream = Stream()
        stream = stream or graph.default_capture_stream
        self._stream, self._graph = StreamContext(stream), cuda_graph

    def __enter__(self) -> None:
        _ops.synchronize()
        self._stream.__enter__()
        self._graph.capture_begin()

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()
        self._stream.__exit__(*error)


class device:
    """The current one."""

    def __init__(self, named: Any) -> None:
        self._index = _index(named)

    def __enter__(self) -> None:
        self._before = _ops.current()
        _ops.set_current(self._index)

    def __exit__(self, *_: object) -> None:
        _ops.set_current(self._before)


def _compile(function: Any = None, **options: Any) -> Any:
    """Inductor's warning, and its trace run eagerly."""

    def backend(traced: Any, example: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager
        from torch._inductor.compile_fx import _warn_tf32_disabled

        _warn_tf32_disabled()
        return aot_eager(traced, example)

    kept = ("fullgraph", "dynamic", "isolate_recompiles")
    options = {name: value for name, value in options.items() if name in kept}
    return _torchs_compile(function, backend=backend, **options)


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _torchs_clone(storage)
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole.clone().untyped_storage()


_torchs_compile, _torchs_clone = torch.compile, torch.UntypedStorage.clone
_PROPERTIES = SimpleNamespace(
    name="stand-in",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)
_PATCHES: dict[Any, dict[str, Any]] = {
    _cuda: {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "device": device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": _ops.current,
        "set_device": lambda d: _ops.set_current(_index(d)),
        "synchronize": lambda d=None: _ops.synchronize(),
        "current_stream": lambda d=None: _streams[_index(d)],
        "default_stream": lambda d=None: _default[_index(d)],
        "set_sync_debug_mode": lambda mode: _ops.waits_raise(mode == "error"),
        "get_device_name": lambda d=None: _PROPERTIES.name,
        "get_device_properties": lambda d=None: _PROPERTIES,
        "get_device_capability": lambda d=None: (9, 0),
        "get_arch_list": lambda: ["sm_90"],
        "mem_get_info": lambda d=None: (80 << 30, 80 << 30),
        "memory_allocated": lambda d=None: counts()["memory:live"],
        "max_memory_allocated": lambda d=None: counts()["memory:peak"],
        "memory_reserved": lambda d=None: counts()["memory:live"],
        "reset_peak_memory_stats": lambda d=None: None,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "default_generators": tuple(map(_ops.default_generator, range(DEVICES))),
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "_is_in_bad_fork": lambda: False,
        "_initialized": True,
    },
    torch.cuda.random: {
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "current_device": _ops.current,
        "device_count": lambda: _cuda.device_count(),
    },
    torch.cuda.graphs: {"CUDAGraph": CUDAGraph, "graph": graph},
    torch._C: {"_cuda_isCurrentStreamCapturing": lambda: False},
    torch.UntypedStorage: {"clone": _clone},
    torch: {"Event": Event, "compile": _compile},
}
for _where, _names in _PATCHES.items():
    for _name, _value in _names.items():
        setattr(_where, _name, _value)


if __name__ == "__main__":
    sys.modules["tests.device.standin"] = sys.modules["__main__"]  # loaded once
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
