"""Films an episode as an MP4 in full size and as a small GIF."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klrl.base.files import make_folder, replacing
from klrl.runs.machine import require

if TYPE_CHECKING:
    import numpy as np

#: A GIF's maximum width and height in pixels; its maximum number of pictures per second.
_WIDTH, _SPEED = 320, 20


@dataclass(frozen=True)
class Film:
    """The result of a filmed episode."""

    steps: int
    score: float | None  # the episode's return; None if it was cut off


def check_encoders() -> None:
    """Refuse to film where the extra ``video`` is not installed."""
    for package in ("imageio", "imageio_ffmpeg", "PIL"):
        require(package, "--video", "pip install 'klrl[video]'")


def draw_without_display() -> None:
    """Let MuJoCo and SDL draw without a display; call this before either is imported."""
    if "DISPLAY" not in os.environ and "WAYLAND_DISPLAY" not in os.environ:
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


class Camera:
    """Writes pictures, uint8 [height, width, 3], to an MP4 and a GIF."""

    def __init__(self, mp4: Path, gif: Path) -> None:
        self._mp4, self._gif = mp4, gif
        self._film: Any = None
        self._pictures: list[Any] = []
        self._taken = 0

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the GIF in pixels."""
        width, height = self._pictures[0].size
        return width, height

    def start(self, speed: float) -> None:
        """Open the MP4, of ``speed`` pictures per second."""
        import imageio

        self._film = imageio.get_writer(
            self._mp4, format="FFMPEG", fps=speed, macro_block_size=1, ffmpeg_log_level="error"
        )
        self._every = max(1, math.ceil(speed / _SPEED))
        self._milliseconds = round(1000 * self._every / speed)

    def take(self, picture: np.ndarray) -> None:
        """Add a picture."""
        import numpy as np
        from PIL import Image

        # An MP4 needs an even height and width: if odd, repeat the last row or column.
        odd = ((0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0))
        self._film.append_data(np.pad(picture, odd, mode="edge"))
        if self._taken % self._every == 0:
            image = Image.fromarray(picture)
            image.thumbnail((_WIDTH, _WIDTH))
            self._pictures.append(image.quantize(dither=Image.Dither.NONE))
        self._taken += 1

    def finish(self) -> None:
        """Write both files."""
        self.close()
        first, *others = self._pictures
        first.save(
            self._gif, save_all=True, append_images=others, duration=self._milliseconds, loop=0
        )

    def close(self) -> None:
        """Close the MP4's encoder."""
        if self._film is not None:
            self._film.close()


@contextmanager
def filming(folder: Path, name: str) -> Iterator[Camera]:
    """Open a camera for ``NAME.mp4`` and ``NAME.gif``; if filming fails, keep the earlier files."""
    make_folder(folder)
    with replacing(folder / f"{name}.mp4") as mp4, replacing(folder / f"{name}.gif") as gif:
        camera = Camera(mp4, gif)
        try:
            yield camera
            camera.finish()
        finally:
            camera.close()
