"""Result 5: gold score against KL when a flawed reward is optimised, best-of-n beside it.

Gao, Schulman and Hilton 2022, "Scaling laws for reward model overoptimization".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.best_of_n import base_scores, best_of, kl_bound
from benchmarks.shipped.draw import BLUE, ORANGE, line, panels
from benchmarks.shipped.page import Result, Section
from benchmarks.shipped.sweeps import OUTPUTS, Labelled, Plays, Sweep, by_labels
from benchmarks.shipped.tables import Measure, Row
from klrl.report.measures import final
from klrl.report.runs import Run

COEFS = ("0", "0.02", "0.05", "0.1", "0.2", "0.5")
SAMPLES, SEEDS = 20_480, (0, 1, 2)
#: Best-of-n: candidates; prompts of the evaluation split; samples of the base model for each.
CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS, DRAWN = 1024, 128
MEASURES = (
    Measure("proxy", "proxy", "per response", ",.3f"),
    Measure("gold", "gold", "per response", ",.3f"),
    Measure("kl", "KL(policy||base)", "nats per response", ",.3f", ""),
)
NAME = "results/frontier"


def make(folder: Path, runs: Sequence[Labelled], plays: Plays) -> list[Section]:
    groups = by_labels(runs, "kl.coef")
    tuned = [
        Row({"policy": "trained", "kl.coef or n": coef}, _values(groups[(coef,)], plays))
        for coef in COEFS
    ]
    chosen = _best_of_n()
    _draw(folder / "frontier.png", tuned, chosen)
    note = (
        f"Trained: `env.reward=proxy`, {SAMPLES:,} samples; scores of {PROMPTS} responses sampled "
        "to the evaluation split by the last policy, KL in closed form, mean over the last tenth "
        f"of the training. Best-of-n: of n responses of the base model the one with the highest "
        f"proxy, from {DRAWN} to each of the same {PROMPTS} prompts, the expectation over the "
        "choice of n taken exactly; its KL is the upper bound log n - (n - 1) / n (Beirami et al. "
        "2024, arXiv 2401.01879). n = 1 is the base model; its seeds are those of the samples. "
        "The proxy counts the digits that were asked for and lets any others stand "
        "([language.md](../../language.md))."
    )
    alt = "Gold and proxy score against the root of the KL: training at several kl.coef, best-of-n"
    return [Section("Figures", note, [*tuned, *chosen], MEASURES, "frontier.png", alt)]


def _values(runs: Sequence[Run], plays: Plays) -> dict[str, np.ndarray]:
    played = [plays(run, episodes=PROMPTS, sampled=True) for run in runs]
    return {
        "proxy": np.array([row["eval/return"] for row in played]),
        "gold": np.array([row["eval/gold"] for row in played]),
        "kl": np.array([final(run, "kl/ref/exact_seq") for run in runs]),
    }


def _best_of_n() -> list[Row]:
    kept = OUTPUTS / NAME
    scores = [base_scores(PROMPTS, DRAWN, s, kept / f"base_scores_{s}.npz") for s in SEEDS]
    rows = []
    for n in CANDIDATES:
        proxy, gold = np.array([best_of(*each, n) for each in scores]).T
        values = {"proxy": proxy, "gold": gold, "kl": np.full(len(SEEDS), kl_bound(n))}
        rows.append(Row({"policy": "best-of-n", "kl.coef or n": str(n)}, values))
    return rows


def _draw(path: Path, tuned: Sequence[Row], chosen: Sequence[Row]) -> None:
    with panels(path, 1, 2, height=4.2) as axes:
        for each, key in zip(axes[0], ("gold", "proxy"), strict=True):
            for rows, colour, marker, title in (
                (tuned, BLUE, "o", "trained, by kl.coef"),
                (chosen, ORANGE, "s", "best-of-n (KL: upper bound)"),
            ):
                x = [np.sqrt(max(row.estimate("kl").value, 0)) for row in rows]
                line(each, x, rows, key, colour, marker=marker, label=title)
                for place, row in zip(x, rows, strict=True):
                    mark = row.labels["kl.coef or n"]
                    text = mark if rows is tuned else f"n={mark}"
                    each.annotate(
                        text,
                        (place, row.estimate(key).value),
                        xytext=(4, 6 if rows is tuned else -12),
                        textcoords="offset points",
                        fontsize=7,
                        color=colour,
                    )
            each.set(
                xlabel="sqrt(KL(policy||base)), KL in nats per response",
                ylabel=f"{key} score per response",
            )


RESULT = Result(
    number=5,
    name="frontier",
    title="Reward against KL with a reward that can be hacked, best-of-n beside it",
    question=(
        "A policy learns from a flawed reward, the proxy. How do proxy and gold score move as it "
        "leaves the base model, and does training beat simply choosing the best of n?"
    ),
    chosen=(
        "Samples and the range of `kl.coef` are those of an earlier measurement on seeds 0 to 2 "
        "([language.md](../../language.md)), which are the seeds shown; the learning rate, batch "
        "and epochs are the experiment's own, chosen on seeds 100 and 101."
    ),
    sweeps=[
        Sweep(
            f"{NAME}/trained",
            (
                *("experiment=sort_digits", "env.reward=proxy", f"frames={SAMPLES}"),
                *("logger=none", "eval.every=0"),
                *(f"kl.coef={','.join(COEFS)}", f"seed={','.join(map(str, SEEDS))}"),
            ),
        )
    ],
    make=make,
    seeds=len(SEEDS),
)
