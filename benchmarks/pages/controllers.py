"""``python -m benchmarks.pages.controllers FOLDER``: the cells of how far controllers move kl.coef.

FOLDER has the sweeps of result 6; it prints moves.jsonl, a line per run.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from klrl.report.measures import column
from klrl.report.runs import ReadRun, find_runs

NEAR = 0.25


def cell(run: ReadRun, target: float = 0.3) -> dict[str, object]:
    """``kl/ref/coef`` of every iteration, and measures of the last half."""
    coef, kl = (column(run, f"kl/ref/{name}") for name in ("coef", "exact"))
    words = dict(word.split("=") for word in run.path.name.split(",") if "=" in word)
    half = kl[len(kl) // 2 :] / target
    steps = np.abs(np.diff(coef) / coef[:-1])[len(coef) // 2 :]
    return {
        "env": run.path.parent.name,
        "controller": words["controller"],
        "seed": run.seed,
        "moved": float(np.median(steps)),
        "ratio": float(half.mean()),
        "near": float((np.abs(half - 1) <= NEAR).mean()),
        "coef": [float(f"{x:.4g}") for x in coef],
    }


if __name__ == "__main__":
    for found in find_runs(sys.argv[1:]).runs:
        print(json.dumps(cell(found)))
