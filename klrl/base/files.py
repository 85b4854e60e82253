"""Atomic writes: a file is written under another name in the same folder, then renamed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Replace a file that only one process writes; a reader never sees half of it."""
    partial = path.with_suffix(".tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replace a file, or make a folder, that several processes may be writing.

    Yields:
        The path to write to, in a temporary folder beside ``path``; on leaving it is renamed to
        ``path``. If writing fails, nothing is left. An existing folder is not replaced.
    """
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        partial = Path(folder) / path.name
        yield partial
        partial.replace(path)
