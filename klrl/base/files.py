"""Files that appear whole or not at all: they are written beside their place and renamed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a text into a file that one process alone writes; a reader never sees half of it."""
    partial = path.with_suffix(".tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The same of a file, or a folder, that several processes may be writing.

    Yields:
        Where to write it, in a new folder beside ``path``; it takes its place on leaving. Where the
        writing failed nothing stays. A folder is not replaced, only made.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        partial = Path(folder) / path.name
        yield partial
        partial.replace(path)
