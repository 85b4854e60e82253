"""Selects the runs for the statistics, and groups those that differ only in their seed."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from klrl.base.text import escaped
from klrl.config.choices import CHOICES
from klrl.report.runs import Inventory, ReadRun
from klrl.report.statistics import Array, Estimate

_NUMBER = re.compile(r"(?<==)(-?\d+\.?\d*(?:e[+-]?\d+)?)(?![^ ])")


@dataclass(frozen=True)
class Setting:
    """A group of runs that differ only in their seed: a row of the tables, a curve."""

    name: str  # the values that distinguish it, such as ``kl.coef=0.1``
    runs: list[ReadRun]  # one per seed, in order of seeds
    #: Measure.key -> a number per run, NaN for a run without one; see ``measures.measured``
    values: dict[str, Array] = field(default_factory=dict)
    #: Measure.key -> estimate over the runs; None if no run has a number
    estimates: dict[str, Estimate | None] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """The name of the environment."""
        return self.runs[0].task

    @property
    def finished(self) -> str:
        """How many seeds finished: ``5`` if all did, else ``3 of 5``."""
        every = len(self.runs)
        finished = sum(run.status == "finished" for run in self.runs)
        return str(every) if finished == every else f"{finished} of {every}"

    def seeds(self, key: str) -> Array:
        """Return a measure's numbers, [runs]; leave out the runs that have none."""
        values = self.values.get(key, np.zeros(0))
        return values[np.isfinite(values)]

    def value(self, key: str) -> float:
        """Return the mean of a measure; NaN if no run has a number."""
        estimated = self.estimates.get(key)
        return estimated.value if estimated else float("nan")


def count_runs(runs: Sequence[ReadRun], *, unfinished: bool = False) -> list[Setting]:
    """Select the runs for the statistics; group them into settings, in order of names.

    Includes finished runs with rows; failed runs, even without rows, since divergence is a result;
    and, if ``unfinished``, interrupted and running runs with rows. If a job ran several times, the
    run that finished last counts or, if none finished, the last run.
    """

    def outcome(run: ReadRun) -> tuple[bool, str, str]:
        started, ended = (str(run.manifest.get(name) or "") for name in ("started", "ended"))
        return run.status == "finished", ended or started, started

    names, groups = names_of(runs), defaultdict[str, dict[int, ReadRun]](dict)
    for run in sorted(runs, key=outcome):
        if run.failed or (run.rows and (unfinished or run.status == "finished")):
            groups[identity(run)][run.seed] = run
    settings = [Setting(names[key], [of[i] for i in sorted(of)]) for key, of in groups.items()]
    # Leave out tasks without a recorded row.
    recorded = {each.task for each in settings if any(run.rows for run in each.runs)}
    return sorted(
        (each for each in settings if each.task in recorded), key=lambda each: _by_size(each.name)
    )


def by_task(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    """Group the settings by task, in their order."""
    tasks = defaultdict[str, list[Setting]](list)
    for setting in settings:
        tasks[setting.task].append(setting)
    return dict(tasks)


def _by_size(name: str) -> list[str | float]:
    """Split a name into text and numbers, so that ``coef=10`` sorts after ``coef=2``."""
    parts = _NUMBER.split(name)
    return [float(part) if i % 2 else part for i, part in enumerate(parts)]


def names_of(runs: Sequence[ReadRun]) -> dict[str, str]:
    """Map the :func:`identity` of each setting to a name that is unique within its task."""
    tasks: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        tasks.setdefault(run.task, {})[identity(run)] = run.settings
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


def other_jobs(inventory: Inventory, settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """List the jobs that did not finish or do not count: the state of each, and a line on it."""
    counted = {id(run) for setting in settings for run in setting.runs}
    names, found = names_of(inventory.runs), []
    for run in inventory.runs:
        state = run.status
        if state == "finished" and id(run) not in counted:
            state = "replaced by another run" if run.rows else "finished, without rows"
        state += ", counted" * (id(run) in counted)
        if state != "finished, counted":
            what = f"{run.path}: {run.task}, {names[identity(run)]}, seed {run.seed}: {state}"
            found.append((state, f"{what} {run.manifest.get('error') or ''}"))
    for folder, job in (each for sweep in inventory.sweeps for each in sweep.jobs):
        if not folder.exists:
            found.append((job.status, f"{folder.path}: {job.status} {job.error or ''}"))
    return sorted(found)


def count_states(jobs: Sequence[tuple[str, str]]) -> str:
    """Format how many jobs do not count, by state: ``1 interrupted, 2 waiting``."""
    counts = Counter(state for state, _ in jobs if not state.endswith(", counted"))
    return ", ".join(f"{number} {state}" for state, number in counts.items())
