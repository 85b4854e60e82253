"""Save running episodes as seeds and actions.

Every reset is seeded. On resume, a copy is reset with its episode's seed and repeats the actions,
so an environment need not expose its state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch

#: Longest episode that is saved, in steps.
LONGEST = 20_000


class Episodes:
    """The running episodes of N copies that are stepped together.

    ``results``: structured array [N]: the last observation, reward and end flags of each copy.
    """

    def __init__(self, results: np.ndarray) -> None:
        rows = results.view(np.uint8).reshape(len(results), -1)
        self.rows = [row.data for row in rows]
        #: For each copy, a checksum of all observations, rewards and flags of its episode.
        self.digests = [0] * len(rows)
        self._steps = 0
        self._begun = np.zeros(len(rows), np.int64)
        self._actions: deque[np.ndarray] = deque(maxlen=LONGEST)

    def begin(self, index: int, observation: np.ndarray) -> None:
        """Begin an episode of copy ``index``, which was just reset."""
        self._begun[index] = self._steps
        self.digests[index] = crc32(observation.data)
        for _ in range(len(self._actions) - self._longest):
            self._actions.popleft()

    def act(self, actions: np.ndarray) -> None:
        """Record the actions [N, ...] of a step, before the copies take it."""
        self._steps += 1
        self._actions.append(actions.copy())

    @property
    def _longest(self) -> int:
        return self._steps - int(self._begun.min())

    def state(self) -> dict[str, object] | None:
        """Return the state for :func:`replayed`, with checksums; None if an episode is too long."""
        if self._longest > LONGEST:
            return None
        begun = (self._begun - self._begun.min()).tolist()
        actions = torch.from_numpy(np.array(list(self._actions)))
        return {"begun": begun, "actions": actions, "digests": self.digests.copy()}


def replayed(state: Mapping[str, Any]) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield the resets and steps of :meth:`Episodes.state` in order, as (mask [N], actions).

    The mask selects the copies to step; if actions is None, the copies to reset.
    """
    begun = np.array(state["begun"])
    for step, actions in enumerate([*state["actions"].cpu().numpy(), None]):
        if (begins := begun == step).any():
            yield begins, None
        if actions is not None:
            yield begun <= step, actions
