"""Capture a function, or a network's forward, as one CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from klrl.base.errors import in_one_line
from klrl.base.text import warn

T = TypeVar("T")
Forward: TypeAlias = Callable[[Tensor], tuple[Tensor, ...]]


def capture(function: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """Warm a function up and capture it; tensors that it reads must stay at their addresses.

    Returns the graph and the function's outputs, which each replay overwrites.

    Raises:
        RuntimeError: the function makes a call that no graph can contain, such as ``Tensor.item``.
        UserWarning: the graph is empty, since the function ran on a different device.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        stream, outer = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(outer)
        # The stream context also encloses the capture: torch 2.13 does not restore the stream after
        # a failed capture.
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.filterwarnings("error", "The CUDA Graph is empty")
            for _ in range(3):  # kernels must be chosen and compiled before a capture
                function()
            try:
                with torch.cuda.graph(graph, stream=stream):
                    outputs = function()
            except RuntimeError as error:  # raised after the call; ``__context__`` is the cause
                raise (error.__context__ or error) from None
        outer.wait_stream(stream)
    return graph, outputs


#: Network -> (input's shape and dtype, weights' addresses) -> graph; None if the capture failed.
_captured: WeakKeyDictionary[nn.Module, dict[object, Forward | None]] = WeakKeyDictionary()


def captured_forward(net: nn.Module, example: Tensor, device: torch.device) -> Forward:
    """Return a network's forward as a CUDA graph, captured once for each input shape and dtype.

    The graph reads the parameters in place. If the capture fails, a warning is printed and the
    network runs without a graph.
    """
    known = _captured.setdefault(net, {})
    places = tuple(value.data_ptr() for value in net.state_dict().values())
    layout = example.shape, example.dtype, places
    if layout not in known and None not in known.values():
        try:
            known[layout] = _captured_on(net, example.to(device, copy=True))
        except Exception as error:  # a custom network may do what a graph cannot contain
            warn(f"the policy acts without a CUDA graph: {in_one_line(error)}")
            known[layout] = None
    return known.get(layout) or (lambda observation: net(observation.to(device)))


def _captured_on(net: nn.Module, given: Tensor) -> Forward:
    graph, outputs = capture(lambda: net(given), given.device)

    def replay(observation: Tensor) -> tuple[Tensor, ...]:
        given.copy_(observation)
        graph.replay()
        return outputs

    return replay
