"""Loss against loss: differences of the means, and what they say of the default."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.mujoco.runs import (
    CLIP,
    HELD,
    KL,
    KLPEN,
    MAIN,
    TWO,
    Known,
    table_line,
    title,
    values,
)
from klrl.report.statistics import ENOUGH, Array, chance_of_more, log_ratios, welch

#: Shares that a new default may lose: over tasks, excluded; on one task, not shown.
LOSS, MOST = 0.05, 0.2
#: What the presets take; documented as the rule.
DEFAULT = KLPEN
CHALLENGERS = (HELD, CLIP)
#: (a setting, the one that it is compared with, on which tasks).
PAIRS = ((HELD, CLIP, MAIN), (HELD, KLPEN, MAIN), (CLIP, KLPEN, MAIN), (KL, HELD, TWO))
HEAD = (
    table_line(
        *("settings", "task", "difference [95 %]", "in % of the second"),
        *("P(first > second)", f"a loss of {LOSS:.0%} is excluded"),
    ),
    table_line(*["---"] * 6),
)
TASKS_OF = {(first, second): tasks for first, second, tasks in PAIRS}


def sections(cells: Known) -> list[str]:
    """Both tables, what they mean, and the default."""
    return [
        "### Loss against loss",
        "Differences of mean returns, with Welch's interval. The default is klpen. klpen_held or "
        f"clip replaces it only if its mean over tasks excludes a loss of {LOSS:.0%}, and no task "
        f"is shown to lose more than {MOST:.0%}. A mean over tasks is the geometric mean of the "
        "ratios first / second, with an interval by the delta method. Power of this rule, with ten "
        "seeds of each loss and the spreads of this page (`python -m benchmarks.coverage`): a loss "
        "that returns 20% more on every task replaces klpen in 99 of 100 repeats (81 with five "
        "seeds), one that returns 10% more in 73, an equal one in 14, one that loses 5% in 3. The "
        "last three rows compare klpen_held with and without the regulariser. The setting was "
        "searched with klpen_held alone, and clip has a different KL(old||new), as the table above "
        "shows.",
        table(cells, "return", PAIRS),
        default_told(cells),
        "The same for the returns in training (sampled actions, last tenth), which the rule does "
        "not use:",
        table(cells, "training", PAIRS),
    ]


def default_told(cells: Known) -> str:
    """Which loss the presets take, by the rule above."""
    ahead = [each for each in CHALLENGERS if is_ahead(cells, each)]
    if ahead:
        return f"**{title(ahead[0])} replaces {DEFAULT}.**"
    return (
        f"**In this edition {DEFAULT} stays the default.** In the last column, no means that the "
        f"runs do not exclude a loss of {LOSS:.0%}, not that they show one: the intervals of five "
        "and ten seeds are wider than that."
    )


def is_ahead(cells: Known, challenger: str) -> bool:
    """Whether its runs take the default's place; not before all are there."""
    tasks = TASKS_OF[challenger, DEFAULT]
    a, b = ([values(cells, each, task) for task in tasks] for each in (challenger, DEFAULT))
    return min(map(len, [*a, *b])) >= ENOUGH and takes_over(a, b)


def takes_over(challenger: Sequence[Array], default: Sequence[Array]) -> bool:
    """The rule, of returns by task: over tasks a loss of LOSS is excluded, and no task loses MOST.

    A task loses MOST if its ratio's interval lies below. ``benchmarks.coverage`` has the power.
    """
    alone = [([a], [b]) for a, b in zip(challenger, default, strict=True)]
    over, *by_task = log_ratios([(challenger, default), *alone])
    excluded = over.low > math.log(1 - LOSS)
    return excluded and all(each.high > math.log(1 - MOST) for each in by_task)


def table(cells: Known, key: str, pairs: Sequence[tuple[str, str, Sequence[str]]]) -> str:
    """Setting less setting, task by task, and whether a loss of 5 % is excluded."""
    lines = list(HEAD)
    for first, second, tasks in pairs:
        lines += [loss_beside_loss(cells, first, second, task, key) for task in tasks]
        lines.append(over_tasks(cells, first, second, tasks, key))
    return "\n".join(lines)


def difference(first: str, second: str) -> str:
    """As in ``klpen_held - clip``."""
    return " - ".join(f"({name})" if "," in name else name for name in map(title, (first, second)))


def over_tasks(
    cells: Known, first: str, second: str, tasks: Sequence[str], key: str = "return"
) -> str:
    """The line of the mean over tasks: of log(mean a / mean b), told as a percentage.

    Its interval is the delta method's: the error of log(mean a) is that of mean a, over mean a.
    Percentages of b would have another mean, and at times another verdict, than those of a.
    """
    names = difference(first, second)
    pairs = [tuple(values(cells, each, task, key) for each in (first, second)) for task in tasks]
    if min(len(sample) for pair in pairs for sample in pair) < ENOUGH:
        return table_line(names, f"mean of {len(tasks)}", "", "not run yet", "", "no")
    ratio = log_ratios([([a for a, _ in pairs], [b for _, b in pairs])])[0]
    value, low, high = (100 * math.expm1(x) for x in (ratio.value, ratio.low, ratio.high))
    return table_line(
        names,
        f"mean of {len(tasks)}",
        "",
        f"{value:+.0f} [{low:+.0f}, {high:+.0f}]",
        "",
        "yes" if low > -100 * LOSS else "no",
    )


def loss_beside_loss(cells: Known, first: str, second: str, task: str, key: str = "return") -> str:
    """A line of the table."""
    a, b = values(cells, first, task, key), values(cells, second, task, key)
    names = difference(first, second)
    if min(len(a), len(b)) < ENOUGH:
        return table_line(names, task, "not run yet", "", "", "no")
    gap, mean = welch([a, b], [1, -1]), abs(float(np.mean(b)))
    shares = (100 * each / mean for each in (gap.value, gap.low, gap.high))
    return table_line(
        names,
        task,
        f"{gap.value:+,.0f} [{gap.low:+,.0f}, {gap.high:+,.0f}]",
        "{:+.0f} [{:+.0f}, {:+.0f}]".format(*shares),
        f"{chance_of_more(a, b):.2f}",
        "yes" if gap.low > -LOSS * mean else "no",
    )
