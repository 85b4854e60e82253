"""Result 8: klpen against clip where both move as far, in KL(old||new), per iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    one_beside_others,
)
from benchmarks.shipped.tables import Measure, Row
from klrl.report.measures import WARM_UP, column, final
from klrl.report.runs import Run

FRAMES = {"pendulum": 100_000, "half_cheetah": 300_000}
#: Mean KL(old||new) of clip on seeds 100 and 101, nats per frame: .0234 and .0197 (pendulum), .0121
#: and .0118 (half_cheetah, 200k frames).
TARGETS = {"pendulum": 0.02, "half_cheetah": 0.012}
#: actor.init_std of the presets.
INIT_STD = {"pendulum": 1.0, "half_cheetah": 0.5}
LOSSES = {"clip": GREEN, "klpen": ORANGE, "klpen_held": BLUE}
MEASURES = (
    Measure("kl", "KL(old||new)", "nats per frame, mean", ",.4f", ""),
    Measure("closing", "deterministic return", "per episode, after training", ",.0f"),
    Measure("training", "training return", "per episode, last tenth", ",.0f"),
)


def _sweeps() -> list[Sweep]:
    sweeps: list[Sweep] = []
    for env, frames in FRAMES.items():
        words = (f"frames={frames}", f"actor.init_std={INIT_STD[env]}", "kl=none")
        words = (*REWARDS.get(env, ()), *words)
        klpen = ("loss=klpen,klpen_held", f"loss.dtarg={TARGETS[env]}", "loss.max_alpha=2")
        clip, own = ("loss", "clip"), ("loss=clip",)
        sweeps += one_beside_others("klpen_clip", env, clip, words, one=own, others=klpen)
    return sweeps


def make(folder: Path, runs: Sequence[Labelled], plays: Plays) -> list[Section]:
    groups = by_labels(runs, "env", "loss")
    rows = [
        Row({"env": env, "loss": loss}, _values(groups[env, loss], plays))
        for env in FRAMES
        for loss in LOSSES
    ]
    _draw(folder / "klpen_clip.png", groups, rows)
    frames = _each(FRAMES, ",d")
    note = (
        f"Frames: {frames}. No KL to a reference. `clip` has the presets' `clip_epsilon=0.2`; "
        f"`klpen` and `klpen_held` have the KL(old||new) that clip was measured to have as their "
        f"`loss.dtarg`: {_each(TARGETS)}. `actor.init_std` is the presets': {_each(INIT_STD)}. "
        f"KL(old||new): of the whole rollout after the update, mean over the iterations after the "
        f"tenth. Deterministic return: {EPISODES} episodes of the last policy, from start states "
        "that all runs of a task share. Training return: of the sampled actions, which explore; "
        "mean over the last tenth of the iterations."
    )
    alt = "KL(old||new) and training return over frames, both returns at the end, for three losses"
    return [Section("Figures", note, rows, MEASURES, "klpen_clip.png", alt)]


def _each(values: Mapping[str, float], form: str = "g") -> str:
    return ", ".join(f"{value:{form}} ({env})" for env, value in values.items())


def _values(runs: Sequence[Run], plays: Plays) -> dict[str, np.ndarray]:
    return {
        "kl": np.array([mean_kl(run) for run in runs]),
        "closing": np.array([closing_return(run, plays) for run in runs]),
        "training": np.array([final(run, "reward/episode") for run in runs]),
    }


def mean_kl(run: Run) -> float:
    """KL(old||new), nats per frame, mean over the iterations after the tenth."""
    return float(column(run, "kl/old/exact")[WARM_UP:].mean())


def _draw(path: Path, groups: dict[tuple[str, ...], list[Run]], rows: Sequence[Row]) -> None:
    with panels(path, len(FRAMES), 3) as axes:
        for (kl, curve, reward), env in zip(axes, FRAMES, strict=True):
            kl.axhline(TARGETS[env], color="grey", linewidth=1, label="loss.dtarg")
            of_env = [row for row in rows if row.labels["env"] == env]
            for x, (row, (loss, colour)) in enumerate(zip(of_env, LOSSES.items(), strict=True)):
                learning_curve(kl, groups[env, loss], "kl/old/exact", colour, label=loss)
                learning_curve(curve, groups[env, loss], "reward/episode", colour)
                dots(reward, x, row, "closing", colour)
                dots(reward, x + 0.4, row, "training", colour, markerfacecolor="white")
            kl.set(title=env, xlabel="thousand frames", ylabel="KL(old||new), nats per frame")
            kl.set_yscale("log")
            curve.set(xlabel="thousand frames", ylabel="training return")
            for name, face in (("deterministic", "grey"), ("training", "white")):
                reward.plot([], [], "o", color="grey", markerfacecolor=face, label=name)
            reward.set(ylabel="return at the end")
            reward.set_xticks([x + 0.25 for x in range(len(LOSSES))], LOSSES)


RESULT = Result(
    number=8,
    name="klpen_clip",
    title="klpen against clip at equal KL(old||new)",
    question=(
        "`klpen` penalises KL(old||new), `clip` bounds the probability ratio. Where both move the "
        "policy as far per iteration, does one of them reach more?"
    ),
    chosen=(
        "`loss.dtarg` is the mean KL(old||new) of clip on seeds 100 and 101 (half_cheetah with "
        "200k frames), rounded. Nothing else was chosen: the presets' settings."
    ),
    limits=(
        "300k frames are a third of half_cheetah's preset; at a million frames "
        "([performance.md](../../performance.md)) the order of the losses differs from task to "
        "task and from seed to seed. The KLs are equal in the mean over a run only: clip's and "
        "klpen's fall with the learning rate, klpen_held's does not. Each loss is shown at one "
        "trust region, clip's own; none is at its best there. Intervals that overlap do not "
        "rank."
    ),
    sweeps=_sweeps(),
    make=make,
)
