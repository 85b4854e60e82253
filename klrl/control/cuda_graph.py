"""A function, or a network's forward, as one CUDA graph."""

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
    """Run a function on tensors that stay where they are, then capture it.

    The graph, and what the function returned: each replay writes into these tensors.

    Raises:
        RuntimeError: the function does what a graph cannot hold, such as reading a number.
        UserWarning: the graph is empty, since the function ran on another device.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        stream, outer = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(outer)
        # Around the capture too: where that fails, torch 2.13 leaves its stream the current one.
        with torch.cuda.stream(stream), warnings.catch_warnings():
            warnings.filterwarnings("error", "The CUDA Graph is empty")
            for _ in range(3):  # kernels are chosen, and compiled, before a capture
                function()
            try:
                with torch.cuda.graph(graph, stream=stream):
                    outputs = function()
            except RuntimeError as error:  # of the end of the capture: what broke it came before
                raise (error.__context__ or error) from None
        outer.wait_stream(stream)
    return graph, outputs


#: By network: its graph for a layout of input and parameters; None where it cannot be captured.
_captured: WeakKeyDictionary[nn.Module, dict[object, Forward | None]] = WeakKeyDictionary()


def captured_forward(net: nn.Module, example: Tensor, device: torch.device) -> Forward:
    """A forward as a graph that reads the parameters in place, captured once for a layout.

    A network that cannot be captured runs without; a line says so, once.
    """
    known = _captured.setdefault(net, {})
    places = tuple(value.data_ptr() for value in net.state_dict().values())
    layout = example.shape, example.dtype, places
    if layout not in known and None not in known.values():
        try:
            known[layout] = _captured_on(net, example.to(device))
        except Exception as error:  # what a graph cannot hold, in a network of the user's
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
