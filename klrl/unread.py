"""A rule about a setting that a valid config may hold and yet never read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unread:
    """Refuse an override that nothing would read.

    Attributes:
        key: of the setting, as in ``loss.gain``.
        unread: whether this job, a ``Config`` or a ``LanguageConfig``, never reads it.
        reason: why, and the remedy.
    """

    key: str
    unread: Callable[[Any], bool]
    reason: str
