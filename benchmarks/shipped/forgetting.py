"""Result 4: fine-tuning to changed dynamics near the trained policy, and what is forgotten.

Wolczyk et al. 2024, "Fine-tuning Reinforcement Learning Models is Secretly a Forgetting Mitigation
Problem" (arXiv 2402.02868).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.shipped.draw import BLUE, ORANGE, line, panels
from benchmarks.shipped.page import Result
from benchmarks.shipped.sweeps import EPISODES, OUTPUTS, Labelled, Plays, by_labels
from benchmarks.shipped.tables import Row
from klrl.report.measures import final
from klrl.report.runs import ReadRun

FOLDER = OUTPUTS / "results" / "forgetting"
#: Starts with a dot: Gymnasium looks for any other relative path among its own models.
HEAVY = f"./{FOLDER}/hopper_heavy_torso.xml"
#: kg per cubic metre; MuJoCo's default, which Hopper's torso has, is 1000.
DENSITY = 2000


#: The words of the new and the old task, the change, the coefficients of the fine-tuning.
TASKS = {
    "pendulum": (
        *("env.kwargs.g=14", "env.kwargs.g=10", "gravity 10 → 14 m/s²"),
        ("0", "0.03", "0.1", "0.3", "1", "3"),
    ),
    "hopper": (
        *(f"env.kwargs.xml_file={HEAVY}", "env.kwargs.xml_file=hopper.xml"),
        *("torso twice as heavy", ("0", "0.1", "0.3", "1", "3", "10")),
    ),
}


def prepare() -> None:
    """Write Hopper's model with a heavier torso, from the one that Gymnasium installed."""
    import gymnasium

    path = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "hopper.xml"
    Path(HEAVY).parent.mkdir(parents=True, exist_ok=True)
    Path(HEAVY).write_text(heavier_torso(path.read_text(encoding="utf-8")), encoding="utf-8")


def heavier_torso(model: str) -> str:
    """Hopper's XML with the torso's density set to :data:`DENSITY`."""
    torso = 'name="torso_geom"'
    assert model.count(torso) == 1, "Gymnasium's hopper.xml is not the one that is known here"
    return model.replace(torso, f'{torso} density="{DENSITY}"')


def make(result: Result, runs: Sequence[Labelled], plays: Plays) -> list[list[Row]]:
    groups = by_labels(runs, "env", "kl.coef")
    rows = [
        Row({"env": env, "kl.coef": coef}, _values(groups[env, coef], new, old, plays))
        for env, (new, old, _, coefs) in TASKS.items()
        for coef in ("base", *coefs)
    ]
    _draw(result.picture, rows)
    return [rows]


def _values(runs: Sequence[ReadRun], new: str, old: str, plays: Plays) -> dict[str, np.ndarray]:
    found = {
        name: np.array([plays(r, [word], episodes=EPISODES)["eval/return"] for r in runs])
        for name, word in (("new", new), ("old", old))
    }
    kl = np.array([final(run, "kl/ref/exact") for run in runs])
    return found if np.isnan(kl).all() else {**found, "kl": kl}


def _draw(path: Path, rows: Sequence[Row]) -> None:
    with panels(path, 1, len(TASKS), height=4.0) as axes:
        for each, (env, (_, _, told, coefs)) in zip(axes[0], TASKS.items(), strict=True):
            base, *tuned = [row for row in rows if row.labels["env"] == env]
            places = list(range(len(tuned)))
            for key, colour, marker, side in (("new", ORANGE, "s", -1), ("old", BLUE, "o", 1)):
                x = [place + 0.06 * side for place in places]
                look = {"marker": marker, "label": f"{key} task, fine-tuned"}
                line(each, x, tuned, key, colour, aside=side, **look)
                before = base.estimate(key).value
                each.axhline(
                    before, color=colour, linestyle="--", linewidth=1, label=f"{key} task, before"
                )
            each.set_xticks(places, coefs)
            each.set(
                title=f"{env}: {told}",
                xlabel="kl.coef of KL(policy||base), reward per nat",
                ylabel="return per episode",
            )
