"""Are two runs equal to the bit? ``klrl diff RUN RUN --bits``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.runs.metrics import TIMES, Row
from klrl.runs.rows import read_rows

#: Components of a checkpoint that are compared: all parameters, and the moments that move them.
_COMPARED = ("agent", "reference", "optimizer")


def compare_bits(first: Path, second: Path) -> tuple[bool, str]:
    """Compare every row, times aside, and the parameters of the last checkpoints.

    Returns whether they are equal, and the first difference or what is equal, in a line.
    """
    rows = _rows(first), _rows(second)
    difference = next(_differences(*rows), None)
    if difference is not None:
        return False, difference
    equal, told = _compare_parameters(first, second)
    return equal, f"equal to the bit: {len(rows[0])} rows; {told}" if equal else told


def _rows(run: Path) -> list[Row]:
    path = run / "metrics.jsonl"
    try:
        return read_rows(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give another run") from error


def _differences(first: Sequence[Row], second: Sequence[Row]) -> Iterator[str]:
    """Each metric that is not the same, in the order of the rows."""
    for number, (mine, other) in enumerate(zip_longest(first, second), 1):
        if mine is None or other is None:
            runs = ("first", "second") if other is None else ("second", "first")
            count = min(len(first), len(second))
            yield f"row {number}: only the {runs[0]} run has it, the {runs[1]} has {count}"
            return
        for name in [*mine, *(name for name in other if name not in mine)]:
            values = [repr(row[name]) if name in row else "not there" for row in (mine, other)]
            if name not in TIMES and values[0] != values[1]:
                where = f"iteration {mine.get('iteration', number)}"
                yield f"{where}: {name} is {values[0]} and {values[1]}"


def _compare_parameters(first: Path, second: Path) -> tuple[bool, str]:
    from klrl.runs.checkpoint import digests  # which imports torch

    told = [digests(run, "last", _COMPARED) for run in (first, second)]
    for run, held in zip((first, second), told, strict=True):
        if held is None:
            return True, f"parameters not compared: {run} has no whole checkpoint of this format"
    (frames, mine), (others, theirs) = [held for held in told if held is not None]
    if frames != others:
        return False, f"rows are equal, the last checkpoints are of {frames:,} and {others:,}"
    for name in _COMPARED:
        if mine.get(name) != theirs.get(name):
            return False, f"rows are equal, the {name} of the last checkpoints ({frames:,}) is not"
    return True, f"parameters at {frames:,}, SHA-256 {mine.get('agent', '-')[:12]}"
