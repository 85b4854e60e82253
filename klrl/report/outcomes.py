"""Which runs count, and what is odd about them: failed, short, equal to another setting's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from klrl.report.measures import EPISODE_REWARD, Line, reward_metric
from klrl.report.runs import ReadRun
from klrl.report.settings import Setting, count, group_runs, names_of

#: What a failed run counts as: the mean over the last tenth of what it recorded; the worst value of
#: any run of the task.
FAILED = ("last", "worst")


@dataclass(frozen=True)
class Counted:
    """The runs that count, by setting."""

    settings: list[Setting]
    replaced: list[ReadRun]  # runs whose job was run again later
    failed: str  # how a failed run counts, of FAILED


def count_runs(
    runs: Sequence[ReadRun], *, failed: str = "last", unfinished: bool = False
) -> Counted:
    """The settings of the runs that count; ``failed`` is of :data:`FAILED`.

    Finished and failed runs count: a seed that diverged is an outcome. Interrupted and running ones
    are none yet, unless asked for. A failed run counts even if it recorded nothing.
    """
    counted = [
        run for run in runs if run.failed or (run.rows and (unfinished or run.status == "finished"))
    ]
    settings, replaced = group_runs(counted, names_of(runs))
    # A task without one recorded row has nothing to compare.
    recorded = {setting.task for setting in settings if any(run.rows for run in setting.runs)}
    return Counted([each for each in settings if each.task in recorded], replaced, failed)


def seeds_text(setting: Setting) -> str:
    """How many seeds finished, as ``5`` or ``3 of 5``."""
    every = len(setting.runs)
    finished = sum(run.status == "finished" for run in setting.runs)
    return str(every) if finished == every else f"{finished} of {every}"


def returns_text(line: Line) -> str:
    """How many seeds have a final return, as ``4 of 5 have a return``; empty if all have."""
    runs, score = line.setting.runs, line.estimates["return"]
    seeds = score.seeds if score else 0
    if seeds == len(runs):
        return ""
    have = f"{seeds} of {len(runs)} {'has' if seeds == 1 else 'have'}" if seeds else "none has"
    return f"{have} a {runs[0].domain.score}"


def label(line: Line) -> str:
    """A setting's name, with how many seeds finished, or have a return, where not all have."""
    seeds = seeds_text(line.setting)
    told = ", ".join(t for t in (seeds if "of" in seeds else "", returns_text(line)) if t)
    return f"{line.setting.name} ({told})" if told else line.setting.name


def short_runs(settings: Sequence[Setting]) -> dict[int, int]:
    """Index of a setting -> how many of its runs ended before the frames that the task's runs ask.

    The measure is the most that any setting of the task asks (else the farthest that one came), so
    that a comparison of unequal budgets is marked too. Failed runs are told as such.
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


def coinciding(settings: Sequence[Setting]) -> list[list[str]]:
    """Names of settings whose runs recorded equal numbers in every iteration of every seed.

    What tells them apart then had no effect.
    """
    groups: dict[tuple[tuple[int, str], ...], list[str]] = {}
    for setting in settings:
        # Those with rows of iterations, beside an evaluation before the first.
        trained = [r for r in setting.runs if (r.columns.get("iteration", np.zeros(0)) > 0).any()]
        key = tuple((run.seed, _digest(run)) for run in trained)
        if key:
            groups.setdefault(key, []).append(setting.name)
    return [names for names in groups.values() if len(names) > 1]


#: Returns can agree where policies do not: a sparse reward that nobody finds.
_ALIKE = ("reward/raw", "reward/episode", "eval/return", "kl/old/exact", "policy/entropy")


def _digest(run: ReadRun) -> str:
    """Of what the policy did; coefficients are recorded as they were set, and times differ."""
    digest = hashlib.sha256()
    for name in _ALIKE:
        digest.update(name.encode() + run.columns.get(name, np.zeros(0)).tobytes())
    return digest.hexdigest()


def remarks(settings: Sequence[Setting]) -> list[str]:
    """What a reader must know before comparing these settings of one task, a sentence each."""
    told = []
    for names in coinciding(settings):
        told.append(
            "Equal returns, KL(old||new) and entropy in every iteration of every seed: "
            f"{'; '.join(names)}. What tells them apart had no effect."
        )
    runs = [run for setting in settings for run in setting.runs]
    without = sum(EPISODE_REWARD not in run.columns and not run.failed for run in runs)
    if 0 < without < len(runs) and reward_metric(runs) != EPISODE_REWARD:
        domain = runs[0].domain
        told.append(
            f"In {count(without, 'run')} no {domain.episode} ended, so that all are compared by "
            f"the reward per {domain.unit}."
        )
    evaluated = [run for run in runs if "eval/return" in run.columns]
    sampled = sum(run.domain.evaluation.startswith("sampled") for run in evaluated)
    if 0 < sampled < len(evaluated):
        others = f"{runs[0].domain.mode} in {len(evaluated) - sampled}"
        told.append(f"Evaluations are sampled in {count(sampled, 'run')} and {others}.")
    return told
