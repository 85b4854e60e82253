"""A result's folder in ``docs/results/``: README.md, figures.csv, about.json; and the index.

What is outside the two marks of a README is written by hand and kept.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.peers.common import versions
from benchmarks.results import ROOT, commit, cpu_name, machine
from benchmarks.shipped.sweeps import Labelled, Plays, Sweep
from benchmarks.shipped.tables import Measure, Row, markdown, write_csv
from klrl.report.measures import seconds
from klrl.report.statistics import ENOUGH

FOLDER = ROOT / "docs" / "results"
START = "<!-- measured: written by benchmarks/shipped -->"
END = "<!-- end of measured -->"
LIMITS = "## Limits"
INTERVAL = (
    "Each cell: mean over {seeds} seeds [its 95 % interval by Student's t], interquartile mean "
    "(IQM) and, where high or low values are bad, the worst seed. The interval does not cover rare "
    "bad seeds that were not among these. figures.csv has every seed."
)
RANGE = (
    "Each cell: the lowest and the highest of {seeds} seeds, and their mean. These are too few "
    "seeds for an interval. figures.csv has every seed."
)


@dataclass(frozen=True)
class Section:
    """A table, a picture, or both."""

    title: str
    note: str = ""  # what the columns mean, how things were computed
    rows: Sequence[Row] = ()
    measures: Sequence[Measure] = ()
    picture: str = ""  # a PNG in the folder
    alt: str = ""  # what it shows, in words


class Result:
    """One result that ships: its YAML, and the module that computes and draws it."""

    def __init__(self, name: str, module: Any) -> None:
        self.name, self._module = name, module
        path = Path(__file__).with_name(f"{name}.yaml")
        self.given: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.number, self.title = self.given["number"], self.given["title"]
        self.question, self.chosen = self.given["question"], self.given["chosen"]
        self.limits, self.seeds = self.given["limits"], self.given.get("seeds", 5)
        self.sweeps = [
            Sweep(**{**each, "words": tuple(each["words"].split())})
            for each in self.given["sweeps"]
        ]

    @property
    def folder(self) -> Path:
        """Where it ships."""
        return FOLDER / self.name

    @property
    def picture(self) -> Path:
        """Of its first section."""
        return self.folder / f"{self.name}.png"

    def prepare(self) -> None:
        """What comes before the sweeps."""
        if hasattr(self._module, "prepare"):
            self._module.prepare()

    def measures(self, section: int = 0) -> list[Measure]:
        """The columns of a section's table."""
        given = self.given["sections"][section]["measures"]
        bounds = [tuple(each.get("bounds", (-inf, inf))) for each in given]
        return [Measure(**{**m, "bounds": b}) for m, b in zip(given, bounds, strict=True)]

    def make(self, runs: Sequence[Labelled], plays: Plays) -> list[Section]:
        """Draw the picture, and fill the tables; the module may add sections without one."""
        sections = []
        for number, made in enumerate(self._module.make(self, runs, plays)):
            if isinstance(made, Section):
                sections.append(made)
                continue
            told = self.given["sections"][number]
            look = (self.picture.name, told["alt"]) if "alt" in told else ()
            note = " ".join([told["note"], *getattr(self._module, "more", lambda _: [])(runs)])
            sections.append(Section(told["title"], note, made, self.measures(number), *look))
        return sections


def write_result(result: Result) -> Path:
    """Compute, draw and write one result from its runs; returns the folder."""
    runs = [run for sweep in result.sweeps for run in sweep.runs()]
    folder = result.folder
    folder.mkdir(parents=True, exist_ok=True)
    plays = Plays(result.sweeps[0].folder.parent / "plays.json")
    sections = result.make(runs, plays)
    check_seeds(sections, result.seeds)
    about = {
        "number": result.number,
        "title": result.title,
        "machine": {"cpu": cpu_name(), "name": machine()},
        "versions": versions(),
        "commit": commit(),
        "runs": len(runs),
        "seconds": round(sum(seconds(each.run) for each in runs)),
    }
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    tabled = [section for section in sections if section.rows]
    _write_figures(tabled, folder / "figures.csv")
    start = f"# {result.title}\n\n{result.question}\n"
    replace_measured(folder / "README.md", _measured(result, sections, about), start)
    return folder


def check_seeds(sections: Sequence[Section], seeds: int) -> None:
    """Every setting has all its seeds in every measure."""
    for section in sections:
        for row in section.rows:
            for key, values in row.values.items():
                count = int(np.isfinite(values).sum())
                if count != seeds:
                    setting = ",".join(f"{name}={label}" for name, label in row.labels.items())
                    raise SystemExit(f"{key} of {setting} has {count} seeds of {seeds}")


def _write_figures(sections: Sequence[Section], path: Path) -> None:
    """All tables in one file."""
    rows = [
        Row({"table": section.title, **row.labels}, row.values)
        for section in sections
        for row in section.rows
    ]
    measures = list(dict.fromkeys(m for section in sections for m in section.measures))
    write_csv(rows, measures, path)


def _measured(result: Result, sections: Sequence[Section], about: dict[str, Any]) -> str:
    parts = []
    tabled = [section for section in sections if section.rows]
    statistics = INTERVAL if result.seeds >= ENOUGH else RANGE
    for section in sections:
        parts.append(f"## {section.title}")
        if section.picture:
            parts.append(f"![{section.alt}]({section.picture})")
        if section.note:
            parts.append(section.note)
        if section.rows:
            parts.append(markdown(section.rows, section.measures))
        if section is tabled[-1]:
            parts.append(statistics.format(seeds=result.seeds))
    told = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    commands = [f"python {shlex.join(sweep.command(1))}" for sweep in result.sweeps]
    parts += [
        LIMITS,
        result.limits,
        "## How",
        f"    make results-{result.number}",
        "It runs these commands, then writes the tables and pictures:",
        "\n".join(f"    {command}" for command in commands),
        f"{result.chosen}",
        f"{about['runs']} runs; their iterations took {about['seconds']:,} seconds in all. "
        f"Machine: {about['machine']['name']}, which also did other work. Versions: {told}.",
    ]
    return "\n\n".join(parts)


def replace_measured(path: Path, text: str, start: str) -> None:
    """Put text between the two marks of a page; ``start`` is what a new page begins with."""
    old = path.read_text(encoding="utf-8") if path.exists() else f"{start}\n{START}\n{END}\n"
    before, _, rest = old.partition(START)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{path.name}: the marks {START} and {END} are missing")
    path.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def write_index(folder: Path = FOLDER) -> None:
    """``docs/results/README.md``: what there is, from each folder's about.json."""
    found = [(json.loads(p.read_text()), p.parent.name) for p in folder.glob("*/about.json")]
    lines = ["| | result | runs | seconds of all iterations | machine |", "|---|---|---|---|---|"]
    for about, name in sorted(found, key=lambda pair: pair[0]["number"]):
        took, where = f"{about['seconds']:,}", about["machine"]["name"]
        # A bar in a title would end the table's cell.
        title = about["title"].replace("|", r"\|")
        link = f"[{title}]({name}/README.md)"
        lines.append(f"| {about['number']} | {link} | {about['runs']} | {took} | {where} |")
    start = (
        "# Results\n\n"
        "    make results        # all of them; finished runs are not repeated\n"
        "    make results-4      # one of them\n\n"
        "Every seed that was run is in its figures.csv. Each page says how its settings were\n"
        "chosen, and on which seeds.\n"
    )
    replace_measured(folder / "README.md", "\n".join(lines), start)
