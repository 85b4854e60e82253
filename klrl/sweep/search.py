"""``search=optuna``: chooses the next values of a sweep by the results so far.

A trial is one choice of values, with a job per seed. Its result is the mean of ``search.metric``
over seeds. The sweep's folder contains Optuna's study, so that a search can be resumed.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
from optuna.trial import BaseTrial, TrialState

from klrl.base.errors import ConfigError, in_one_line
from klrl.base.files import to_append
from klrl.base.text import nearest
from klrl.config import LauncherConfig, OptunaConfig
from klrl.config.given import Given
from klrl.config.overrides import Separated, expand, flags, parse
from klrl.domains import domain_of
from klrl.runs.metrics import PART, metrics_of
from klrl.runs.returns import last_recorded
from klrl.runs.rows import read_rows
from klrl.sweep.jobs import Job, Outcome, make_jobs
from klrl.sweep.ledger import Ledger
from klrl.sweep.run import check_jobs, close, command_of, named, run_jobs, sweep_folder

STUDY_FILE = "study.journal"


def words(values: Mapping[str, object]) -> list[str]:
    """Format values as overrides; round floats to four significant digits."""
    shown = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}
    return [f"{key}={value}" for key, value in shown.items()]


@dataclass(frozen=True)
class Space:
    """The search space that a sweep's overrides describe."""

    fixed: list[str]  # overrides that every job has
    seeds: list[str]  # one override per seed of a trial
    dimensions: dict[str, BaseDistribution]  # setting -> its distribution

    def jobs(self, values: Mapping[str, object]) -> list[list[Given]]:
        """Return the overrides of a trial's jobs, one job per seed."""
        return [parse([*self.fixed, *words(values), seed]) for seed in self.seeds]

    def ends(self) -> list[list[Given]]:
        """Return jobs for the checks before a search: they cover all choices and interval ends."""
        ends = {
            key: getattr(of, "choices", ()) or (of.low, of.high)
            for key, of in self.dimensions.items()
        }
        first = {key: values[0] for key, values in ends.items()}
        jobs = self.jobs(first)
        for key, values in ends.items():
            jobs += [self.jobs({**first, key: value})[0] for value in values[1:]]
        return jobs


def space_of(given: Sequence[Given]) -> Space:
    """Parse the overrides of a search into its space."""
    fixed, seeds, dimensions = [], ["seed=0"], {}
    for each in given:
        override, key = each.parsed, each.parsed.get_key_element()
        if key == "seed":
            seeds = [str(job[0]) for job in expand([each])]
        elif override.is_sweep_override():
            dimensions[key] = _dimension(override)
        else:
            fixed.append(f"{key}={override.get_value_element_as_str()}")
    if not dimensions:
        raise ConfigError(
            "search=optuna: nothing to search; give an interval, as in "
            "kl.coef='tag(log, interval(0.01, 1))', or several values"
        )
    return Space(fixed, seeds, dimensions)


def _dimension(override: Override) -> BaseDistribution:
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return CategoricalDistribution(list(map(str, override.sweep_string_iterator())))
    low, high = float(value.start or 0), float(value.end or 0)
    log = "log" in value.tags
    if low >= high or (log and low <= 0):
        need = "0 < low < high" if log else "low < high"
        raise ConfigError(f"{override.input_line}: an interval needs {need}")
    return FloatDistribution(low, high, log=log)


def checked_space(given: Sequence[Given], config: OptunaConfig, args: argparse.Namespace) -> Space:
    """Return the space of a search; refuse wrong values, and a metric that a trial lacks."""
    space, name = space_of(given), config.metric
    for _, job in check_jobs(space.ends(), args):
        known = metrics_of(domain_of(job))
        if name not in known and not name.startswith(PART):
            meant = nearest(name, known) or "; klrl/runs/metrics.yaml lists them"
            raise ConfigError(f"search.metric={name}: no such metric{meant}")
        if name.startswith("eval/") and not job.eval.on:
            off = f"eval.{'evaluations' if job.eval.every is None else 'every'}=0"
            said = f"{off} never evaluates; drop that, or search by reward/episode"
            raise ConfigError(f"search.metric={name}: {said}")
    return space


def run_search(
    sweep: Separated, config: OptunaConfig, launcher: LauncherConfig, args: argparse.Namespace
) -> int:
    """Run trials until the study has ``search.trials``; return 0 if all jobs finished, else 1."""
    space = checked_space(sweep.job, config, args)
    with sweep_folder(sweep) as folder:
        search = Search(folder, config, space, args)
        ledger = Ledger(folder, command_of(args))
        outcomes: list[Outcome] = []
        while trials := search.next_trials():
            jobs = [search.jobs(trial) for trial in trials]
            flat = list({job.identity: job for group in jobs for job in group}.values())
            outcomes += run_jobs(folder, flat, launcher, ledger)
            for trial, group in zip(trials, jobs, strict=True):
                print(search.complete(trial, group, ledger), flush=True)
        code = close(folder, ledger, outcomes)
        print(search.table())
        return code


def _study(path: Path, direction: str) -> optuna.Study:
    """Load the study in a file, or create it."""

    class _NoLock(JournalFileOpenLock):
        """No lock: this process already holds the lock of the sweep's folder."""

        def acquire(self) -> bool:
            return True

        def release(self) -> None:
            pass

    to_append(path).close()  # refuses a link, which Optuna would follow
    with warnings.catch_warnings():
        # Optuna may warn that the journal is experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = JournalStorage(JournalFileBackend(str(path), _NoLock(str(path))))
    return optuna.create_study(
        study_name="klrl", storage=storage, direction=direction, load_if_exists=True
    )


class Search:
    """An Optuna study in a sweep's folder.

    Raises:
        ConfigError: the folder contains a study of a different space.
    """

    def __init__(
        self, folder: Path, config: OptunaConfig, space: Space, args: argparse.Namespace
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder, self._config, self._space, self._args = folder, config, space, args
        try:
            self._study = _study(folder / STUDY_FILE, config.direction)
            self._check_same()
        except ConfigError:
            raise
        except Exception as error:  # Optuna may raise anything on a damaged journal
            raise ConfigError(
                f"{folder / STUDY_FILE}: the study is broken ({in_one_line(error)}); move it away"
            ) from error
        done = len(self._study.get_trials(deepcopy=False))
        # Change the seed, so that a resumed search does not repeat its first draws.
        self._study.sampler = optuna.samplers.TPESampler(seed=config.seed + done)

    def _check_same(self) -> None:
        space = json.dumps(
            [self._space.fixed, self._space.seeds, repr(self._space.dimensions),
             self._config.metric, self._config.direction]
        )  # fmt: skip
        stored = self._study.user_attrs.get("space")
        if stored is not None and stored != space:
            raise ConfigError(
                f"{self._folder}: has a search with other overrides; give another sweep=NAME"
            )
        self._study.set_user_attr("space", space)

    def next_trials(self) -> Sequence[BaseTrial]:
        """Return the trials to run now: unfinished ones, else new ones; [] when all have run."""
        begun, real = [], 0
        for trial in self._study.get_trials(deepcopy=False):
            if trial.params.keys() == self._space.dimensions.keys():
                real += 1
                begun += [trial] * (trial.state == TrialState.RUNNING)
            elif trial.state == TrialState.RUNNING:  # klrl ended before it chose all values
                self._study.tell(trial.number, state=TrialState.FAIL)
        count = min(self._config.at_once, self._config.trials - real)
        return begun or [self._study.ask(self._space.dimensions) for _ in range(count)]

    def jobs(self, trial: BaseTrial) -> list[Job]:
        """Return the jobs of a trial, one per seed."""
        if trial.distributions != self._space.dimensions:
            raise ConfigError(
                f"{self._folder / STUDY_FILE}: trial {trial.number} has values that are not "
                f"searched ({' '.join(words(trial.params))}); move it away"
            )
        checked = check_jobs(self._space.jobs(trial.params), self._args)
        names = named([*(key.lstrip("+") for key in self._space.dimensions), "seed"], checked)
        return make_jobs(self._folder, names, flags(self._args.config_dir))

    def complete(self, trial: BaseTrial, jobs: Sequence[Job], ledger: Ledger) -> str:
        """Store a trial's mean over seeds, or its failure, in the study; return a line to print."""
        done = [job for job in jobs if ledger.status(job.name) == "finished"]
        rows = [last_recorded(read_rows(job.folder / "metrics.jsonl")) for job in done]
        values = [row.get(self._config.metric) for row in rows]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        head = f"trial {trial.number + 1}/{self._config.trials} {' '.join(words(trial.params))}"
        if len(finite) < len(jobs):
            self._study.tell(trial.number, state=TrialState.FAIL)
            return f"{head}: failed, {len(finite)} of {len(jobs)} seeds have {self._config.metric}"
        mean = sum(finite) / len(finite)
        self._study.tell(trial.number, mean)
        return f"{head}: {self._config.metric} {mean:.4g} over {len(finite)} seeds"

    def table(self) -> str:
        """Format a table of the five best trials."""
        trials = [t for t in self._study.get_trials(deepcopy=False) if t.value is not None]
        up = self._config.direction == "maximize"
        trials.sort(key=lambda trial: trial.value, reverse=up)
        seeds = len(self._space.seeds)
        lines = [f"best of {len(trials)} trials, {self._config.metric} over {seeds} seeds:"]
        lines += [f"  {t.value:10.4g}  {' '.join(words(t.params))}" for t in trials[:5]]
        return "\n".join(lines)
