"""Plain text: tables, and lines for the user."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress


def warn(line: str) -> None:
    """Print a line for the user on stderr; a terminal that was closed is no error."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def text_table(rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: int = 0) -> str:
    """Columns as wide as their widest cell, two spaces apart; no space at the end of a line.

    Args:
        rows: the cells, with the heads as first row; a short row is padded with empty cells.
        right: the columns that are right-aligned, counted from 0.
        indent: spaces before each line.
    """
    count = max(map(len, rows), default=0)
    filled = [[*row, *[""] * (count - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in filled) for i in range(count)]
    return "\n".join(
        " " * indent
        + "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in filled
    )
