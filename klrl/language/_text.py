"""Other people's errors, told inside one line of ours."""

from __future__ import annotations


def in_one_line(error: BaseException, limit: int = 200) -> str:
    """An error with its type: ``KeyError: 'answer'``."""
    text = " ".join(str(error).split())[:limit]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
