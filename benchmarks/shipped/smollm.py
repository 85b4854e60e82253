"""Result 9: a pretrained model follows an instruction, its KL held or at a fixed price."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.answers import Answers, base_answers, trained_answers
from benchmarks.shipped.beside import SETTING, best_of_n, draw, optimum
from benchmarks.shipped.page import Result, Section
from benchmarks.shipped.sweeps import OUTPUTS, Labelled, Plays, by_labels
from benchmarks.shipped.tables import Row
from klrl.report.measures import column
from klrl.report.runs import ReadRun
from klrl.report.statistics import Array

COEFS = ("0.03", "0.1", "0.3")
HELD = "held"
SEEDS = (0, 1, 2)
#: Best-of-n: candidates. Prompts of the evaluation split; responses to each, of the base model and
#: of a trained one; prompts that are sampled together.
CANDIDATES = (1, 2, 4, 8, 16)
PROMPTS, DRAWN, TRAINED = 64, 64, 8
TOGETHER = 2
#: What half a gain is measured by.
BEST = 8
#: Of a run's iterations: the last ones, over which its KL is held.
LAST = 1 / 3
#: What `controller=held_tokens` holds, nats per token, and how near is near.
TARGET, NEAR = 0.1, 0.25
#: Shown of the base model and of a trained one.
SHOWN = 4
JOB = ("experiment=smollm",)
TITLES = {"proxy": "share of the instruction's parts", "gold": "instructions followed"}


def make(result: Result, runs: Sequence[Labelled], plays: Plays) -> list[list[Row] | Section]:
    groups = by_labels(runs, "kl.coef")
    kept = OUTPUTS / "results" / result.name
    base = [base_answers(JOB, PROMPTS, DRAWN, s, kept / f"base_{s}.npz", TOGETHER) for s in SEEDS]
    scores = [(each.proxy, each.gold) for each in base]
    chosen, best = best_of_n(scores, CANDIDATES), optimum(scores)
    means = {n: chosen[CANDIDATES.index(n)].estimate("proxy").value for n in (1, BEST)}
    tuned = []
    for coef in (*COEFS, HELD):
        values = _values(groups[(coef,)], base, means[BEST] - means[1], means[1], coef == HELD)
        tuned.append(Row({"policy": "trained", SETTING: coef}, values))
    *fixed, held = tuned
    draw(result.picture, fixed, chosen, best, TITLES, held=[held])
    shown = Section("Samples", samples(groups[(HELD,)][0].path / "samples.jsonl"))
    return [[*tuned, *chosen, *best], shown]


def _values(
    runs: Sequence[ReadRun], base: Sequence[Answers], gain: float, start: float, held: bool
) -> dict[str, Array]:
    """Of one setting; ``gain``: of the base model's best of :data:`BEST`, over its mean reward."""
    answers = [
        trained_answers(
            run, PROMPTS, TRAINED, run.path / "answers.npz", TOGETHER * DRAWN // TRAINED
        )
        for run in runs
    ]
    proxy = np.array([each.proxy.mean() for each in answers])
    own = np.mean([per_token(each.nll, each) for each in base])
    thirds = [last_third(column(run, "kl/ref/exact")) for run in runs]
    values = {
        "proxy": proxy,
        "gold": np.array([each.gold.mean() for each in answers]),
        "gain": (proxy - start) / gain,
        "kl": np.array([each.kl.mean() for each in answers]),
        "token": np.array([per_token(each.kl, each) for each in answers]),
        "nll": np.array([per_token(each.nll, each) / own for each in answers]),
        "length": np.array([each.tokens.mean() for each in answers]),
        "third": np.array([each.mean() for each in thirds]),
        "least": np.array([each.min() for each in thirds]),
        "most": np.array([each.max() for each in thirds]),
    }
    if held:
        near = [(abs(each / TARGET - 1) <= NEAR).mean() for each in thirds]
        values["near"] = np.array(near)
    return values


def per_token(sums: Array, answers: Answers) -> float:
    """Mean over all tokens of a sum per response."""
    return float(sums.sum() / answers.tokens.sum())


def last_third(values: Array) -> Array:
    """Of the iterations; row 0 and the closing row have no value."""
    values = values[np.isfinite(values)]
    return values[-max(1, round(len(values) * LAST)) :]


def samples(path: Path) -> str:
    """The first responses of the first and of the last iteration, each with its prompt."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    parts = []
    for title, iteration in (
        ("The base model", lines[0]["iteration"]),
        ("The policy trained with `held`, seed 0", lines[-1]["iteration"]),
    ):
        of_it = [line for line in lines if line["iteration"] == iteration][:SHOWN]
        told = [f"    {line['prompt'][-1]['content']}\n    > {line['response']}" for line in of_it]
        parts += [f"{title}, iteration {iteration}:", "\n\n".join(told)]
    return "\n\n".join(parts)
