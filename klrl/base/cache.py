"""Where klrl keeps, per user, what it made once: compiled updates and the small base model."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/klrl``, by default ``~/.cache/klrl``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "klrl"
