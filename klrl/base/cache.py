"""The user's cache folder: compiled updates and the small base model."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/klrl``, by default ``~/.cache/klrl``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "klrl"
