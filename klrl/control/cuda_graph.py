"""A function as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def capture(function: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """Run a function on tensors that stay where they are, then capture it.

    The graph, and what the function returned: each replay writes into these tensors.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels are chosen, and compiled, before a capture
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph, outputs
