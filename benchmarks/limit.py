"""The least time that one core needs for a frame, from its measured GFLOP/s and bandwidth.

The work is that of all contenders: both networks forward in the rollout; in each of 10 epochs both
forward and backward, and for every minibatch of 64 one step of Adam, which reads and writes seven
numbers for each parameter. No contender can be below the greater of both times.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

#: Inputs and outputs of the policy.
SIZES = {"pendulum": (3, 1), "cartpole": (4, 2), "half_cheetah": (17, 6), "hopper": (11, 3)}
EPOCHS, MINIBATCH, ADAM = 10, 64, 7


def work(env: str, width: int) -> tuple[float, float, int]:
    """Return FLOP and bytes per frame, and the bytes of parameters, gradient and moments."""
    inputs, outputs = SIZES[env]
    products = sum(inputs * width + width**2 + width * last for last in (outputs, 1))
    backward = 2 * products - 2 * inputs * width  # no gradient of the observation
    flop = 2 * (products + EPOCHS * (products + backward))
    return flop, 4 * ADAM * products * EPOCHS / MINIBATCH, 4 * 4 * products


def limit(env: str, width: int = 64) -> dict[str, float]:
    """Measure this core now: GFLOP/s of a product, GB/s of a copy as large as Adam's state."""
    torch.set_num_threads(1)
    flop, moved, state = work(env, width)
    a = torch.randn(512, 512)
    product = torch.empty_like(a)
    source = torch.randn(state // 8)
    target = torch.empty_like(source)
    gflops = 2e-9 * 512**3 / _least(lambda: torch.mm(a, a, out=product))
    bandwidth = 1e-9 * state / _least(lambda: target.copy_(source))
    us = max(1e-3 * flop / gflops, 1e-3 * moved / bandwidth)
    return {"us": round(us, 2), "gflops": round(gflops, 1), "gb_per_second": round(bandwidth, 1)}


def _least(call: Callable[[], object], tries: int = 200) -> float:
    """The shortest of many calls in seconds: what a busy machine adds is left out."""
    times = []
    for _ in range(tries):
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return min(times)
