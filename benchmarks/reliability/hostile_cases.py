"""Hostile run, sweep, model and cache folders: the cases of hostile.yaml."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.reliability.hostile_edits import EDITS, JOB
from benchmarks.reliability.hostile_stock import Stock, table


@dataclass(frozen=True)
class Case:
    """A hostile folder: the edits that make it of the stock, and the commands that are given it."""

    name: str
    prepare: Callable[[Stock], None]
    commands: tuple[str, ...]
    quick: tuple[str, ...]  # of --quick
    cwd: str = "."  # where they are given, below the working folder
    codes: tuple[int, ...] = (0, 2)  # exit codes that are right
    lines: int = 2  # that stderr may have
    slow: bool = False  # only where everything is tried
    fed: str = ""  # a text that may be neither printed raw nor stand raw in a page


def cases() -> list[Case]:
    """All of them."""
    return [case for row in table()["cases"] for case in _of_row(row, table()["sets"])]


def _of_row(row: Mapping[str, Any], sets: Mapping[str, list[str]]) -> Iterator[Case]:
    loops = {
        key: values if isinstance(values, dict) else dict(zip(values, values, strict=True))
        for key, values in row.get("for", {}).items()
    }
    commands = _commands(row["commands"], sets)
    for chosen in itertools.product(*(values.items() for values in loops.values())):
        given = {f"<{key}>": value for key, (_, value) in zip(loops, chosen, strict=True)}
        name = row["name"]
        for key, (said, _) in zip(loops, chosen, strict=True):
            name = name.replace(f"<{key}>", said)
        more = {key: row[key] for key in ("cwd", "lines", "slow") if key in row}
        if "codes" in row:
            more["codes"] = tuple(row["codes"])
        yield Case(
            name,
            partial(_prepare, edits=_filled(row.get("edits", []), given)),
            commands,
            commands if row.get("quick") == "all" else _quick(row.get("quick", []), name, sets),
            fed=_filled(row.get("fed", ""), given),
            **more,
        )


def _commands(named: Sequence[str], sets: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Each name of a set in the place of its commands, and once."""
    found: dict[str, None] = {}
    for name in named:
        found |= dict.fromkeys(_commands(sets[name], sets) if name in sets else (name,))
    return tuple(found)


def _quick(given: Sequence[Any], name: str, sets: Mapping[str, list[str]]) -> tuple[str, ...]:
    if not given or isinstance(given[0], str):
        return _commands(given, sets)
    fitting = (named for pattern, named in given if re.search(pattern, name))
    return _commands(next(fitting, ()), sets)


def _filled(value: Any, given: Mapping[str, Any]) -> Any:
    """Values in the place of <key>: the whole value, or a part of a text."""
    if isinstance(value, dict):
        return {key: _filled(each, given) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, given) for each in value]
    if isinstance(value, str) and value in given:
        return given[value]
    if isinstance(value, str):
        for key, said in given.items():
            value = value.replace(key, said) if isinstance(said, str) else value
    return value


def _prepare(stock: Stock, edits: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    for edit in edits:
        for name, arguments in edit.items():
            EDITS[name](stock, **_at(stock, arguments))


def _at(stock: Stock, value: Any) -> Any:
    """Absolute paths in the place of WORK, RUN and VICTIM; the sweep's job in that of JOB."""
    if isinstance(value, dict):
        return {key: _at(stock, each) for key, each in value.items()}
    if not isinstance(value, str):
        return value
    value = re.sub(r"\bJOB\b", JOB, value)
    for word, path in (("WORK", stock.work), ("VICTIM", stock.victim), ("RUN", stock.work / "run")):
        value = re.sub(rf"^{word}\b", str(path), value)
    return value
