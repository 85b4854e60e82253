"""Result 9: a pretrained model follows an instruction, its KL held or at a fixed price."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.beside import LEAST, SETTING, best_of_n, draw, optimum
from benchmarks.shipped.best_of_n import base_scores
from benchmarks.shipped.page import Result, Section
from benchmarks.shipped.sweeps import OUTPUTS, Labelled, Plays, Sweep, by_labels
from benchmarks.shipped.tables import Measure, Row
from klrl.report.measures import column
from klrl.report.runs import Run
from klrl.report.statistics import Array

COEFS = ("0.03", "0.1", "0.3")
HELD = "held"
SEEDS = (0, 1, 2)
#: Best-of-n: candidates; prompts of the evaluation split; samples of the base model for each.
CANDIDATES = (1, 2, 4, 8, 16)
PROMPTS, DRAWN, TOGETHER = 64, 64, 2
#: Responses of an evaluation.
RESPONSES = 256
#: What half a gain is measured by.
BEST = 8
#: Of a run's iterations; the KL and the samples' NLL are means over the last ones.
LAST = 1 / 3
#: Shown of the base model and of a trained one.
SHOWN = 4
JOB = ("experiment=smollm",)
NAME = "results/smollm"
TITLES = {"proxy": "share of the instruction's parts", "gold": "instructions followed"}
MEASURES = (
    Measure("proxy", "parts followed", "share", ",.3f"),
    Measure("gold", "instructions followed", "share", ",.3f"),
    Measure("gain", f"gain / best-of-{BEST}'s gain", "of parts", ",.2f"),
    Measure("kl", "KL(policy||base)", "nats per response", ",.3f", ""),
    Measure("token", "KL(policy||base)", "nats per token", ",.4f", ""),
    Measure("nll", "base model's NLL / its own samples'", "per token", ",.2f", ""),
    Measure("effective", "effective samples", f"of {DRAWN}", ",.0f", ""),
)
NOTE = (
    f"Trained: scores of {RESPONSES} responses sampled at temperature .8 to the evaluation split, "
    "whose topics no training prompt has, by the last policy; KL in closed form and the base "
    "model's negative log-likelihood (NLL) of the sampled tokens are means over the last third of "
    "the training. That of the base model's own samples is that of the first iteration, in which "
    "the policy is the base model. Reward: the share of three parts (one sentence, at most so many "
    "words, about the topic) that are followed; gold: whether all are. Best-of-n and the optimum "
    f"are made of the base model's own responses, {DRAWN} to each of {PROMPTS} prompts of the "
    "evaluation split, as on [result 5](../frontier/README.md), which says how; their seeds are "
    f"those of the samples. The line of the optimum ends where a tenth of the prompts have fewer "
    f"than {LEAST} effective samples."
)


def make(folder: Path, runs: Sequence[Labelled], plays: Plays) -> list[Section]:
    groups = by_labels(runs, "kl.coef")
    kept = OUTPUTS / NAME
    scores = [
        base_scores(JOB, PROMPTS, DRAWN, s, kept / f"base_{s}.npz", at_a_time=TOGETHER)
        for s in SEEDS
    ]
    chosen, best = best_of_n(scores, CANDIDATES), optimum(scores)
    base, eight = (chosen[CANDIDATES.index(n)].estimate("proxy").value for n in (1, BEST))
    tuned = [
        Row({"policy": "trained", SETTING: coef}, _values(groups[(coef,)], plays, base, eight))
        for coef in (*COEFS, HELD)
    ]
    draw(folder / "smollm.png", tuned, chosen, best, TITLES)
    alt = "Reward and gold score against the root of the KL: training, best-of-n and the optimum"
    return [
        Section("Figures", NOTE, [*tuned, *chosen, *best], MEASURES, "smollm.png", alt),
        Section("Samples", samples(groups[(HELD,)][0].path / "samples.jsonl")),
    ]


def _values(runs: Sequence[Run], plays: Plays, base: float, eight: float) -> dict[str, Array]:
    """Of one setting.

    Args:
        runs: a run per seed.
        plays: plays the last policy.
        base, eight: mean reward of the base model, and of its best of :data:`BEST`.
    """
    played = [plays(run, episodes=RESPONSES, sampled=True) for run in runs]
    proxy = np.array([row["eval/return"] for row in played])
    return {
        "proxy": proxy,
        "gold": np.array([row["eval/gold"] for row in played]),
        "gain": (proxy - base) / (eight - base),
        "kl": np.array([last_third(column(run, "kl/ref/exact_seq")) for run in runs]),
        "token": np.array([last_third(column(run, "kl/ref/exact")) for run in runs]),
        "nll": np.array([nll_ratio(run) for run in runs]),
    }


def last_third(values: Array) -> float:
    """Mean over the last third of the iterations; row 0 and the closing row have no value."""
    values = values[np.isfinite(values)]
    return float(values[-max(1, round(len(values) * LAST)) :].mean())


def nll_ratio(run: Run) -> float:
    """-log base of the sampled tokens, nats per token: at the end over that at the start.

    -log base = -log pi + k1, where k1 = log pi - log base; all of them means over the tokens.
    """
    nll = column(run, "policy/entropy") + column(run, "kl/ref/k1")
    return last_third(nll) / float(nll[np.isfinite(nll)][0])


def samples(path: Path) -> str:
    """The first responses of the first and of the last iteration, each with its prompt."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    parts = []
    for title, iteration in (
        ("The base model", lines[0]["iteration"]),
        ("The trained one, `held`, seed 0", lines[-1]["iteration"]),
    ):
        of_it = [line for line in lines if line["iteration"] == iteration][:SHOWN]
        told = [f"    {line['prompt'][-1]['content']}\n    > {line['response']}" for line in of_it]
        parts += [f"{title}, iteration {iteration}:", "\n\n".join(told)]
    return "\n\n".join(parts)


RESULT = Result(
    number=9,
    name="smollm",
    title="SmolLM2 follows an instruction: reward against KL, best-of-n and the optimum beside",
    question=(
        "A pretrained model of 135 million parameters learns, on two CPU cores, to describe a "
        "thing in one short sentence. What does the reward cost in KL, is the KL held where "
        "`controller=held` is told to hold it, and how far is that from the best of n?"
    ),
    chosen=(
        "`experiment=smollm` is as it ships; its learning rate, batch, target, gains and start of "
        "`kl.coef` were chosen on seed 100. The coefficients were chosen beforehand."
    ),
    limits=(
        "One small model, one instruction whose reward has four values. Three seeds bear no "
        "intervals. What is rewarded are three rules that a function can check; whether the "
        "sentences are true or good is not measured."
    ),
    sweeps=[
        Sweep(f"{NAME}/held", (*JOB, "threads=1", "logger=none", "seed=0,1,2"), {"kl.coef": HELD}),
        Sweep(
            f"{NAME}/fixed",
            (
                *(*JOB, "threads=1", "logger=none", "controller=fixed"),
                *(f"kl.coef={','.join(COEFS)}", "seed=0,1,2"),
            ),
        ),
    ],
    make=make,
    seeds=len(SEEDS),
)
