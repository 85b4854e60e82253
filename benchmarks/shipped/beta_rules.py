"""Result 1: how three rules for beta hold KL(old||new) at its target, and their returns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.draw import BLUE, GREEN, ORANGE, dots, learning_curve, panels
from benchmarks.shipped.page import Result, Section
from benchmarks.shipped.sweeps import (
    EPISODES,
    REWARDS,
    Labelled,
    Plays,
    Sweep,
    by_labels,
    closing_return,
    diverged,
)
from benchmarks.shipped.tables import Measure, Row
from klrl.report.measures import BAND, in_band
from klrl.report.runs import Run

ENVS = {"pendulum": 100_000, "half_cheetah": 200_000}
#: Rule -> (title, colour).
RULES = {
    "held": ("held (loss=klpen_held)", BLUE),
    "doubling": ("doubling (loss=klpen)", ORANGE),
    "forward": ("forward (TorchRL's rule)", GREEN),
}
TARGET = 0.01
MEASURES = (
    Measure("in_band", "in band", "share of iterations", bounds=(0.0, 1.0)),
    Measure("return", "evaluation return", "per episode", ",.0f"),
)
_COMMON = (f"loss.dtarg={TARGET}", "logger=none", "eval.every=0", "seed=0,1,2,3,4")


def _sweeps() -> list[Sweep]:
    found = []
    for env, frames in ENVS.items():
        task = (f"env={env}", *REWARDS.get(env, ()), f"frames={frames}")
        rules = (*task, "loss=klpen", "loss.beta_rule=doubling,forward", *_COMMON)
        held = (*task, "loss=klpen_held", "loss.max_alpha=2", *_COMMON)
        # TorchRL's rule has no bounds: beta may become infinite, and then the gradient is.
        swept = Sweep(f"results/beta_rules/{env}", rules, {"env": env}, may_diverge=True)
        found.append(swept)
        labels = {"env": env, "loss.beta_rule": "held"}
        found.append(Sweep(f"results/beta_rules/{env}_held", held, labels))
    return found


def make(folder: Path, runs: Sequence[Labelled], plays: Plays) -> list[Section]:
    groups = by_labels(runs, "env", "loss.beta_rule")
    rows = [
        Row({"env": env, "rule": RULES[rule][0]}, _values(groups[env, rule], plays))
        for env in ENVS
        for rule in RULES
    ]
    _draw(folder / "beta_rules.png", rows, groups)
    note = (
        "In band: the share of iterations after the tenth whose KL(old||new), of the whole rollout "
        f"after the update, lies within a factor {BAND} of `loss.dtarg={TARGET}`. Evaluation: "
        f"{EPISODES} deterministic episodes of the last policy. {ended_early(groups)}"
    )
    alt = "KL(old||new) over frames with its band, share in band and return of three rules"
    return [Section("Figures", note, rows, MEASURES, "beta_rules.png", alt)]


def ended_early(groups: dict[tuple[str, ...], list[Run]]) -> str:
    """Which runs ended early, in a sentence."""
    counts = {key: sum(map(diverged, runs)) for key, runs in groups.items()}
    ended = [f"{n} of {rule}'s on {env}" for (env, rule), n in counts.items() if n]
    if not ended:
        return "All runs came to their end."
    return (
        f"Runs that ended early, with an infinite gradient: {', '.join(ended)}; they count as they "
        "were at their last checkpoint."
    )


def _values(runs: Sequence[Run], plays: Plays) -> dict[str, np.ndarray]:
    return {
        "in_band": np.array([in_band(run) for run in runs]),
        "return": np.array([closing_return(run, plays) for run in runs]),
    }


def _draw(path: Path, rows: Sequence[Row], groups: dict[tuple[str, ...], list[Run]]) -> None:
    with panels(path, len(ENVS), 3) as axes:
        for (kl, share, reward), env in zip(axes, ENVS, strict=True):
            mine = [row for row in rows if row.labels["env"] == env]
            kl.axhspan(TARGET / BAND, TARGET * BAND, color="grey", alpha=0.3, label="band")
            for x, (rule, row) in enumerate(zip(RULES, mine, strict=True)):
                title, colour = RULES[rule]
                learning_curve(kl, groups[env, rule], "kl/old/exact", colour, label=title)
                dots(share, x, row, "in_band", colour)
                dots(reward, x, row, "return", colour)
            kl.set(title=env, xlabel="thousand frames", ylabel="KL(old||new), nats per frame")
            kl.set_yscale("log")
            share.set(ylim=(0, 1.03), ylabel="share of iterations in band")
            reward.set(ylabel="evaluation return")
            for each in (share, reward):
                each.set_xticks(range(len(RULES)), RULES)


RESULT = Result(
    number=1,
    name="beta_rules",
    title="Three rules for beta: how they hold KL(old||new)",
    question=(
        "`loss.beta` weighs KL(old||new) in the loss. Which rule keeps that KL at its target, and "
        "does it cost return?"
    ),
    chosen=(
        "Nothing was chosen for this comparison: the presets' settings and `loss.dtarg=0.01`, the "
        "default."
    ),
    limits=(
        "One target, two tasks, and half_cheetah for a fifth of its preset's frames. Which rule "
        "earns more: half_cheetah's seeds of one rule differ by more than the rules do. Every run "
        "is also charged KL(policy||reference) at the default `kl.coef=0.1`, so that its return is "
        "not the best that the rule could reach."
    ),
    sweeps=_sweeps(),
    make=make,
)
