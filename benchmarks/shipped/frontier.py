"""Result 5: gold score against KL when a flawed reward is optimised; best-of-n and the optimum.

Gao, Schulman and Hilton 2022, "Scaling laws for reward model overoptimization".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.answers import base_answers
from benchmarks.shipped.beside import LEAST, SETTING, best_of_n, draw, optimum
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
#: Prompts that are sampled together.
TOGETHER = 8
MEASURES = (
    Measure("proxy", "proxy", "per response", ",.3f"),
    Measure("gold", "gold", "per response", ",.3f"),
    Measure("kl", "KL(policy||base)", "nats per response", ",.3f", ""),
    Measure("effective", "effective samples", f"of {DRAWN}", ",.0f", ""),
)
TITLES = {"gold": "gold score", "proxy": "proxy score"}
JOB = ("experiment=sort_digits", "env.reward=proxy")
NAME = "results/frontier"
NOTE = (
    f"Trained: `env.reward=proxy`, {SAMPLES:,} samples; scores of {PROMPTS} responses sampled to "
    "the evaluation split by the last policy, KL in closed form, mean over the last tenth of the "
    "training. The other two are made of the base model's own responses, "
    f"{DRAWN} to each of the same {PROMPTS} prompts; their seeds are those of the samples. "
    "Best-of-n: of n responses the one with the highest proxy, ties by lot; n = 1 is the base "
    "model. Its KL is exact for the distribution of the samples: the proxy has few values, so that "
    "many responses tie, and the usual bound log n - (n - 1) / n (Beirami et al. 2024, arXiv "
    "2401.01879) is far above it. Optimum: the base model tilted by exp(proxy / c), which has the "
    "highest E[proxy] - c * KL of all policies, by self-normalised weights w of the samples, KL = "
    f"sum w log({DRAWN} w). Effective samples: 1 / sum w^2, a tenth of the prompts have fewer; "
    "with few of them the scores are biased towards the base model's, and the line ends "
    f"where they are below {LEAST}. c is in proxy score per nat; `kl.coef` stands beside a score "
    "that is normalised over its group, so that the two are not on one scale. The proxy counts the "
    "digits that were asked for and lets any others stand ([language.md](../../language.md))."
)


def make(folder: Path, runs: Sequence[Labelled], plays: Plays) -> list[Section]:
    groups = by_labels(runs, "kl.coef")
    tuned = [
        Row({"policy": "trained", SETTING: coef}, _values(groups[(coef,)], plays)) for coef in COEFS
    ]
    kept = OUTPUTS / NAME
    base = [base_answers(JOB, PROMPTS, DRAWN, s, kept / f"base_{s}.npz", TOGETHER) for s in SEEDS]
    scores = [(each.proxy, each.gold) for each in base]
    chosen, best = best_of_n(scores, CANDIDATES), optimum(scores)
    # The KL of n = 16 and 32 is almost that of the largest n.
    draw(folder / "frontier.png", tuned, chosen, best, TITLES, unmarked=("16", "32"))
    alt = "Gold and proxy score against the root of the KL: training, best-of-n and the optimum"
    return [Section("Figures", NOTE, [*tuned, *chosen, *best], MEASURES, "frontier.png", alt)]


def _values(runs: Sequence[Run], plays: Plays) -> dict[str, np.ndarray]:
    played = [plays(run, episodes=PROMPTS, sampled=True) for run in runs]
    return {
        "proxy": np.array([row["eval/return"] for row in played]),
        "gold": np.array([row["eval/gold"] for row in played]),
        "kl": np.array([final(run, "kl/ref/exact_seq") for run in runs]),
    }


RESULT = Result(
    number=5,
    name="frontier",
    title="Reward against KL with a reward that can be hacked, best-of-n and the optimum beside it",
    question=(
        "A policy learns from a flawed reward, the proxy. How do proxy and gold score move as it "
        "leaves the base model, how far is it from the best that this KL allows, and does training "
        "beat simply choosing the best of n?"
    ),
    chosen=(
        "Samples and the range of `kl.coef` are those of an earlier measurement on seeds 0 to 2 "
        "([language.md](../../language.md)), which are the seeds shown; the learning rate, batch "
        "and epochs are the experiment's own, chosen on seeds 100 and 101."
    ),
    limits=(
        "One small task whose proxy has about twenty values: that best-of-n costs little KL here, "
        "and comes so near the optimum, is due to its many ties. Samples of the base model do not "
        "show what it says less than once in "
        f"{DRAWN} responses, which training can reach. The optimum is that of the proxy; a policy "
        "above its gold score is no contradiction. How far training stays below it after "
        f"{SAMPLES:,} samples is no limit of the method. Three seeds bear no intervals."
    ),
    sweeps=[
        Sweep(
            f"{NAME}/trained",
            (
                *(*JOB, f"frames={SAMPLES}"),
                *("logger=none", "eval.every=0"),
                *(f"kl.coef={','.join(COEFS)}", f"seed={','.join(map(str, SEEDS))}"),
            ),
        )
    ],
    make=make,
    seeds=len(SEEDS),
)
