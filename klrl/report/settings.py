"""Groups runs that differ only in their seed; lists unfinished and repeated jobs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from klrl.base.text import escaped
from klrl.config.choices import CHOICES
from klrl.report.runs import Inventory, ReadRun
from klrl.sweep.sweep_file import JobEntry

_NUMBER = re.compile(r"(?<==)(-?\d+\.?\d*(?:e[+-]?\d+)?)(?![^ ])")


@dataclass(frozen=True)
class Setting:
    """A group of runs that differ only in their seed."""

    name: str  # the values that distinguish it, such as ``kl.coef=0.1``
    runs: list[ReadRun]  # one per seed, in order of seeds

    @property
    def task(self) -> str:
        """The name of the environment."""
        return self.runs[0].task


def group_runs(
    runs: Sequence[ReadRun], names: Mapping[str, str]
) -> tuple[list[Setting], list[ReadRun]]:
    """Return settings in order of names (numbers by size), and the runs that they leave out.

    If a job ran several times, its setting has the last finished run or, if none finished, the
    last run. ``names`` comes from :func:`names_of`.
    """
    groups: dict[str, dict[int, ReadRun]] = {identity(run): {} for run in runs}
    replaced = []

    def outcome(run: ReadRun) -> tuple[bool, str, str]:
        started, ended = (str(run.manifest.get(name) or "") for name in ("started", "ended"))
        return run.status == "finished", ended or started, started

    for run in sorted(runs, key=outcome):
        seeds = groups[identity(run)]
        if run.seed in seeds:
            replaced.append(seeds[run.seed])
        seeds[run.seed] = run
    settings = [
        Setting(names[key], [seeds[seed] for seed in sorted(seeds)])
        for key, seeds in groups.items()
    ]
    return sorted(settings, key=lambda setting: _by_size(setting.name)), replaced


def _by_size(name: str) -> list[str | float]:
    """Split a name into text and numbers, so that ``coef=10`` sorts after ``coef=2``."""
    parts = _NUMBER.split(name)
    return [float(part) if i % 2 else part for i, part in enumerate(parts)]


def names_of(runs: Sequence[ReadRun]) -> dict[str, str]:
    """Map the :func:`identity` of each setting to a name that is unique within its task."""
    tasks: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        tasks.setdefault(run.task, {})[identity(run)] = run.settings | run.typed
    return {
        key: name
        for settings in tasks.values()
        for key, name in zip(settings, name_settings(list(settings.values())), strict=True)
    }


def identity(run: ReadRun) -> str:
    """Return a key that runs share if they differ only in their seed."""
    return json.dumps(run.settings, sort_keys=True, default=str)


def differing(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """List the keys whose values differ between settings, or that some settings lack.

    Keys of choices, such as ``loss``, come first, then keys that all settings have.
    """
    keys = dict.fromkeys(key for each in settings for key in each)
    unequal = [
        key
        for key in keys
        if len({json.dumps(each[key], default=str) if key in each else "" for each in settings}) > 1
    ]
    choices = {*CHOICES, "env.id"}
    return sorted(
        unequal, key=lambda key: (key not in choices, any(key not in s for s in settings))
    )


def name_settings(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Name each setting by the values of the few keys that tell all settings apart."""
    kept: list[str] = []
    classes: list[tuple[str, ...]] = [() for _ in settings]
    for key in differing(settings):
        finer = [
            (*seen, json.dumps(each[key], default=str) if key in each else "")
            for seen, each in zip(classes, settings, strict=True)
        ]
        if len(set(finer)) > len(set(classes)):
            kept, classes = [*kept, key], finer
    return [_name(each, kept) for each in settings]


def _name(setting: Mapping[str, object], keys: Sequence[str]) -> str:
    """Format the values of the keys; ``no KEY`` if the setting has none of them."""
    values = [f"{key}={show(setting[key])}" for key in keys if key in setting]
    return " ".join(values or [f"no {key}" for key in keys]) or "all runs"


def show(value: object) -> str:
    """Format a setting's value as on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list | dict):
        return json.dumps(value)
    return escaped(str(value))


# ------------------------------------------------------------------------ jobs that are not counted


#: Jobs are listed in this order of states; jobs in other states come last.
_ORDER = ("failed", "refused", "interrupted", "running", "waiting")


@dataclass(frozen=True)
class LeftOut:
    """A job that did not finish, or is not in the statistics."""

    folder: str
    state: str  # its status, or why it is not counted
    setting: str  # the setting's name, or the overrides of a job that never started
    seed: str  # empty if it never started and its overrides have no seed
    iterations: str  # number of recorded rows; empty if it never started
    error: str
    counted: bool = False  # True if it is in the statistics although it did not finish


def other_jobs(
    inventory: Inventory,
    counted: Sequence[ReadRun],
    replaced: Sequence[ReadRun],
    names: Mapping[str, str],
) -> list[LeftOut]:
    """List all jobs except finished ones in ``counted``; ``names`` comes from :func:`names_of`."""
    planned = [job for sweep in inventory.sweeps for job in sweep.jobs]
    errors = {run.path.resolve(): job.error for run, job in planned}
    among, again = {id(run) for run in counted}, {id(run) for run in replaced}
    several = len({run.task for run in inventory.runs}) > 1
    jobs = []
    for run in inventory.runs:
        counts = id(run) in among and id(run) not in again
        if not counts or run.status != "finished":
            error = str(run.manifest.get("error") or errors.get(run.path.resolve()) or "")
            state = run.status if run.rows or run.status != "finished" else "finished, without rows"
            state = "replaced by another run" if id(run) in again else state
            name = f"{run.task}: " * several + names[identity(run)]
            place, seed, rows = str(run.path), str(run.seed), str(run.rows)
            jobs.append(LeftOut(place, state, name, seed, rows, error, counts))
    jobs += [_never_begun(run.path, job) for run, job in planned if not run.exists]
    return sorted(jobs, key=lambda job: [not job.state.startswith(each) for each in _ORDER])


def _never_begun(folder: Path, job: JobEntry) -> LeftOut:
    """Describe a job whose folder contains no run, by its entry in ``sweep.json``."""
    seed = next((each[5:] for each in job.overrides if each.startswith("seed=")), "")
    overrides = " ".join(each for each in job.overrides if not each.startswith("seed="))
    gone = "" if job.status in ("failed", "refused", "waiting") else ", but there is no run folder"
    return LeftOut(str(folder), job.status + gone, overrides, seed, "", job.error or "")


def count_states(jobs: Iterable[LeftOut]) -> str:
    """Format the number of jobs per state: ``2 failed, 1 waiting``."""
    counts = Counter(job.state for job in jobs)
    return ", ".join(f"{number} {state}" for state, number in counts.items())
