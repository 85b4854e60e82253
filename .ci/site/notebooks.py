"""Cells of a tutorial's page: its one source; the notebook and the test are made of them.

A fenced block of ``bash`` has commands, a line each; one of ``python`` is executed, or written to
the file that its title names; others are shown only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
#: What a notebook needs before its first cell.
_SETUP = '# %pip install --quiet "klrl[{extra}]"\n%env WANDB_MODE=offline'


@dataclass(frozen=True)
class Cell:
    """A piece of a page; ``kind`` is text, python, file or bash."""

    kind: str
    text: str
    file: str = ""


def cells(page: str) -> Iterator[Cell]:
    """Yield a page's text and code in order."""
    end = 0
    for block in _FENCE.finditer(page):
        language, title, code = block.groups()
        if language not in ("bash", "python"):
            continue
        yield Cell("text", page[end : block.start()])
        end = block.end()
        yield Cell("file" if title and language == "python" else language, code, title or "")
    yield Cell("text", page[end:])


def commands(text: str) -> list[str]:
    """The commands of a cell; a line that ends in a backslash goes on in the next."""
    return re.sub(r" *\\\n *", " ", text).splitlines()


def notebook(page: str, extra: str) -> str:
    """Return the page as a Jupyter notebook, for a klrl with this extra."""
    made = [_code(0, _SETUP.format(extra=extra))]
    for number, cell in enumerate(cells(page), 1):
        text = cell.text.strip("\n")
        if cell.kind == "text":
            if text:
                made.append(
                    {"cell_type": "markdown", "metadata": {}, "source": text, "id": f"c{number}"}
                )
            continue
        if cell.kind == "bash":
            text = "\n".join(f"!{line}" for line in commands(text))
        elif cell.kind == "file":
            text = f"%%writefile {cell.file}\n{text}"
        made.append(_code(number, text))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _code(number: int, text: str) -> dict[str, object]:
    made: dict[str, object] = {"cell_type": "code", "metadata": {}, "outputs": []}
    return made | {"execution_count": None, "id": f"c{number}", "source": text}
