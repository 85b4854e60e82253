"""Result 5: gold score against KL when a flawed reward is optimised; best-of-n and the optimum.

Gao, Schulman and Hilton 2022, "Scaling laws for reward model overoptimization".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.shipped.answers import base_answers
from benchmarks.shipped.beside import SETTING, best_of_n, draw, optimum
from benchmarks.shipped.page import Result
from benchmarks.shipped.sweeps import OUTPUTS, Labelled, Plays, by_labels
from benchmarks.shipped.tables import Row
from klrl.report.measures import final
from klrl.report.runs import ReadRun

COEFS = ("0", "0.02", "0.05", "0.1", "0.2", "0.5")
SEEDS = (0, 1, 2)
#: Best-of-n: candidates; prompts of the evaluation split; samples of the base model for each.
CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS, DRAWN = 1024, 128
#: Prompts that are sampled together.
TOGETHER = 8
TITLES = {"gold": "gold score", "proxy": "proxy score"}
JOB = ("experiment=sort_digits", "env.reward=proxy")


def make(result: Result, runs: Sequence[Labelled], plays: Plays) -> list[list[Row]]:
    groups = by_labels(runs, "kl.coef")
    tuned = [
        Row({"policy": "trained", SETTING: coef}, _values(groups[(coef,)], plays)) for coef in COEFS
    ]
    kept = OUTPUTS / "results" / result.name
    base = [base_answers(JOB, PROMPTS, DRAWN, s, kept / f"base_{s}.npz", TOGETHER) for s in SEEDS]
    scores = [(each.proxy, each.gold) for each in base]
    chosen, best = best_of_n(scores, CANDIDATES), optimum(scores)
    # The KL of n = 16 and 32 is almost that of the largest n.
    draw(result.picture, tuned, chosen, best, TITLES, unmarked=("16", "32"))
    return [[*tuned, *chosen, *best]]


def _values(runs: Sequence[ReadRun], plays: Plays) -> dict[str, np.ndarray]:
    played = [plays(run, episodes=PROMPTS, sampled=True) for run in runs]
    return {
        "proxy": np.array([row["eval/return"] for row in played]),
        "gold": np.array([row["eval/gold"] for row in played]),
        "kl": np.array([final(run, "kl/ref/exact_seq") for run in runs]),
    }
