"""Result 9: a pretrained model follows an instruction, its KL held or at a fixed price."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.answers import Answers, base_answers, trained_answers
from benchmarks.shipped.beside import LEAST, SETTING, best_of_n, draw, optimum
from benchmarks.shipped.page import Result, Section
from benchmarks.shipped.sweeps import OUTPUTS, Labelled, Plays, Sweep, by_labels
from benchmarks.shipped.tables import Measure, Row
from klrl.report.measures import column
from klrl.report.runs import Run
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
NAME = "results/smollm"
TITLES = {"proxy": "share of the instruction's parts", "gold": "instructions followed"}
MEASURES = (
    Measure("proxy", "parts followed", "share", ",.3f"),
    Measure("gold", "instructions followed", "share", ",.3f"),
    Measure("gain", f"gain / best-of-{BEST}'s gain", "of parts", ",.2f"),
    Measure("kl", "KL(policy||base)", "nats per response", ",.3f", ""),
    Measure("token", "KL(policy||base)", "nats per token", ",.4f", ""),
    Measure("nll", "base model's NLL / its own samples'", "per token", ",.2f", ""),
    Measure("length", "length", "tokens", ",.1f", ""),
    Measure("third", "KL over the last third", "nats per token", ",.4f", ""),
    Measure("least", "its lowest iteration", "likewise", ",.4f", ""),
    Measure("most", "its highest", "likewise", ",.4f", ""),
    Measure("near", f"within {NEAR:.0%} of {TARGET:g}", "share of them", ",.2f", ""),
    Measure("effective", "effective samples", f"of {DRAWN}", ",.0f", ""),
)
NOTE = (
    f"All policies answer the same {PROMPTS} prompts of the evaluation split, whose topics no "
    "training prompt has, at temperature .8: the last policy of a run "
    f"{TRAINED} times each, the base model {DRAWN} times; seeds are those of the samples too. KL "
    "in closed form and the base model's negative log-likelihood (NLL) are of these responses, "
    "under the base model at that temperature. The last third: of the training, whose responses "
    "answer eight prompts an iteration. Reward: the share of three parts (one sentence, at most so "
    "many words, about the topic) that are followed; gold: whether all are. Best-of-n and the "
    "optimum are made of the base model's responses as on "
    "[result 5](../frontier/README.md), which says how. The line of the optimum ends where a "
    f"tenth of the prompts have fewer than {LEAST} effective samples. c is in reward per nat; "
    "`kl.coef` stands beside a score that is normalised over its group."
)


def make(folder: Path, runs: Sequence[Labelled], plays: Plays) -> list[Section]:
    groups = by_labels(runs, "kl.coef")
    kept = OUTPUTS / NAME
    base = [base_answers(JOB, PROMPTS, DRAWN, s, kept / f"base_{s}.npz", TOGETHER) for s in SEEDS]
    scores = [(each.proxy, each.gold) for each in base]
    chosen, best = best_of_n(scores, CANDIDATES), optimum(scores)
    means = {n: chosen[CANDIDATES.index(n)].estimate("proxy").value for n in (1, BEST)}
    tuned = []
    for coef in (*COEFS, HELD):
        values = _values(groups[(coef,)], base, means[BEST] - means[1], means[1], coef == HELD)
        tuned.append(Row({"policy": "trained", SETTING: coef}, values))
    *fixed, held = tuned
    draw(folder / "smollm.png", fixed, chosen, best, TITLES, held=[held])
    alt = "Reward and gold score against the root of the KL: training, best-of-n and the optimum"
    return [
        Section("Figures", NOTE, [*tuned, *chosen, *best], MEASURES, "smollm.png", alt),
        Section("Samples", samples(groups[(HELD,)][0].path / "samples.jsonl")),
    ]


def _values(
    runs: Sequence[Run], base: Sequence[Answers], gain: float, start: float, held: bool
) -> dict[str, Array]:
    """Of one setting.

    Args:
        runs: a run per seed.
        base: the base model's answers.
        gain: of the base model's best of :data:`BEST`, over its mean reward ``start``.
        held: whether its KL was held.
    """
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
        "One small model, its weights rounded to four bits (Q4_1) before any of this, and one "
        "instruction whose reward has four values. Three seeds bear no "
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
