"""Formats and prints text for people: tables, warnings, and a status line."""

from __future__ import annotations

import difflib
import shutil
import sys
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import TextIO

#: Unicode categories: control, format (bidi overrides, zero width) and surrogate characters, line
#: and paragraph separators.
_CONTROL = ("Cc", "Cf", "Cs", "Zl", "Zp")


def warn(line: str) -> None:
    """Print a line for the user on stderr; ignore a closed terminal."""
    with suppress(OSError):
        print(escaped(line), file=sys.stderr, flush=True)


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the most similar known name, for an error message; empty if none is similar."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


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


def _fitting(text: str, width: int) -> str:
    """Drop fields of ``a | b | c`` beyond ``width``, since a truncated number would be wrong."""
    first, *others = text.split(" | ")
    shown = first[:width]
    for each in others:
        if len(shown) + len(" | ") + len(each) <= width:
            shown += f" | {each}"
    return shown


class LiveLine:
    """A status line: updated in place on a terminal, otherwise printed as a new line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._latest = stream, ""
        self.live = stream.isatty()  # whether the stream can replace a line

    def show(self, text: str) -> None:
        """Replace the status line by a text."""
        self._latest = text
        if self.live:  # a terminal cannot replace a line that wraps
            text = _fitting(text, shutil.get_terminal_size().columns - 1)
        self._write(text + "\n" * (not self.live))

    def say(self, text: str) -> None:
        """Print a permanent line above the status line."""
        self._write(escaped_lines(text) + "\n")
        if self.live and self._latest:
            self.show(self._latest)

    def close(self) -> None:
        """End the status line, so that later text starts on a new line."""
        if self.live:
            self._stream.write("\n")
            self._stream.flush()
        self._latest = ""

    def _write(self, text: str) -> None:
        self._stream.write("\r\x1b[2K" * self.live + text)
        self._stream.flush()
