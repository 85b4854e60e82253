"""Writes and reads ``metrics.jsonl`` and ``samples.jsonl``: one JSON object per line."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from klrl.base.files import ROWS, names, read_plain, to_append, to_update
from klrl.base.text import warn
from klrl.runs.folder import run_id
from klrl.runs.metrics import RUN, Row

#: A position in a file: the number of ``bytes`` before it, and their ``sha256``.
Mark: TypeAlias = Mapping[str, Any]
#: Maximum number of lines that a message lists.
_MOST_NAMED = 5


class RowFile:
    """A file to which rows are appended; a row is written whole or not at all.

    The first row creates the file, since not every run has samples.

    Args:
        axis: the metric that counts frames: the domain's ``axis``.
        after: on resume, the frames of the checkpoint; later rows are cut off, since the resumed
            run computes them again.
        mark: on resume, the :meth:`mark` in the checkpoint; empty if the checkpoint has none.
        run: the run's id; each line begins with it.
    """

    def __init__(
        self,
        path: Path,
        axis: str,
        after: int | None = None,
        mark: Mark | None = None,
        run: str | None = None,
    ) -> None:
        self._path, self._of = path, {} if run is None else {RUN: run}
        if after is not None:
            cut(path, axis, after, mark or {})
        self._sha = hashlib.sha256(read_plain(path, ROWS) if path.exists() else b"")
        self._file = to_append(path) if path.exists() else None
        self._bytes = path.stat().st_size if self._file else 0

    def check(self) -> None:
        """Check that the path still names the file, and that the file has every written row.

        Raises:
            OSError: the file was removed, replaced or cut, as by an environment's code.
        """
        if self._file is None:
            return
        status = os.fstat(self._file.fileno())
        if not (names(self._path, status) and status.st_size >= self._bytes):
            raise OSError(
                f"{self._path}: was removed, replaced or cut during the run; put it back if you "
                "can, then resume the run"
            )

    def log(self, row: Row) -> None:
        """Append one line."""
        self.log_all([row])

    def log_all(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append one line per row.

        Raises:
            OSError: writing failed, as on a full disk; no partial line is left.
        """
        file = self._file = self._file or to_append(self._path)
        lines = (json.dumps({**self._of, **row}, allow_nan=False) + "\n" for row in rows)
        whole = content = "".join(lines).encode()
        length = os.fstat(file.fileno()).st_size
        try:
            while content:
                content = content[file.write(content) :]
        except OSError as error:
            with suppress(OSError):
                file.truncate(length)
            error.filename = str(self._path)
            raise
        self._sha.update(whole)
        self._bytes += len(whole)

    def mark(self) -> dict[str, object]:
        """Sync the file to the disk; return the number of its ``bytes`` and their ``sha256``.

        Each row updates the digest, so that no checkpoint has to read the file.
        """
        if self._file is None:
            return {"bytes": 0}
        os.fsync(self._file.fileno())
        length = os.fstat(self._file.fileno()).st_size
        return {"bytes": length, "sha256": self._sha.hexdigest()}

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()


def read_rows(path: Path, say: Callable[[str], None] = warn) -> list[Row]:
    """Read the rows of a ``metrics.jsonl`` by :func:`each_row`."""
    return list(each_row(read_plain(path, ROWS).split(b"\n"), path, say))


def rows_so_far(run: Path) -> list[Row]:
    """Read the rows of a run, [] without a file; skip bad lines silently."""
    path = run / "metrics.jsonl"
    return read_rows(path, say=lambda line: None) if path.is_file() else []


def each_row(
    lines: Sequence[bytes], path: Path, say: Callable[[str], None] = warn
) -> Iterator[Row]:
    """Yield the rows among the lines of a ``metrics.jsonl``, without the run's id.

    Skips bad lines, rows that are out of order, and rows whose run id is not the manifest's. At the
    end, calls ``say`` with a message about the bad lines, and with one about the skipped rows. A
    partial last line, which a running or killed process may leave, is skipped silently.
    """
    run, last = run_id(path.parent), -1.0
    bad, other = list[int](), list[int]()
    for number, line in enumerate(lines, 1):
        row = parse_row(line) if line else None
        if row is None:
            bad += [number] * (number < len(lines) and len(bad) <= _MOST_NAMED)
            continue
        at = row.get("iteration")
        if run_named_in(line, run) != run or (at is not None and not at > last):  # refuses NaN, too
            other.append(number)
        else:
            last = last if at is None else at
            yield row
    report_lines(path, bad, say)
    report_lines(path, other, say, "of another run, or out of order")


def parse_row(line: bytes) -> Row | None:
    """Parse a line as a row: name -> number or null; return None if the line is no row."""
    row = {name: value for name, value in (_parse(line) or {"": ""}).items() if name != RUN}
    return row if all(map(_is_value, row.values())) else None


def run_named_in(line: bytes, run: str | None, unnamed: str | None = None) -> object:
    """Return the run's id in a line, or ``unnamed`` if it has none; ``run`` is the expected id."""
    if (
        run is None or f'"{run}"'.encode(errors="replace") in line[:64]
    ):  # avoids parsing a long line
        return run
    return (_parse(line) or {}).get(RUN, unnamed)


def _is_value(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() < 1024  # otherwise it does not fit a float
    return value is None or isinstance(value, float)


def report_lines(
    path: Path, numbers: Sequence[int], say: Callable[[str], None] = warn, what: str = "not a row"
) -> None:
    """Report in one message which lines of a file are skipped, if any."""
    if numbers:
        named = ", ".join(map(str, numbers[:_MOST_NAMED])) + ", ..." * (len(numbers) > _MOST_NAMED)
        say(f"{path}: skipped line{'s' * (len(numbers) > 1)} {named}: {what}")


def cut(path: Path, axis: str, after: int, mark: Mark) -> None:
    """Cut off the rows after a checkpoint; keep all lines before it, even bad ones.

    ``axis`` counts frames, ``after`` are those of the checkpoint, and ``mark`` is its
    :meth:`RowFile.mark`. If the file has changed since, the rows' frames decide where to cut.
    """
    content = read_plain(path, ROWS) if path.exists() else b""
    length, digest = mark.get("bytes"), mark.get("sha256")
    same = length == 0 or digest == hashlib.sha256(content[:length]).hexdigest()
    kept = content.removesuffix(b"\n")
    end, bad = (length or 0, []) if same else _end_of_kept(kept, axis, after)
    if length is not None and len(content) < length:
        warn(
            f"{path}: has {len(content):,} bytes, but had {length:,} at the checkpoint: rows "
            f"before {after:,} {axis} are missing"
        )
    elif digest is not None and not same and not bad:
        warn(f"{path}: rows up to {after:,} {axis} were changed after the checkpoint")
    if not content:
        return
    report_lines(path, bad)
    with to_update(path) as file:
        file.truncate(min(end, len(content)))
        if end > len(content):  # end a partial line, so that the next row starts a new line
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _end_of_kept(content: bytes, axis: str, after: int) -> tuple[int, list[int]]:
    """Return the length in bytes of the rows up to ``after`` frames; and the bad lines' numbers."""
    length, bad = 0, list[int]()
    for number, line in enumerate(content.split(b"\n"), 1):
        frames = (_parse(line) or {}).get(axis)
        if not isinstance(frames, int | float):
            bad.append(number)
        elif frames > after:
            break
        length += len(line) + 1
    return length, bad


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
