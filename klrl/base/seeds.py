"""Seeds: one number in the config, one independent stream per use."""

from __future__ import annotations

import zlib

import numpy as np


def derived_seed(seed: int, use: str, index: int = 0) -> int:
    """A seed for one use, far from the seeds of neighbouring runs.

    Copy i of an environment is seeded with seed + i, so runs with seeds 0 and 1 would share most
    of their episodes if the setting were used as it is.
    """
    stream = np.random.SeedSequence([seed, zlib.crc32(use.encode()), index])
    return int(stream.generate_state(1)[0] >> 1)
