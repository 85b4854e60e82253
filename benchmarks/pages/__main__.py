"""``python -m benchmarks.pages``: write the tables of docs/results/ from the committed cells.

A table is between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; all else on a page is
written by hand and kept.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

from benchmarks.pages import mujoco, predictors, staleness
from benchmarks.pages.tables import Measure, escaped, markdown, read_figures
from benchmarks.results import ROOT, short_commit, table

FOLDER = ROOT / "docs" / "results"
_TABLE = re.compile(r"(<!-- table: (.*?) -->\n\n).*?(\n\n<!-- end of table -->)", re.DOTALL)
#: Name of a table -> what is between its marks.
Tables = dict[str, str]


def measures(result: str) -> list[Measure]:
    """Read the columns of a result's table."""
    columns = yaml.safe_load(Path(__file__).with_name("columns.yaml").read_text("utf-8"))
    return [Measure(**each) for each in columns[result]]


def figures(result: str, folder: Path) -> Tables:
    """Make the one table of a result whose cells are figures.csv."""
    return {"figures": markdown(read_figures(folder / "figures.csv"), measures(result))}


def topk(folder: Path) -> Tables:
    """Make a table for each direction of the KL: of the farthest teacher, at four sizes."""
    with (folder / "figures.csv").open(newline="", encoding="utf-8") as file:
        found = [r for r in csv.DictReader(file) if r["teacher"] == "far"]
    heads = ["form", "tokens", "k", "value / exact", "negative", "cosine", "cosine of all"]
    tables = {}
    for kl in ("reverse", "forward"):
        lines = [
            [
                *(r["form"], r["of"], f"{int(r['k']):,}"),
                *(f"{float(r['value']) / float(r['exact']):.3f}", f"{float(r['negative']):.0%}"),
                *(f"{float(r[key]):.3f}" for key in ("cosine", "cosine_all")),
            ]
            for r in found
            if r["kl"] == kl and r["k"] in ("1", "16", "256", "4096")
        ]
        tables[kl] = table(heads, lines)
    return tables


def index(folder: Path) -> Tables:
    """Make the list of the results, from each folder's about.json."""
    found = [(json.loads(p.read_text("utf-8")), p.parent.name) for p in folder.glob("*/about.json")]
    lines = []
    for about, name in sorted(found, key=lambda pair: pair[0]["number"]):
        (title,) = escaped([about["title"]])
        told = [f"[{title}]({name}/README.md)", str(about["runs"]), f"{about['seconds']:,}"]
        of = [about["machine"]["name"], about["versions"]["klrl"], short_commit(about["commit"])]
        lines.append([str(about["number"]), *told, *of])
    heads = ["", "result", "runs", "seconds of all iterations", "machine", "klrl", "commit"]
    return {"results": table(heads, lines)}


PAGES: dict[str, Callable[[Path], Tables]] = {
    **{name: partial(figures, name) for name in ("controllers", "frontier", "smollm")},
    "mujoco": lambda folder: mujoco.tables(folder, measures("mujoco")),
    "predictors": predictors.tables,
    "topk": topk,
    "staleness": staleness.tables,
    "": index,
}


def page_of(name: str, folder: Path = FOLDER) -> tuple[Path, str]:
    """Return a page's path, and its text with every table made anew."""
    path = folder / name / "README.md"
    made, text = PAGES[name](folder / name), path.read_text(encoding="utf-8")
    marked = [mark[1] for mark in _TABLE.findall(text)]
    if sorted(marked) != sorted(made):
        raise SystemExit(f"{path}: has the tables {marked}, not {list(made)}")
    return path, _TABLE.sub(lambda mark: mark[1] + made[mark[2]] + mark[3], text)


def main() -> None:
    for name in PAGES:
        path, text = page_of(name)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
