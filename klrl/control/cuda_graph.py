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
    """Run a function to warm up, then capture it; its tensors must stay at their addresses.

    Returns the graph and the function's outputs, which each replay overwrites.

    Raises:
        RuntimeError: the function does something that a graph cannot, such as reading a number.
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
            except RuntimeError as error:  # raised at the end of the capture; the cause is earlier
                raise (error.__context__ or error) from None
        outer.wait_stream(stream)
    return graph, outputs


#: Network -> layout of input and parameters -> its graph; None if it cannot be captured.
_captured: WeakKeyDictionary[nn.Module, dict[object, Forward | None]] = WeakKeyDictionary()


def captured_forward(net: nn.Module, example: Tensor, device: torch.device) -> Forward:
    """A network's forward as a graph that reads the parameters in place; one graph per layout.

    A network that cannot be captured runs without a graph, with a warning.
    """
    known = _captured.setdefault(net, {})
    places = tuple(value.data_ptr() for value in net.state_dict().values())
    layout = example.shape, example.dtype, places
    if layout not in known and None not in known.values():
        try:
            known[layout] = _captured_on(net, example.to(device))
        except Exception as error:  # the user's network may do what a graph cannot
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
