"""A built-in task with pixels: catch a falling ball (``env=catch``).

The task is bsuite's Catch (Osband et al. 2020) with pictures of 42 x 42 pixels. A CNN learns it on
a CPU in minutes. Importing this module registers ``klrl/Catch-v0``. Imports no torch.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

ID = "klrl/Catch-v0"
#: The picture has ``CELLS`` x ``CELLS`` cells; a cell has ``PIXELS`` x ``PIXELS`` pixels.
CELLS, PIXELS = 7, 6
SIZE = CELLS * PIXELS
#: Steps until the ball reaches the bottom row.
STEPS = CELLS - 1


class Catch(gymnasium.Env[np.ndarray, np.int64]):
    """A ball falls from a random column, one cell per step; a paddle at the bottom must catch it.

    The observation is a picture [42, 42, 1] of uint8. The paddle moves left, stays or moves right.
    An episode has 6 steps; its return is 1 if the paddle catches the ball, else -1. A policy that
    sees the ball can always get 1; a blind policy gets -5/7 on average.
    """

    metadata: ClassVar[dict[str, object]] = {"render_modes": ["rgb_array"], "render_fps": 8}

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(0, 255, (SIZE, SIZE, 1), np.uint8)
        self.action_space = spaces.Discrete(3)
        self.render_mode = render_mode
        self._column = self._paddle = self._row = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[np.ndarray, dict[str, object]]:
        """Put the ball at the top of a random column, and the paddle in the middle."""
        super().reset(seed=seed)
        self._column, self._row = int(self.np_random.integers(CELLS)), 0
        self._paddle = CELLS // 2
        return self._picture(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        """Move the paddle by ``action - 1`` cells to the right, and the ball down by one cell."""
        self._paddle = min(max(self._paddle + int(action) - 1, 0), CELLS - 1)
        self._row += 1
        down = self._row == STEPS
        reward = 0.0 if not down else (1.0 if self._paddle == self._column else -1.0)
        return self._picture(), reward, down, False, {}

    def render(self) -> Any:
        """Return the picture as RGB, [42, 42, 3], if ``render_mode`` is rgb_array; else None."""
        return self._picture().repeat(3, axis=-1) if self.render_mode == "rgb_array" else None

    def _picture(self) -> np.ndarray:
        cells = np.zeros((CELLS, CELLS), np.uint8)
        cells[STEPS, self._paddle] = 128
        cells[self._row, self._column] = 255
        return np.kron(cells, np.ones((PIXELS, PIXELS), np.uint8))[..., None]


if ID not in gymnasium.registry:
    gymnasium.register(ID, Catch)
