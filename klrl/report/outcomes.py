"""Selects the runs for the statistics; describes how many finished, failed, or ended early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from klrl.base.text import counted
from klrl.report.measures import Line
from klrl.report.runs import ReadRun
from klrl.report.settings import Setting, group_runs, names_of
from klrl.runs.folder import planned_frames


@dataclass(frozen=True)
class Counted:
    """The runs in the statistics, grouped into settings (runs that differ only in their seed)."""

    settings: list[Setting]
    replaced: list[ReadRun]  # runs left out, since another run of the same job is included


def count_runs(runs: Sequence[ReadRun], *, unfinished: bool = False) -> Counted:
    """Select the runs for the statistics, and group them.

    Includes finished runs with rows; failed runs, even without rows, since divergence is a result;
    and, if ``unfinished``, interrupted and running runs with rows.
    """
    every = [
        run for run in runs if run.failed or (run.rows and (unfinished or run.status == "finished"))
    ]
    settings, replaced = group_runs(every, names_of(runs))
    # Leave out tasks without a recorded row.
    recorded = {setting.task for setting in settings if any(run.rows for run in setting.runs)}
    return Counted([each for each in settings if each.task in recorded], replaced)


def seeds_text(setting: Setting) -> str:
    """Format how many seeds finished: ``5`` if all did, else ``3 of 5``."""
    every = len(setting.runs)
    finished = sum(run.status == "finished" for run in setting.runs)
    return str(every) if finished == every else f"{finished} of {every}"


def returns_text(line: Line) -> str:
    """Format how many seeds have a final return: ``4 of 5 have a return``; empty if all have."""
    runs, score = line.setting.runs, line.estimates["return"]
    seeds = score.seeds if score else 0
    if seeds == len(runs):
        return ""
    have = f"{seeds} of {len(runs)} {'has' if seeds == 1 else 'have'}" if seeds else "none has"
    return f"{have} a {runs[0].domain.score}"


def label(line: Line) -> str:
    """Return a setting's name; add how many seeds finished and have a return, unless all do."""
    seeds = seeds_text(line.setting)
    told = ", ".join(t for t in (seeds if "of" in seeds else "", returns_text(line)) if t)
    return f"{line.setting.name} ({told})" if told else line.setting.name


def short_runs(settings: Sequence[Setting]) -> dict[int, int]:
    """Map a setting's index to the number of its runs that ended early; leave out zeros.

    A run ended early if it has fewer frames than the largest value of ``frames`` among all runs
    or, if that is unknown, than the longest run. Failed runs are not counted here.
    """
    runs = [run for setting in settings for run in setting.runs]
    frames = [run.settings.get("frames") for run in runs]
    asked = [float(each) for each in frames if isinstance(each, int | float)]
    full = max(asked or [run.end for run in runs], default=0.0)
    short = {
        i: sum(run.end < full and not run.failed for run in setting.runs)
        for i, setting in enumerate(settings)
    }
    return {i: number for i, number in short.items() if number}


def remarks(settings: Sequence[Setting]) -> list[str]:
    """Return remarks on runs that differ in more than settings and seeds."""
    resumed = "; ".join(
        f"{each.name} seed {run.seed} ({planned})"
        for each in settings
        for run in each.runs
        if (planned := planned_frames(run.manifest))
    )
    found = [f"Learning rates differed until a resume changed frames: {resumed}."] * bool(resumed)
    runs = [run for setting in settings for run in setting.runs if "eval/return" in run.columns]
    sampled = sum(run.domain.evaluation.startswith("sampled") for run in runs)
    if not 0 < sampled < len(runs):
        return found
    others = f"{runs[0].domain.mode} in {len(runs) - sampled}"
    return [*found, f"Evaluations sample actions in {counted(sampled, 'run')} and are {others}."]
