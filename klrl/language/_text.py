"""Other people's errors, told inside one line of ours."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def in_one_line(error: BaseException, limit: int = 200) -> str:
    """An error with its type: ``KeyError: 'answer'``."""
    text = " ".join(str(error).split())[:limit]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
