"""``docs/results/mujoco/``: README.md, figures.csv, about.json and the pictures, from the cells."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.mujoco.cells import END, SB3, Line
from benchmarks.mujoco.published import NAMES, SOURCES, V5, best
from benchmarks.mujoco.runs import (
    CLIP,
    FOLDER,
    HELD,
    KL,
    KLPEN,
    MAIN,
    SEEDS,
    SETTINGS,
    TITLES,
    TWO,
    cells_of,
    known,
)
from benchmarks.peers.common import versions
from benchmarks.shipped.draw import BLACK, BLUE, GREEN, ORANGE, RED, panels
from benchmarks.shipped.page import INTERVAL, replace_measured
from benchmarks.shipped.tables import Measure, Row, markdown, write_csv
from klrl.report.measures import BAND
from klrl.report.statistics import ENOUGH, chance_of_more, iqm, welch

NUMBER = 7
TITLE = "MuJoCo at a million frames"
COLOUR = {HELD: BLUE, CLIP: GREEN, KLPEN: ORANGE, KL: RED, SB3: BLACK}
#: Share of a task's return that a new default may lose at most.
LOSS = 0.05
RESAMPLES = 10_000
#: Seeds of a published figure that may stand for more than its luck.
LEAST = 3
Known = Mapping[str, Mapping[str, Sequence[Line]]]

MEASURES = (
    Measure("return", "return", "per episode", ",.0f"),
    Measure("band", "in band", "share of iterations", bounds=(0.0, 1.0)),
    Measure("band_end", "in band at the end", "likewise", bounds=(0.0, 1.0)),
    Measure("cpu", "CPU", "seconds", ",.0f", "high"),
)


def write_page(folder: Path = FOLDER) -> None:
    """Compute, draw and write what there is."""
    cells: Known = {setting: known(setting, folder) for setting in SEEDS}
    rows = [
        Row(
            {"task": task, "setting": title(setting), "seeds": str(len(lines))},
            _values(lines),
        )
        for task in NAMES
        for setting, tasks in cells.items()
        if (lines := tasks.get(task))
    ]
    if not rows:
        raise SystemExit(f"{folder}: no run is finished yet")
    write_csv(rows, MEASURES, folder / "figures.csv")
    draw_curves(folder / "mujoco.png", cells, "frames")
    draw_curves(folder / "main.png", cells, "frames", MAIN, columns=5)
    draw_curves(folder / "cpu.png", cells, "seconds")
    runs = [line for tasks in cells.values() for lines in tasks.values() for line in lines]
    about = {
        "number": NUMBER,
        "title": TITLE,
        "machine": {"name": ", ".join(sorted({line["machine"] for line in runs}))},
        "versions": versions(),
        "runs": len(runs),
        "seconds": round(sum(line["seconds"] for line in runs)),
    }
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    question = (
        "What does one setting reach on nine tasks at the presets' own length, and which loss "
        "should be the default?"
    )
    text = "\n\n".join(_sections(cells, rows, about))
    replace_measured(folder / "README.md", text, f"# {TITLE}\n\n{question}\n")


def _values(lines: Sequence[Line]) -> dict[str, np.ndarray]:
    """Measure -> one value per seed; none where the setting does not have it."""
    values = {m.key: [line.get(m.key) for line in lines] for m in MEASURES}
    return {key: np.array(each, float) for key, each in values.items() if None not in each}


def _sections(cells: Known, rows: Sequence[Row], about: Line) -> list[str]:
    told = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return [
        *_missing(about["runs"]),
        "## Returns",
        "![Training return over frames on nine tasks, a line per seed, for each loss](mujoco.png)",
        "Return: 100 deterministic episodes of the last policy, from start states that all runs of "
        f"a task share. In band: iterations after the tenth with KL(old||new) within {BAND} times "
        f"its target, of all and of the last {END:.0%}. CPU: of the whole process, one thread, "
        "evaluation included, on a machine that ran one other run, at times more: too long rather "
        "than too short. A setting of fewer than five seeds shows its range.",
        markdown(rows, MEASURES),
        INTERVAL.format(seeds="the"),
        *_ended_early(cells),
        *_losses(cells),
        *_beside_sb3(cells),
        *_beside_published(cells),
        *_in_cpu_seconds(),
        "## How",
        f"    make results-{NUMBER}",
        "which goes on from the committed cells/, and then draws. " + _commands(),
        f"{about['runs']} runs, {about['seconds']:,} seconds of iterations in all. Machine: "
        f"{about['machine']['name']}. Versions: {told}.",
    ]


def _missing(made: int) -> list[str]:
    """How much of the page there is, where it is not all."""
    planned = sum(len(cells_of(setting)) for setting in SEEDS)
    if made >= planned:
        return []
    return [
        f"**Not complete: {made} of {planned} runs are made.** What stands here may change."
    ]


def _in_cpu_seconds() -> list[str]:
    return [
        "## Over time",
        "![Training return over seconds of iterations, on nine tasks](cpu.png)",
        "Seconds of the iterations alone (rollout, KL, update), on one core of a machine whose "
        "other core ran another of these runs.",
    ]


def _commands() -> str:
    words = {setting: " ".join(each) for setting, each in SETTINGS.items()}
    return "Beside `env=TASK seed=SEED`: " + "; ".join(f"`{each}`" for each in words.values()) + "."


#: (a setting, the one that it is compared with, on which tasks).
PAIRS = ((HELD, CLIP, MAIN), (HELD, KLPEN, MAIN), (CLIP, KLPEN, MAIN), (KL, HELD, TWO))


def _losses(cells: Known) -> list[str]:
    """Setting less setting, task by task, and whether a loss of 5 % is excluded."""
    lines = [
        _head("settings", "task", "difference [95 %]", "in % of the second", "P(first > second)")
        + _head("a loss of 5 % is excluded")[1:],
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for first, second, tasks in PAIRS:
        for task in tasks:
            lines.append(loss_beside_loss(cells, first, second, task))
        lines.append(over_tasks(cells, first, second, tasks))
    note = (
        "Welch's interval of the difference of the means. The default is klpen: klpen_held or "
        "clip takes its place only if each of its lines against klpen says yes. A mean over tasks "
        "is that of the percentages, and takes what they are percent of as certain. The last "
        "lines: what the regulariser adds to klpen_held."
    )
    return ["## Loss beside loss", note, "\n".join(lines)]


def title(setting: str) -> str:
    """What tables and pictures call it."""
    return TITLES.get(setting, setting)


def difference(first: str, second: str) -> str:
    """As in ``klpen_held - clip``."""
    return " - ".join(f"({name})" if "," in name else name for name in map(title, (first, second)))


def over_tasks(cells: Known, first: str, second: str, tasks: Sequence[str]) -> str:
    """The line of the mean over tasks, in percent of the second's means."""
    names, pairs = difference(first, second), []
    for task in tasks:
        pairs.append((_returns(cells, first, task), _returns(cells, second, task)))
    if min(len(sample) for pair in pairs for sample in pair) < ENOUGH:
        return _head(names, f"mean of {len(tasks)}", "", "not run yet", "", "no")
    shares = [100 / (len(tasks) * abs(b.mean())) for _, b in pairs]
    weights = [sign * share for share in shares for sign in (1, -1)]
    mean = welch([sample for pair in pairs for sample in pair], weights)
    return _head(
        names,
        f"mean of {len(tasks)}",
        "",
        f"{mean.value:+.0f} [{mean.low:+.0f}, {mean.high:+.0f}]",
        "",
        "yes" if mean.low > -100 * LOSS else "no",
    )


def loss_beside_loss(cells: Known, first: str, second: str, task: str) -> str:
    """A line of the table."""
    a, b = _returns(cells, first, task), _returns(cells, second, task)
    names = difference(first, second)
    if min(len(a), len(b)) < ENOUGH:
        return _head(names, task, "not run yet", "", "", "no")
    gap, mean = welch([a, b], [1, -1]), abs(b.mean())
    shares = (100 * each / mean for each in (gap.value, gap.low, gap.high))
    return _head(
        names,
        task,
        f"{gap.value:+,.0f} [{gap.low:+,.0f}, {gap.high:+,.0f}]",
        "{:+.0f} [{:+.0f}, {:+.0f}]".format(*shares),
        f"{chance_of_more(a, b):.2f}",
        "yes" if gap.low > -LOSS * mean else "no",
    )


def _head(*titles: str) -> str:
    """The first line of a table."""
    return f"| {' | '.join(titles)} |"


def _beside_sb3(cells: Known) -> list[str]:
    lines = [
        _head("task", "klrl (klpen_held)", "Stable-Baselines3", "P(klrl > SB3) [95 %]")
        + _head("CPU seconds per run, klrl / SB3")[1:],
        "| --- | --- | --- | --- | --- |",
    ]
    for task in TWO:
        ours, peers = _returns(cells, HELD, task), _returns(cells, SB3, task)
        if not len(ours) or not len(peers):
            continue
        low, high = chance_interval(ours, peers)
        cpu = [
            np.median([line["cpu"] - line["evaluation_seconds"] for line in cells[s][task]])
            for s in (HELD, SB3)
        ]
        lines.append(
            f"| {task} | {ours.mean():,.0f} ({ours.min():,.0f} to {ours.max():,.0f}) | "
            f"{peers.mean():,.0f} ({peers.min():,.0f} to {peers.max():,.0f}) | "
            f"{chance_of_more(ours, peers):.2f} [{low:.2f}, {high:.2f}] | "
            f"{cpu[0]:,.0f} / {cpu[1]:,.0f} = {cpu[0] / cpu[1]:.2f} |"
        )
    if len(lines) == 2:
        return []
    seeds = _counts(_returns(cells, SB3, task) for task in TWO)
    note = (
        f"Stable-Baselines3's PPO with CleanRL's settings, {seeds} seeds, on the same start "
        "states. P(klrl > SB3): that a run of klrl returns more than one of Stable-Baselines3; its "
        f"interval is a percentile bootstrap over seeds, of which {seeds} are too few for it "
        "to hold its level. CPU: medians, without evaluation."
    )
    return ["## Beside Stable-Baselines3", note, "\n".join(lines)]


def chance_interval(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of P(A > B), seeds drawn anew in either sample."""
    rng = np.random.default_rng(0)
    draws = [chance_of_more(rng.choice(a, len(a)), rng.choice(b, len(b))) for _ in range(RESAMPLES)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def _beside_published(cells: Known) -> list[str]:
    """klrl's means, and every published table; the aim in one number."""
    if not all(len(_returns(cells, HELD, task)) for task in MAIN):
        return []
    tasks = list(NAMES)
    lines = [_head("", "env", "seeds", "tuned", *NAMES.values())]
    lines.append(_head(*["---"] * (len(tasks) + 4)))
    means = {task: _returns(cells, HELD, task) for task in tasks}
    shown = [f"{_short(each.mean())}" if len(each) else "" for each in means.values()]
    lines.append(_head("klrl, klpen_held", "v5", _counts(means.values()), "one setting", *shown))
    for source in SOURCES:
        numbers = [
            _short(source.returns[task][0]) if task in source.returns else "" for task in tasks
        ]
        method = f", {source.method}" * (source.method not in source.name)
        name = f"[{source.name}{method}]({_link(source.address)})"
        seeds = str(source.seeds or "not said")
        lines.append(_head(name, source.versions, seeds, source.tuning, *numbers))
    said = [s for s in SOURCES if (s.seeds or 0) >= LEAST and not s.approximate]
    text = []
    for which, sources in (
        ("of all tables", SOURCES),
        (f"of those of {LEAST} seeds or more", said),
    ):
        highest = {task: best(task, sources) for task in MAIN}
        values = {task: value for task, (value, _) in highest.items()}
        each = ", ".join(
            f"{NAMES[task]} {means[task].mean() / value:.2f} ({source.name})"
            for task, (value, source) in highest.items()
        )
        middles = ", ".join(
            f"{setting} {against_published(cells, setting, values):.2f}"
            for setting in (HELD, CLIP, KLPEN)
            if all(len(_returns(cells, setting, task)) >= ENOUGH for task in MAIN)
        )
        text.append(
            f"Return / the best published PPO, {which}: interquartile mean over all runs of the "
            f"five main tasks {middles}. klpen_held's means by task: {each}."
        )
    changed = "; ".join(f"{NAMES[task]}: {what}" for task, what in V5.items())
    note = (
        "Published at a million frames, as read; versions, tuning and measures differ, so that a "
        "ratio is no comparison of implementations. How each source measured stands in "
        f"benchmarks/mujoco/published.py. What v5 changed: {changed}."
    )
    return ["## Beside published tables", note, "\n".join(lines), *text]


def _counts(samples: Iterable[np.ndarray]) -> str:
    """As in ``10``, or ``8 to 10``."""
    counts = sorted({len(each) for each in samples if len(each)})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _ended_early(cells: Known) -> list[str]:
    """Runs whose numbers became infinite."""
    names = [
        line["name"]
        for tasks in cells.values()
        for lines in tasks.values()
        for line in lines
        if "failed" in line
    ]
    if not names:
        return []
    told = ", ".join(names)
    return [f"Ended early, and counted as at their last checkpoint: {told}."]


def _short(value: float) -> str:
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def _link(address: str) -> str:
    """An address without the words after it."""
    return address.split(",")[0].split(" ")[0].rstrip(";")


def against_published(cells: Known, setting: str, best: Mapping[str, float]) -> float:
    """Interquartile mean over the main tasks' runs of (return / best published).

    Args:
        cells: with the setting's.
        setting: whose runs.
        best: task -> the best published return of PPO at a million frames.
    """
    ratios = [_returns(cells, setting, task) / best[task] for task in MAIN]
    return float(iqm(np.concatenate(ratios)))


def _returns(cells: Known, setting: str, task: str) -> np.ndarray:
    return np.array([line["return"] for line in cells[setting].get(task, ())], float)


def draw_curves(
    path: Path, cells: Known, axis: str, tasks: Sequence[str] = tuple(NAMES), columns: int = 3
) -> None:
    """Training return over frames or seconds: a panel per task, a thin line per seed, their mean.

    Args:
        path: the PNG.
        cells: what is known.
        axis: ``frames`` or ``seconds``, of a cell's curve.
        tasks: of the panels, row by row.
        columns: of panels.
    """
    with panels(path, len(tasks) // columns, columns, height=2.9) as axes:
        for each, task in zip(axes.ravel(), tasks, strict=True):
            for setting, by_task in cells.items():
                lines = by_task.get(task, ())
                if lines:
                    _curves(each, lines, axis, COLOUR[setting], title(setting))
            each.set(title=NAMES[task])
        for each in axes[-1]:
            each.set(xlabel="thousand frames" if axis == "frames" else "seconds of iterations")
        for each in axes[:, 0]:
            each.set(ylabel="training return")


def _curves(axes: object, lines: Sequence[Line], axis: str, colour: str, label: str) -> None:
    scale = 1000 if axis == "frames" else 1
    curves = [line["curve"] for line in lines]
    xs = [np.array(c[axis], float) / scale for c in curves]
    ys = [np.array(c["return"], float) for c in curves]
    for x, y in zip(xs, ys, strict=True):
        axes.plot(x, y, color=colour, linewidth=0.5, alpha=0.3)  # type: ignore[attr-defined]
    points = min(map(len, ys))
    x = np.mean([x[:points] for x in xs], axis=0)
    y = np.nanmean([y[:points] for y in ys], axis=0)
    axes.plot(x, y, color=colour, linewidth=1.6, label=label)  # type: ignore[attr-defined]
