"""klrl beside Stable-Baselines3, which was run, and beside published tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt

import numpy as np

from benchmarks.mujoco.cells import SB3
from benchmarks.mujoco.curves import training_cpu
from benchmarks.mujoco.published import NAMES, SOURCES, V5, Source, best
from benchmarks.mujoco.runs import CLIP, HELD, KLPEN, MAIN, TWO, Known, table_line, values
from klrl.report.statistics import ENOUGH, chance_of_more, iqm

#: Seeds of a published figure that may stand for more than its luck.
LEAST = 3
#: Of return / the best published PPO: the interquartile mean, and each task's mean.
AIM, AIM_OF_A_TASK = 1.1, 0.9
#: Of the standard normal distribution, for 95 %.
_Z = 1.959964


def beside_sb3(cells: Known) -> list[str]:
    lines = []
    for task in TWO:
        ours, peers = values(cells, HELD, task), values(cells, SB3, task)
        if not len(ours) or not len(peers):
            continue
        chance = chance_of_more(ours, peers)
        low, high = chance_interval(chance, len(ours), len(peers))
        cpu = [np.median([training_cpu(line) for line in cells[s][task]]) for s in (HELD, SB3)]
        lines.append(
            table_line(
                task,
                *(f"{x.mean():,.0f} ({x.min():,.0f} to {x.max():,.0f})" for x in (ours, peers)),
                f"{chance:.2f} [{low:.2f}, {high:.2f}]",
                f"{cpu[0]:,.0f} / {cpu[1]:,.0f} = {cpu[0] / cpu[1]:.2f}",
            )
        )
    if not lines:
        return []
    head = table_line(
        *("task", "klrl (klpen_held)", "Stable-Baselines3", "P(klrl > SB3) [95 %]"),
        "CPU seconds per run, klrl / SB3",
    )
    note = (
        "Stable-Baselines3's PPO with CleanRL's settings, one environment, "
        f"{counts(values(cells, SB3, task) for task in TWO)} seeds, on the same start states. "
        "These are not its best settings: rl-baselines3-zoo publishes 5,819 on HalfCheetah and "
        "2,410 on Hopper, tuned per task (below). "
        "P(klrl > SB3): the probability that a run of klrl returns more than one of "
        "Stable-Baselines3; interval by method 5 of Newcombe 2006. CPU: medians, without "
        "evaluation. Here Stable-Baselines3 steps one environment and runs eagerly, while klrl's "
        "preset steps eight and compiles: the ratio compares ways to train, not only code."
    )
    lines = [head, table_line(*["---"] * 5), *lines]
    return ["### Against Stable-Baselines3", note, "\n".join(lines)]


def chance_interval(chance: float, m: int, n: int) -> tuple[float, float]:
    """95 % interval of P(A > B) from U / (m n), of few seeds and at 0 and 1 too.

    Newcombe 2006 (Statistics in Medicine 25, 559-573), method 5: the ends p solve
    |chance - p| = z s(p), where, with k = (m + n) / 2 - 1,

        s(p)^2 = p (1 - p) / (m n) * (1 + k (1 - p) / (2 - p) + k p / (1 + p)).
    """
    k = (m + n) / 2 - 1

    def inside(p: float) -> bool:
        spread = p * (1 - p) / (m * n) * (1 + k * (1 - p) / (2 - p) + k * p / (1 + p))
        return abs(chance - p) <= _Z * sqrt(spread)

    def end(of: float) -> float:
        """Between the estimate, which is inside, and 0 or 1, which are not, unless they are it."""
        within, beyond = chance, of
        for _ in range(60):
            middle = (within + beyond) / 2
            within, beyond = (middle, beyond) if inside(middle) else (within, middle)
        return within

    return end(0.0), end(1.0)


def beside_published(cells: Known) -> list[str]:
    """klrl's means, and every published table; the aim."""
    if not all(len(values(cells, HELD, task)) for task in MAIN):
        return []
    tasks = list(NAMES)
    means = {task: values(cells, HELD, task) for task in tasks}
    shown = [_short(each.mean()) if len(each) else "" for each in means.values()]
    lines = [
        table_line("", "env", "seeds", "tuned", *NAMES.values()),
        table_line(*["---"] * (len(tasks) + 4)),
        table_line("klrl, klpen_held", "v5", counts(means.values()), "one setting*", *shown),
    ]
    for source in SOURCES:
        numbers = [
            _short(source.returns[task][0]) if task in source.returns else "" for task in tasks
        ]
        method = f", {source.method}" * (source.method not in source.name)
        name = f"[{source.name}{method}]({_link(source.address)})"
        seeds = str(source.seeds or "not said")
        lines.append(table_line(name, source.versions, seeds, source.tuning, *numbers))
    changed = "; ".join(f"{NAMES[task]}: {what}" for task, what in V5.items())
    note = (
        "Published returns at a million frames. Versions, tuning and measures differ, so a ratio "
        "does not compare implementations: klrl's returns are those of the likeliest actions, most "
        "others are of sampled ones, and Tianshou's are from the first third of runs whose "
        "learning rate falls over 3M frames. benchmarks/mujoco/published.csv has how each source "
        "measured. *except for Swimmer's discount and the observations of Ant and Humanoid, as "
        f"described above. What v5 changed: {changed}."
    )
    said = [s for s in SOURCES if (s.seeds or 0) >= LEAST and not s.approximate]
    text = [
        aim_told(cells),
        _ratios(cells, "of the returns in training (no aim)", key="training"),
        _ratios(cells, f"of tables with {LEAST} seeds or more (no aim)", said),
    ]
    return ["### Against published tables", note, "\n".join(lines), *text]


def aim_told(cells: Known) -> str:
    """The aim, and whether it is reached."""
    highest = {task: best(task)[0] for task in MAIN}
    whole = against_published(cells, HELD, highest)
    by_task = {task: values(cells, HELD, task).mean() / highest[task] for task in MAIN}
    below = [f"{NAMES[t]} {ratio:.2f}" for t, ratio in by_task.items() if ratio < AIM_OF_A_TASK]
    reached = "reached" if whole >= AIM and not below else "missed"
    found = ", ".join([f"{whole:.2f}", *below])
    return (
        f"**Aim: {AIM:g} times the best published PPO (interquartile mean over klpen_held's runs "
        f"on the five main tasks), no task below {AIM_OF_A_TASK:g}. It is {reached}: {found}.** "
        + _ratios(cells, "of all tables")
    )


def _ratios(
    cells: Known, which: str, sources: Sequence[Source] = SOURCES, key: str = "return"
) -> str:
    """Return / the best published: of each loss over the main tasks, of klpen_held by task."""
    highest = {task: best(task, sources) for task in MAIN}
    numbers = {task: value for task, (value, _) in highest.items()}
    middles = ", ".join(
        f"{setting} {against_published(cells, setting, numbers, key):.2f}"
        for setting in (HELD, CLIP, KLPEN)
        if all(len(values(cells, setting, task)) >= ENOUGH for task in MAIN)
    )
    each = ", ".join(
        f"{NAMES[task]} {values(cells, HELD, task, key).mean() / value:.2f} ({source.name})"
        for task, (value, source) in highest.items()
    )
    return (
        f"Return / the best published PPO, {which}: interquartile means {middles}; klpen_held's "
        f"means by task {each}."
    )


def against_published(
    cells: Known, setting: str, highest: Mapping[str, float], key: str = "return"
) -> float:
    """Interquartile mean over the main tasks' runs of (return / best published)."""
    ratios = [values(cells, setting, task, key) / highest[task] for task in MAIN]
    return float(iqm(np.concatenate(ratios)))


def counts(samples: Iterable[np.ndarray]) -> str:
    """As in ``10``, or ``8 to 10``."""
    found = sorted({len(each) for each in samples if len(each)})
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _short(value: float) -> str:
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def _link(address: str) -> str:
    """An address without the words after it."""
    return address.split(",")[0].split(" ")[0].rstrip(";")
