"""The picture of the site's first page, from the committed cells of results 4 and 5.

    python -m benchmarks.home          # writes docs/home.png and docs/home_dark.png

Control: ten pendulum policies (g=10) trained on g=14. Language: klrl's small model, trained on a
proxy of the score that is wanted, three seeds. An arrow goes from the mean before training to the
mean after, with the KL and without.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

DOCS = Path(__file__).parent.parent / "docs"
#: kl.coef with the KL.
NEAR = {"control": "0.3", "language": "0.1"}
LOOKS = {"home": ("#20242c", "#3949ab", "#d84315"), "home_dark": ("#dfe3ea", "#9fa8da", "#ff8a65")}
Points = list[tuple[float, float]]


def control() -> dict[str, Points]:
    """Returns on the new and the old task: before, and after ``kl.coef``."""
    lines = (DOCS / "results/predictors/cells.jsonl").read_text("utf-8").splitlines()
    found = [each for each in map(json.loads, lines) if each["name"].startswith("pendulum")]
    names = {"before": "base", "0": "rl 0", NEAR["control"]: f"rl {NEAR['control']}"}
    return {
        key: [(one["policies"][name]["new"], one["policies"][name]["old"]) for one in found]
        for key, name in names.items()
    }


def language() -> dict[str, Points]:
    """Proxy and gold score: before, and after ``kl.coef``."""
    with (DOCS / "results/frontier/figures.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = {"before": ("best-of-n", "1"), "0": ("trained", "0")}
    names |= {NEAR["language"]: ("trained", NEAR["language"])}
    found = {}
    for key, (policy, number) in names.items():
        seeds = [
            next(
                [float(x) for x in row["seeds"].split()]
                for row in rows
                if (row["policy"], row["kl.coef, n or c"], row["measure"])
                == (policy, number, measure)
            )
            for measure in ("proxy", "gold")
        ]
        found[key] = list(zip(*seeds, strict=True))
    return found


def centre(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The mean point."""
    x, y = zip(*points, strict=True)
    return mean(x), mean(y)


def panel(axes: Axes, domain: str, found: dict[str, Points], look: tuple[str, str, str]) -> None:
    """Draw a domain: a dot per policy, an arrow per setting."""
    ink, near, far = look
    start = centre(found["before"])
    axes.scatter(*zip(*found["before"], strict=True), s=14, color=ink, alpha=0.35, linewidths=0)
    for key, colour, words in (
        (NEAR[domain], near, "with the KL"),
        ("0", far, "without"),
    ):
        points, end = found[key], centre(found[key])
        axes.scatter(*zip(*points, strict=True), s=14, color=colour, alpha=0.35, linewidths=0)
        arrow = {"arrowstyle": "-|>", "lw": 2.5, "color": colour, "shrinkA": 6, "shrinkB": 0}
        axes.annotate("", end, start, arrowprops=arrow)
        offset = (4, 8 if key != "0" else -16)
        words_at = {"xytext": offset, "textcoords": "offset points", "ha": "right"}
        axes.annotate(words, end, color=colour, weight="bold", **words_at)
    axes.scatter(*start, s=70, color=ink, zorder=3)
    axes.annotate(
        "before", start, xytext=(0, 9), textcoords="offset points", color=ink, ha="center"
    )


def draw(name: str, look: tuple[str, str, str]) -> None:
    """Write ``docs/NAME.png``."""
    ink = look[0]
    style = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    style |= {"axes.edgecolor": ink, "font.size": 10}
    style |= {"axes.spines.top": False, "axes.spines.right": False}  # type: ignore[dict-item]
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.6), layout="constrained")
        panel(left, "control", control(), look)
        left.set(xlabel="return on the new task (g=14)", ylabel="return on the old task (g=10)")
        left.set_title("A pendulum learns a heavier pole", loc="left", size=11)
        panel(right, "language", language(), look)
        right.set(xlabel="score that is trained (a proxy)", ylabel="score that is wanted")
        right.set_title("A model earns a flawed reward", loc="left", size=11)
        for axes in (left, right):
            axes.margins(0.12)
        figure.savefig(DOCS / f"{name}.png", dpi=160, transparent=True)
        plt.close(figure)


if __name__ == "__main__":
    for name, look in LOOKS.items():
        draw(name, look)
