"""``metrics.jsonl`` and ``samples.jsonl``: a JSON object per line, appended, never rewritten."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from klrl.base.text import warn
from klrl.runs.metrics import Row

#: How many bad lines are named.
_NAMED = 5


class RowFile:
    """A file of rows, to be appended to; a row is written at once, or not at all.

    Args:
        path: the file.
        axis: the metric that counts the frames: the domain's ``axis``.
        after: on resume, the frames of the checkpoint; later rows are cut off, since the resumed
            run makes them again.
        length: on resume, the file's bytes at the checkpoint; None if that does not tell.
    """

    def __init__(
        self, path: Path, axis: str, after: int | None = None, length: int | None = None
    ) -> None:
        self._path = path
        if after is not None:
            cut(path, axis, after, length)
        self._file = path.open("ab", buffering=0)

    def log(self, row: Row) -> None:
        """Append one line."""
        self.log_all([row])

    def log_all(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per row.

        Raises:
            OSError: as on a full disk; no half line is left.
        """
        content = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        length = os.fstat(self._file.fileno()).st_size
        try:
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(length)
            error.filename = str(self._path)
            raise

    def length(self) -> int:
        """The file's bytes, which the disk has confirmed."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path, say: Callable[[str], None] = warn) -> list[Row]:
    """The rows of a ``metrics.jsonl``.

    A line that is no row is left out. So is, without a word, a last one that has no end: it is
    being written, or a kill cut it.

    Args:
        path: the file.
        say: takes a line that names the others.
    """
    *rows, last = map(parse_row, path.read_bytes().split(b"\n"))
    tell_bad_lines(path, [number for number, row in enumerate(rows, 1) if row is None], say)
    return [row for row in (*rows, last) if row is not None]


def parse_row(line: bytes) -> Row | None:
    """The row of a line: names and numbers (or null). None where it holds something else."""
    row = _parse(line)
    return row if row is not None and all(map(_is_value, row.values())) else None


def _is_value(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() < 1024  # else it is no float
    return value is None or isinstance(value, float)


def tell_bad_lines(path: Path, numbers: Sequence[int], say: Callable[[str], None] = warn) -> None:
    """Say in one line which lines of a file are no rows, if any."""
    if numbers:
        named = ", ".join(map(str, numbers[:_NAMED])) + ", ..." * (len(numbers) > _NAMED)
        what = f"line {named} is no row" if len(numbers) == 1 else f"lines {named} are no rows"
        say(f"{path}: {what}, and left out")


def cut(path: Path, axis: str, after: int, length: int | None) -> None:
    """Cut off the rows after a checkpoint; what is before it stays as it is, bad lines too.

    Args:
        path: the file.
        axis: names the frames in a row.
        after: the frames of the checkpoint.
        length: the file's bytes then; None if the checkpoint does not tell.
    """
    content = path.read_bytes() if path.exists() else b""
    if length is not None and len(content) < length:
        warn(
            f"{path}: has {len(content):,} bytes, and had {length:,} at the checkpoint: rows "
            f"before {after:,} {axis} are missing"
        )
    if not content:
        return
    ends: list[int] = []
    frames: list[float | None] = []
    end = 0
    for line in content.removesuffix(b"\n").split(b"\n"):
        end = min(end + len(line) + 1, len(content))
        ends.append(end)
        value = (_parse(line) or {}).get(axis)
        frames.append(value if isinstance(value, int | float) else None)
    kept = _lines_kept(ends, frames, after, length)
    tell_bad_lines(path, [n for n, each in enumerate(frames[:kept], 1) if each is None])
    end = ends[kept - 1] if kept else 0
    with path.open("r+b") as file:
        file.truncate(end)
        if end and content[end - 1 : end] != b"\n":  # a line that was cut stays one of its own
            file.seek(end)
            file.write(b"\n")


def _lines_kept(
    ends: Sequence[int], frames: Sequence[float | None], after: int, length: int | None
) -> int:
    """How many lines are from before the checkpoint; ``frames`` is None for a bad line."""
    before = [n for n, each in enumerate(frames, 1) if each is not None and each <= after]
    later = [n for n, each in enumerate(frames) if each is not None and each > after]
    least, most = max(before, default=0), min(later, default=len(frames))
    exact = ends.index(length) + 1 if length in ends else 0 if length == 0 else -1
    if least <= exact <= most:
        return exact
    # The file was changed, or the checkpoint is an older klrl's: no row before it may go.
    reached = after == 0 or (least > 0 and frames[least - 1] == after)
    return least if reached else max(least, most)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
