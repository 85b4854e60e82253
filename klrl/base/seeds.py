"""Seeds: one number in the config, one independent stream per use."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def derived_seed(seed: int, use: str, index: int = 0) -> int:
    """A seed for one use, far from the seeds of neighbouring runs.

    Copy i of an environment is seeded with seed + i: with the setting itself, runs with seeds 0 and
    1 would share most of their episodes.
    """
    stream = np.random.SeedSequence([seed, zlib.crc32(use.encode()), index])
    return int(stream.generate_state(1)[0] >> 1)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch: a user's code may draw from any."""
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the global generators of Python, numpy and torch as they were."""
    from torchrl.checkpoint import GlobalRNGState

    generators = GlobalRNGState()
    before = generators.state_dict()
    try:
        yield
    finally:
        generators.load_state_dict(before)
