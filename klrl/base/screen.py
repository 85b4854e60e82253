"""Prints text and tables: on a terminal with rich, which is imported there; elsewhere plain."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from klrl.base.text import escaped, escaped_lines, text_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

#: Style -> the words that have it on a terminal.
_STYLES = {
    "green": "finished|ok|yes|RIGHT",
    "cyan": "running",
    "yellow": "waiting|interrupted",
    "red": "failed|refused|broken|OFF|WRONG|no(?=: )",
}
#: A line of a closing block: a label of at most 24 characters before a colon or a number.
_LABELLED = re.compile(r" *(?:(.{1,24}?)(?:: |, (?=by )| (?=-?\d)))?(.*)")


def console_of(stream: TextIO) -> Console | None:
    """Return rich's console for a terminal that can move its cursor; None for another stream."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    from rich.console import Console

    return Console(file=stream, highlight=False)


def styled(text: str, style: str = "") -> Text:
    """Return lines in which states have a colour, without control characters."""
    from rich.text import Text

    result = Text(escaped_lines(text), style)
    for each, words in _STYLES.items():
        result.highlight_regex(rf"\b(?:{words})\b", each)
    return result


def show(text: str, stream: TextIO | None = None, style: str = "") -> None:
    """Print lines; a terminal breaks them between words, and shows states in colour."""
    stream = sys.stdout if stream is None else stream
    if console := console_of(stream):
        console.print(styled(text, style))
    else:
        print(text, file=stream, flush=True)


def show_table(rows: Sequence[Sequence[str]], right: Collection[int] = (), indent: int = 0) -> None:
    """Print a table, see :func:`text_table`.

    A terminal leaves out empty columns, and breaks the last column between words. If it is too
    narrow for the others, each row becomes a paragraph, in which no cell is broken.
    """
    if (console := console_of(sys.stdout)) is None:
        print(text_table(rows, right, indent))
        return
    from rich.table import Table

    heads, *body = [[*map(escaped, row)] for row in rows]
    kept = [i for i in range(len(heads)) if any(row[i] for row in body)]
    *widths, last = [max(len(row[i]) for row in (heads, *body)) for i in kept]
    if sum(widths) + 2 * len(widths) + max(last // 3, min(last, 20)) > console.width:
        for row in body:
            console.print(styled(_paragraph([(heads[i], row[i]) for i in kept], console.width)))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(heads))
    for i in kept:
        side: Any = "right" if i in right else "left"
        table.add_column(heads[i], justify=side, no_wrap=i != kept[-1])
    for row in body:
        table.add_row(*(styled(row[i]) for i in kept))
    console.print(table)


def _paragraph(cells: Sequence[tuple[str, str]], width: int) -> str:
    """Lay out a row's cells, each with its head; a cell with letters needs none."""
    known = [
        cell if cell.upper() != cell.lower() else f"{head} {cell}" for head, cell in cells if cell
    ]
    text = "   ".join(each.strip().replace(" ", "\xa0") for each in known)  # which does not break
    how: Any = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "  "}
    return textwrap.fill(text, width, **how).replace("\xa0", " ")


def show_block(text: str) -> None:
    """Print a heading and indented lines; on a terminal as a table of labels and values."""
    if console_of(sys.stdout):
        head, *lines = text.splitlines()
        show(head, style="bold")
        found = filter(None, map(_LABELLED.match, lines))
        show_table([("", ""), *(each.groups("") for each in found)])
    else:
        print(text)
