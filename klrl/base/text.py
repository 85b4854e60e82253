"""Formats text for people: tables and warnings."""

from __future__ import annotations

import difflib
import os
import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

#: Unicode categories: control, format (bidi overrides, zero width) and surrogate characters, line
#: and paragraph separators.
_CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")


def warn(line: str) -> None:
    """Print a line for the user on stderr; ignore a closed terminal."""
    with suppress(OSError):
        try:
            print(escaped(line), file=sys.stderr, flush=True)
        except RuntimeError:  # a signal's handler was called inside a write of the same stream
            os.write(2, f"{escaped(line)}\n".encode(errors="backslashreplace"))


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the most similar known name, for an error message; empty if none is similar."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def nearest_option(wrong: str, usage: str) -> str:
    """Suggest the option of a command's usage for the unknown one that an error message names."""
    known = re.findall(r"--[\w-]+", usage)
    unknown = (name for name in re.findall(r"--[\w-]+", wrong) if name not in known)
    return nearest(next(unknown, ""), known)


def counted(number: int, what: str) -> str:
    """Format a number with its noun: 1 line, 2,000 lines."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def escaped(text: str) -> str:
    """Replace line ends, control and format characters by Python escapes: the text is one line."""
    if text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c) in _CONTROL else c
        for c in text
    )


def escaped_lines(text: str) -> str:
    """Escape each line of a text, see :func:`escaped`."""
    return "\n".join(map(escaped, text.split("\n")))


def text_table(rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: int = 0) -> str:
    """Format a table; columns are as wide as their widest cell and two spaces apart.

    Control characters in a cell are escaped, since they could move the terminal's cursor.

    Args:
        rows: the cells of each line, with the heads first; a short row is padded with empty cells.
        right: the indices of the right-aligned columns, from 0.
        indent: number of spaces before each line.
    """
    count = max(map(len, rows), default=0)
    filled = [[*map(escaped, row), *[""] * (count - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in filled) for i in range(count)]
    return "\n".join(
        " " * indent
        + "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in filled
    )
