"""How far a stale sampler is, and what k3 and masks see of it: result 11, from staleness.jsonl.

docs/developers/staleness.md is the protocol; ``python -m benchmarks.staleness`` ran the cells.
``python -m benchmarks.pages.staleness`` draws the picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from benchmarks.pages.mujoco import read_lines
from benchmarks.pages.tables import escaped
from benchmarks.results import FOLDER, ROOT, prose, table
from klrl.domains import LANGUAGE
from klrl.report.pictures import LOOK, draw_curves, label, look_of
from klrl.report.runs import ReadRun
from klrl.report.settings import Setting
from klrl.report.statistics import Array, Contrast, holm, welch

#: Minibatches of an iteration: the last one is L - 1 updates newer than its sampler.
LAGS = (2, 4, 8, 16, 32)
#: Arm -> its title; all at L = 16.
ARMS = {
    **{"none": "no factor", "clip": "clip .2", "truncate": "ratio at most 2"},
    **{"k3": "responses masked by k3", "exact": "responses masked by the exact KL"},
    **{"tv": "DPPO, binary TV", "tv_exact": "DPPO, exact TV"},
}
MARGIN = math.log(1.05)
#: (arm, L) -> its runs, by seed.
Cells = Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]


def read_cells() -> Cells:
    """Read the runs."""
    found: dict[tuple[str, int], list[Any]] = {}
    for line in sorted(read_lines(FOLDER / "staleness.jsonl"), key=lambda line: line["seed"]):
        found.setdefault((line["arm"], line["lag"]), []).append(line)
    return found


def last(cells: Cells, lag: int, name: str, arm: str = "none") -> Array:
    """Take a measure of the last minibatch, k = L - 1, of each seed."""
    return np.array([line["by_k"][name][-1] for line in cells[arm, lag]])


def scores(cells: Cells, arm: str, lag: int = 16, key: str = "score") -> Array:
    """Take the score of each seed."""
    return np.array([line[key] for line in cells[arm, lag]])


def outcomes(cells: Cells) -> list[Contrast]:
    """Estimate A, B and C over seeds; p after Holm, against 1, .1 and 0."""
    far = np.log([last(cells, lag, "sampler_policy") for lag in LAGS])
    slope = np.polyfit(np.log([lag - 1 for lag in LAGS]), far, 1)[0]
    split = [np.mean(line["by_k"]["split_response"][1:]) for line in cells["none", 8]]
    ratio = np.log(scores(cells, "exact") / scores(cells, "k3"))
    nulls, values = (1.0, 0.1, 0.0), (slope, np.array(split), ratio)
    found = [welch([x - null], [1.0]) for x, null in zip(values, nulls, strict=True)]
    adjusted = holm([each.p for each in found])
    return [
        Contrast(each.value + null, each.low + null, each.high + null, p)
        for each, null, p in zip(found, nulls, adjusted, strict=True)
    ]


def verdicts(a: Contrast, b: Contrast, c: Contrast) -> list[str]:
    """Judge A, B and C by the protocol."""
    inside = ["inside" if a.low <= null <= a.high else "outside" for null in (1, 2)]
    better = c.p < 0.05 and (c.low > 0 or c.high < 0)
    equal = max(-c.low, c.high) < MARGIN
    superior = f"superior: the mask by {'the exact KL' if c.value > 0 else 'k3'}"
    return [
        f"1 (a random walk) is {inside[0]} the interval, 2 (a drift) is {inside[1]} it",
        "unfit" if b.low > 0.1 else "not shown to be unfit",
        superior if better else "equivalent" if equal else "open",
    ]


def told(values: Array, form: str) -> str:
    """Format the mean over seeds and its 95 % interval; one number where all seeds agree."""
    found = welch([values], [1.0])
    mean, low, high = (format(x, form) for x in (found.value, found.low, found.high))
    return mean if found.low == found.high else f"{mean} [{low}, {high}]"


#: Column of a table -> measure of the last minibatch, and its format.
FAR = {
    "KL(sampler||policy)": ("sampler_policy", ".4f"),
    "KL(policy||sampler)": ("policy_sampler", ".4f"),
    "TV": ("tv", ".4f"),
    "effective sample size": ("ess", ".3f"),
    "largest ratio": ("largest", ".1f"),
}
MASKS = {
    "k3 and exact KL disagree": ("split_response", ".1%"),
    "kept by k3": ("kept_k3", ".1%"),
    "kept by exact KL": ("kept_exact", ".1%"),
    "binary and exact TV disagree": ("split_token", ".2%"),
    "kept by binary TV": ("kept_tv", ".1%"),
    "kept by exact TV": ("kept_tv_exact", ".1%"),
}
ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "k3_clamped": "k3, each token at most 10"}
OUTCOMES = (
    "A: slope of log KL(sampler||policy) on log lag",
    "B: share of responses on which the masks by k3 and by the exact KL disagree, L = 8",
    "C: log ratio of scores, masked by the exact KL / by k3, L = 16",
)
CAPTIONS = {
    "outcomes": "The primary outcomes: mean over the seeds [95 % interval by Student's t]; p after "
    "Holm, against 1, .1 and 0. C is superior if p < .05, else equivalent if its interval is "
    "within 5 %, else open:",
    "lag": "All else is description. The last minibatch of L, whose lag is L - 1, without a "
    "factor; nats per token, means over the iterations of a run:",
    "errors": "Estimate / exact KL - 1, of these means:",
    "masks": "Masks of responses (k3, exact KL; at most .1 nats) and of tokens (TV; at most .1): "
    "shares, in the same minibatches:",
    "arms": "Scores of the last 2,048 responses; L = 16, unless the line says another L:",
}


def tables(_: Path) -> dict[str, str]:
    """Make the tables of the page."""
    cells = read_cells()
    made = {
        "lag": by_lag(cells, FAR),
        "errors": errors(cells),
        "masks": by_lag(cells, MASKS),
        "arms": arms(cells),
    }
    titled = {name: f"{prose(CAPTIONS[name])}\n\n{each}" for name, each in made.items()}
    return titled | primary(cells)


def primary(cells: Cells) -> dict[str, str]:
    """Format the primary outcomes, and the answer to the page's question."""
    found = outcomes(cells)
    words = verdicts(*found)
    lines = [
        [name, f"{x.value:.3f} [{x.low:.3f}, {x.high:.3f}]", f"{x.p:.2g}", word]
        for name, x, word in zip(OUTCOMES, found, words, strict=True)
    ]
    judged = table(["", "mean [95 %]", "p", "verdict"], map(escaped, lines))
    title = prose(CAPTIONS["outcomes"])
    return {"answer": answer(cells, found, words), "outcomes": f"{title}\n\n{judged}"}


def answer(cells: Cells, found: Sequence[Contrast], words: Sequence[str]) -> str:
    """Answer the questions in three sentences."""
    near, far = (last(cells, lag, "sampler_policy").mean() for lag in (LAGS[0], LAGS[-1]))
    off = [f"{_error(cells, lag, 'k3').mean():+.1%}" for lag in LAGS]
    a, b, c = ((x.value, x.low, x.high) for x in found)
    slope, split = "{:.2f} [{:.2f}, {:.2f}]".format(*a), "{:.1%} [{:.1%}, {:.1%}]".format(*b)
    ratio = "{:.3f} [{:.3f}, {:.3f}]".format(*map(math.exp, c))
    return prose(
        f"From 1 to 31 updates the exact KL(sampler||policy) grows from {near:.4f} to {far:.2f} "
        f"nats per token, as the lag to the power of {slope}: {words[0]}. Averaged over a run k3 "
        f"is off by {', '.join(off)} at lags of 1, 3, 7, 15, 31, but at lags of 1 to 7 the masks "
        f"by k3 and by the exact KL disagree on {split} of the responses: k3 is {words[1]} for "
        f"this mask. With lags up to 15 the mask by the exact KL has {ratio} times the score of "
        f"the mask by k3: {words[2]}."
    )


def by_lag(cells: Cells, columns: Mapping[str, tuple[str, str]]) -> str:
    """Format measures of the last minibatch, a line per L."""
    lines = [
        [str(lag - 1), *(told(last(cells, lag, name), form) for name, form in columns.values())]
        for lag in LAGS
    ]
    return table(escaped(["lag", *columns]), lines)


def _error(cells: Cells, lag: int, name: str) -> Array:
    """Return estimate / exact KL - 1 of each seed, both averaged over tokens and iterations."""
    return last(cells, lag, name) / last(cells, lag, "sampler_policy") - 1


def errors(cells: Cells) -> str:
    """Format the errors of the estimators."""
    lines = [
        [str(lag - 1), *(told(_error(cells, lag, name), "+.1%") for name in ESTIMATORS)]
        for lag in LAGS
    ]
    return table(["lag", *ESTIMATORS.values()], lines)


def arms(cells: Cells) -> str:
    """Format the scores of the arms, and of no factor at each L."""
    rows = [(title, arm, 16) for arm, title in ARMS.items()]
    rows += [(f"no factor, L = {lag}", "none", lag) for lag in (1, *LAGS) if lag != 16]
    lines = [
        [
            title,
            told(scores(cells, arm, lag), ".3f"),
            f"{scores(cells, arm, lag).min():.3f}",
            told(scores(cells, arm, lag, "kl_ref"), ".3f"),
            told(last(cells, lag, "sampler_policy", arm), ".4f"),
        ]
        for title, arm, lag in rows
    ]
    heads = ["", "score", "worst seed", "KL(policy||reference)", "KL(sampler||policy) at k = L - 1"]
    return table(escaped(heads), lines)


def draw(path: Path) -> None:
    """Draw the exact KL against the lag as the report draws curves: a thin line per seed."""
    cells = read_cells()
    settings, curves = [], {}
    for i, lag in enumerate(LAGS):
        seeds = np.array([line["by_k"]["sampler_policy"][1:] for line in cells["none", lag]])
        run = ReadRun(Path(), "finished", 0, {}, {}, "", {}, LANGUAGE)
        settings.append(Setting(f"L = {lag}", [run] * len(seeds)))
        curves[i] = np.arange(1.0, lag), seeds
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(6, 3.4), layout="constrained")
        axes = figure.subplots()
        for i, setting in enumerate(settings):
            axes.plot([], [], color=look_of(i).colour, dashes=look_of(i).dashes, label=setting.name)
        label(axes, "lag, updates (log)", "exact KL(sampler||policy), nats per token (log)")
        draw_curves(axes, settings, curves, "first", log=True)
        axes.set_xscale("log")
        axes.set(xlim=(0.9, 40), xticks=(ticks := (1, 3, 7, 15, 31)), xticklabels=map(str, ticks))
        axes.minorticks_off()
        axes.legend(frameon=False)
        figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(ROOT / "docs" / "results" / "staleness" / "staleness.png")
