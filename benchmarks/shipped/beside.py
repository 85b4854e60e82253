"""Trained policies beside best-of-n and the optimum: rows of a table, and the picture."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.best_of_n import best_of, best_of_n_kl, tilted
from benchmarks.shipped.draw import BLACK, BLUE, GREEN, ORANGE, line, panels
from benchmarks.shipped.tables import Row
from klrl.report.statistics import Array

#: Proxy and gold scores [prompts, samples] of the base model.
Scores = tuple[Array, Array]
#: The optimum: c of E[proxy] - c * KL; it is not shown where a tenth of the prompts have fewer
#: effective samples than LEAST.
TEMPERATURES = (2.0, 1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02)
LEAST = 10
#: The column that tells the policies of a kind apart.
SETTING = "kl.coef, n or c"


def best_of_n(scores: Sequence[Scores], candidates: Sequence[int]) -> list[Row]:
    """A row per n, from the (proxy, gold) [prompts, samples] of each seed."""
    rows = []
    for n in candidates:
        proxy, gold = np.array([best_of(*each, n) for each in scores]).T
        kl = np.array([best_of_n_kl(each, n) for each, _ in scores])
        labels = {"policy": "best-of-n", SETTING: str(n)}
        rows.append(Row(labels, {"proxy": proxy, "gold": gold, "kl": kl}))
    return rows


def optimum(scores: Sequence[Scores]) -> list[Row]:
    """A row per c, from the largest down, as long as there are samples enough."""
    rows: list[Row] = []
    for c in TEMPERATURES:
        found = [tilted(*each, c) for each in scores]
        if min(each.effective for each in found) < LEAST:
            break
        names = ("proxy", "gold", "kl", "effective")
        values = {name: np.array([getattr(each, name) for each in found]) for name in names}
        rows.append(Row({"policy": "optimum", SETTING: f"{c:g}"}, values))
    return rows


def draw(
    path: Path,
    tuned: Sequence[Row],
    chosen: Sequence[Row],
    best: Sequence[Row],
    titles: Mapping[str, str],
    unmarked: Collection[str] = (),
    held: Sequence[Row] = (),
) -> None:
    """A panel per score, against the root of the KL."""
    series = (
        (tuned, BLUE, "o", "trained, by kl.coef", "{}", (4, 6)),
        (held, GREEN, "D", "trained, KL held", "{}", (-24, -2)),
        (chosen, ORANGE, "s", "best-of-n", "n={}", (4, -12)),
    )
    with panels(path, 1, 2, height=4.2) as axes:
        for each, (key, title) in zip(axes[0], titles.items(), strict=True):
            # From the base model, where KL is 0: best-of-n with n = 1.
            path_of = [chosen[0], *best]
            x = [_root(row) for row in path_of]
            y = [row.estimate(key).value for row in path_of]
            each.plot(x, y, color=BLACK, linewidth=1.4, label="optimum, c from large to small")
            for rows, colour, marker, label, name, beside in series:
                if not rows:
                    continue
                x = [_root(row) for row in rows]
                line(each, x, rows, key, colour, marker=marker, label=label)
                for place, row in zip(x, rows, strict=True):
                    mark = row.labels[SETTING]
                    if rows is chosen and mark in unmarked:
                        continue
                    each.annotate(
                        name.format(mark),
                        (place, row.estimate(key).value),
                        xytext=beside,
                        textcoords="offset points",
                        fontsize=7,
                        color=colour,
                    )
            each.set(
                xlabel="sqrt(KL(policy||base)), KL in nats per response",
                ylabel=f"{title} per response",
            )


def _root(row: Row) -> float:
    return float(np.sqrt(max(row.estimate("kl").value, 0)))
