"""Derives independent seeds from the one seed of a config, and seeds global generators."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def derived_seed(seed: int, use: str, index: int = 0) -> int:
    """Derive a seed for one use, independent of the seeds derived from ``seed + 1`` and so on.

    Copy i of an environment is seeded with the derived seed plus i. If copy i were seeded with
    ``seed + i``, runs with seeds 0 and 1 would share most of their episodes.
    """
    stream = np.random.SeedSequence([seed, zlib.crc32(use.encode()), index])
    return int(stream.generate_state(1)[0] >> 1)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch, which the user's code may use."""
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators of Python, numpy and torch at the end of the context."""
    from torchrl.checkpoint import GlobalRNGState

    generators = GlobalRNGState()
    before = generators.state_dict()
    try:
        yield
    finally:
        generators.load_state_dict(before)


class Stream:
    """A separate random stream: a state that is swapped into torch's global generator."""

    def __init__(self, seed: int) -> None:
        import torch

        self.state = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Let torch's global generator draw from this stream; restore the generator afterwards."""
        import torch

        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(before)
