"""Run folders made by hand, for the tests of ``klrl.report`` and ``klrl.report.diff``."""

import html
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

from tests.runs.commands import exits

ROWS = 20


def write_run(folder: Path, *, seed=0, rows=None, status="finished", config=None, **manifest):
    """A run folder; ``config`` is laid over one of three groups, ``rows`` over :func:`rows_of`."""
    settings = {
        "frames": 2000,
        "seed": seed,
        "env": {"id": "Toy-v1"},
        "kl": {"name": "legacy", "coef": 0.1},
        "loss": {"name": "klpen", "dtarg": 0.01},
        "logger": {"name": "none"},
    }
    for group, values in (config or {}).items():
        before = settings.get(group, {})
        settings[group] = {**before, **values} if isinstance(values, dict) else values
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(settings))
    argv = ["/somewhere/bin/python", "-m", "klrl", f"kl.coef={settings['kl']['coef']}"]
    rows = rows_of() if rows is None else rows
    manifest = {
        "klrl": "0.3.0",
        "numerics": 2,
        "domain": "language" if any("samples" in row for row in rows) else "control",
        "status": status,
        "seed": seed,
        "argv": [*argv, f"seed={seed}"],
        "pid": None,
        "started": "2026-01-01T00:00:00+00:00",
        "versions": {"numpy": "2.0"},
        **manifest,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows_of(reward=0.0, kl=1.0, kl_old=0.01):
    """Rows whose reward rises by one per iteration up to ``reward``."""
    return [
        {
            "iteration": i,
            "frames": 100 * i,
            "reward/episode": reward - ROWS + i,
            "kl/ref/exact": kl,
            "kl/old/exact": kl_old,
            "kl/ref/coef": 0.1,
            "kl/old/beta": 1.0,
            "time/iteration": 0.5,
            "time/frames_per_second": 200.0,
        }
        for i in range(1, ROWS + 1)
    ]


def write_runs(root: Path):
    """Two coefficients of two modes, three seeds each, with jobs that failed and broke."""
    # (mode, coef) -> final reward of seed 0, KL; seeds add 0, 2 and 10.
    table = {
        ("legacy", 0.1): (100.0, 4.0),
        ("legacy", 1.0): (50.0, 1.0),
        ("retrieve", 0.1): (120.0, 4.0),
        ("retrieve", 1.0): (40.0, 1.0),
    }
    for (mode, coef), (reward, kl) in table.items():
        for seed, more in enumerate((0.0, 2.0, 10.0)):
            write_run(
                root / f"{mode}_{coef}_{seed}",
                seed=seed,
                rows=rows_of(reward + more, kl),
                config={"kl": {"name": mode, "coef": coef}},
            )
    error = "iteration 5: the loss is nan; try a smaller optim.lr <"
    write_run(root / "failed", seed=3, status="failed", rows=rows_of()[:4], error=error)
    write_run(root / "broken", seed=4)
    (root / "broken" / "metrics.jsonl").write_text('{"reward/raw": 1}\n')
    return root


def write_sweep(root: Path, *jobs):
    """A ``sweep.json`` of (name, words, status, error)."""
    told = [
        {"name": n, "overrides": w, "identity": n, "status": s, "error": e} for n, w, s, e in jobs
    ]
    root.mkdir(parents=True, exist_ok=True)
    text = {"klrl": "0.3.0", "commands": ["python -m klrl -m kl.coef=0,1 seed=0,1"], "jobs": told}
    (root / "sweep.json").write_text(json.dumps(text))


#: Markup that shows itself: an element, a script, a handler, the end of the element around it.
MARKUP = (
    "\"'></script></td><script>window.planted=1</script><style>*{color:red}</style>"
    "<img id=planted src=x onerror=window.planted=1>&lt;]]>-->"
)


def write_marked_up(root: Path, text: str = MARKUP):
    """Runs and a sweep with ``text`` in every string that a reader may meet."""
    name = "<img id=planted src=x onerror=window.planted=1>"
    told = {"klrl": text, "host": text, "versions": {text: text}, "error": text, "argv": [text]}
    for i, status in enumerate(("finished", "finished", "failed", text)):
        rows = [{**row, text: 1.0, "eval/return": 1.0} for row in rows_of(10.0 + i, 1.0 + i)]
        config = {
            "env": {"id": text},
            "kl": {"name": text, "coef": float(i), "estimator": text},
            "loss": {"name": f"{text}{i}"},
            text: {text: f"{text}{i}"},
        }
        write_run(root / f"{name}{i}", rows=rows, config=config, status=status, **told)
    write_run(root / f"{name}klrl", config={"env": {"id": "Toy-v1"}}, **{**told, "klrl": {text: 1}})
    write_run(root / f"{name}broken", **told)
    (root / f"{name}broken" / "metrics.jsonl").write_text(text)
    write_sweep(root, (text, [f"kl.coef={text}"], text, text))
    (root / "sweep.json").write_text(
        (root / "sweep.json").read_text().replace("python -m klrl", json.dumps(text)[1:-1])
    )
    return root


class Page(HTMLParser):
    """What a page holds, as a browser reads it.

    ``cells`` of all tables, small lines after ``|``; ``charts``: title -> its SVG; ``labels`` of
    the boxes.
    """

    def __init__(self, text):
        super().__init__()
        self.links, self.ids, self.cells, self._cell, self._small = [], [], [], False, ""
        self.tags, self.handlers = Counter(), []
        self.feed(text)
        figures = re.findall(r"<figcaption>(.*?)<small>.*?(<svg.*?</svg>)", text, re.S)
        self.charts = {html.unescape(title): svg for title, svg in figures}
        self.labels = [
            html.unescape(each) for each in re.findall("<span>(.*?)</span></label>", text)
        ]
        self.jobs, self.commands = (
            html.unescape("".join(re.findall(f'id="{of}".*?<pre>(.*?)</pre>', text, re.S)))
            for of in ("jobs", "commands")
        )

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.links += [v for k, v in attributes.items() if k in ("href", "src", "srcset")]
        self.handlers += [k for k in attributes if k.startswith("on")]
        self.tags[tag] += 1
        self.ids += [attributes["id"]] if "id" in attributes else []
        self._small = "|" if tag == "small" else ""
        if tag in ("td", "th"):
            # A row's first cell is its header.
            self._cell = tag == "td" or attributes["scope"] == "row"
            self.cells += [""] * self._cell

    def handle_endtag(self, tag):
        self._cell &= tag not in ("td", "th")

    def handle_data(self, text):
        if self._cell:
            self.cells[-1] += self._small + text

    def row(self, name, columns):
        """The first cells of the first row of that name."""
        i = self.cells.index(name)
        return self.cells[i + 1 : i + 1 + columns]


def page_of(root: Path, *words: str) -> tuple[str, Page]:
    """The page of the runs in a folder, as text and read."""
    assert exits("report", str(root), *words) == 0
    text = (root / "report" / "report.html").read_text()
    return text, Page(text)
