"""``search=optuna``: chooses the values that a sweep tries next from the results so far.

A trial is one choice of the searched values; each of its seeds is a job, and its value is the mean
over them. The study is stored in the sweep's folder, so a search resumes: completed trials stay,
and one that was running is run again with the same values.
"""

from __future__ import annotations

import argparse
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import IntervalSweep, Override

from klrl.base.errors import ConfigError, in_one_line
from klrl.base.files import to_append
from klrl.config import LauncherConfig, OptunaConfig
from klrl.config.overrides import SweepOverrides, expand, job_name, parse
from klrl.runs.returns import last_recorded
from klrl.runs.rows import read_rows
from klrl.sweep.check import check_jobs
from klrl.sweep.jobs import Job, Outcome, make_jobs
from klrl.sweep.ledger import Ledger
from klrl.sweep.run import check_launcher, close, command_of, run_jobs, sweep_folder

if TYPE_CHECKING:
    import optuna

STUDY_FILE = "study.journal"
#: Significant digits of a value from an interval, in the job as in its folder's name.
_DIGITS = 4


@dataclass(frozen=True)
class Dimension:
    """One searched setting.

    Attributes:
        key: the setting.
        low: lower end of an interval; None for a list of choices.
        high: upper end; None for a list of choices.
        log: whether the interval is searched on a log scale.
        choices: the values given.
    """

    key: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[str, ...] = ()

    def suggest(self, trial: optuna.Trial) -> str:
        """A value for this trial, as an override."""
        if self.low is None or self.high is None:
            return f"{self.key}={trial.suggest_categorical(self.key, self.choices)}"
        value = trial.suggest_float(self.key, self.low, self.high, log=self.log)
        return f"{self.key}={float(f'{value:.{_DIGITS}g}')!r}"

    def holds(self, override: str) -> bool:
        """Whether an override of a stored study is one that this setting can have."""
        key, _, value = override.partition("=")
        if self.low is None or self.high is None:
            return key == self.key and value in self.choices
        return key == self.key and math.isfinite(float(value))

    @property
    def middle(self) -> str:
        """An override with a value from the middle, to check the other settings with."""
        if self.low is None or self.high is None:
            return f"{self.key}={self.choices[0]}"
        ends = (self.low, self.high)
        value = math.sqrt(ends[0] * ends[1]) if self.log else sum(ends) / 2
        return f"{self.key}={float(f'{value:.{_DIGITS}g}')!r}"


@dataclass(frozen=True)
class Space:
    """The space that a search's overrides describe.

    Attributes:
        fixed: overrides that every job has.
        seeds: one override per seed of a trial.
        dimensions: the searched settings.
    """

    fixed: list[str]
    seeds: list[str]
    dimensions: list[Dimension]

    def jobs(self, chosen: Sequence[str]) -> list[list[str]]:
        """The overrides of a trial's jobs, one job per seed."""
        return [[*self.fixed, *chosen, seed] for seed in self.seeds]

    def ends(self) -> list[list[str]]:
        """Jobs at the middle and at every end of the space, to check before the first runs."""
        middle = [d.middle for d in self.dimensions]
        jobs = self.jobs(middle)
        for i, dimension in enumerate(self.dimensions):
            values = dimension.choices or (dimension.low, dimension.high)
            for value in values:
                chosen = [*middle[:i], f"{dimension.key}={value}", *middle[i + 1 :]]
                jobs.append([*self.fixed, *chosen, self.seeds[0]])
        return jobs


def space_of(overrides: Sequence[str]) -> Space:
    """The space that the overrides of a search's jobs describe.

    Raises:
        ConfigError: nothing is searched, or an interval is invalid.
    """
    fixed, seeds, dimensions = [], ["seed=0"], []
    for override in parse(overrides):
        key = override.get_key_element()
        if key == "seed":
            seeds = [job[0] for job in expand([str(override.input_line)])]
        elif override.is_sweep_override():
            dimensions.append(_dimension(key, override))
        else:
            fixed.append(f"{key}={override.get_value_element_as_str()}")
    if not dimensions:
        raise ConfigError(
            "search=optuna: nothing to search; give an interval, as in "
            "kl.coef='tag(log, interval(0.01, 1))', or several values"
        )
    return Space(fixed, seeds, dimensions)


def _dimension(key: str, override: Override) -> Dimension:
    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        low, high = float(value.start or 0), float(value.end or 0)
        log = "log" in value.tags
        if low >= high or (log and low <= 0):
            need = "0 < low < high" if log else "low < high"
            raise ConfigError(f"{override.input_line}: an interval needs {need}")
        return Dimension(key, low, high, log)
    return Dimension(key, choices=tuple(map(str, override.sweep_string_iterator())))


def run_search(
    sweep: SweepOverrides,
    config: OptunaConfig,
    launcher: LauncherConfig,
    overrides: Sequence[str],
    args: argparse.Namespace,
) -> int:
    """Run trials until there are ``search.trials``; the exit code, 1 where a job failed.

    Raises:
        ConfigError: an override or a job is refused, or the folder holds another search.
        Interrupted: a signal came; the running trial resumes next time.
    """
    space = space_of(sweep.job)
    check_launcher(launcher, check_jobs(space.ends(), args))
    with sweep_folder(sweep) as folder:
        search = Search(folder, config, space, args)
        ledger = Ledger(folder, command_of(overrides, args), [])
        outcomes: list[Outcome] = []
        while trials := search.next_trials():
            jobs = {trial.number: search.jobs(trial) for trial in trials}
            flat = list({job.identity: job for group in jobs.values() for job in group}.values())
            ledger.add(flat)
            outcomes += run_jobs(folder, flat, launcher, ledger)
            for number, group in jobs.items():
                print(search.complete(number, group, ledger), flush=True)
        code = close(folder, ledger, outcomes)
        print(search.table())
        return code


def _study(path: Path, direction: str) -> optuna.Study:
    """The study that a file holds, or a new one."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage

    class Held(JournalFileOpenLock):
        """The sweep's folder is locked by this process; a lock beside the file may be anyone's."""

        def acquire(self) -> bool:
            return True

        def release(self) -> None:
            pass

    to_append(path).close()  # Optuna would follow a link
    with warnings.catch_warnings():
        # Some versions of Optuna call the journal experimental; it is their only file storage.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = JournalStorage(JournalFileBackend(str(path), Held(str(path))))
    return optuna.create_study(
        study_name="klrl", storage=storage, direction=direction, load_if_exists=True
    )


class Search:
    """An Optuna study in a sweep's folder.

    Args:
        folder: the sweep's.
        config: the settings of ``search``.
        space: the searched settings.
        args: Hydra's flags.

    Raises:
        ConfigError: the folder holds a study of another space.
    """

    def __init__(
        self, folder: Path, config: OptunaConfig, space: Space, args: argparse.Namespace
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder, self._config, self._space, self._args = folder, config, space, args
        try:
            self._study = _study(folder / STUDY_FILE, config.direction)
            self._check_same()
        except ConfigError:
            raise
        except Exception as error:  # whatever Optuna makes of lines that it did not write
            raise ConfigError(
                f"{folder / STUDY_FILE}: the study is broken ({in_one_line(error)}); move it away"
            ) from error
        done = len(self._study.get_trials(deepcopy=False))
        # The sampler of a resumed search must not repeat its first draws.
        self._study.sampler = optuna.samplers.TPESampler(seed=config.seed + done)

    def _check_same(self) -> None:
        space = json.dumps(
            [self._space.fixed, self._space.seeds, [repr(d) for d in self._space.dimensions],
             self._config.metric, self._config.direction]
        )  # fmt: skip
        stored = self._study.user_attrs.get("space")
        if stored is not None and stored != space:
            raise ConfigError(
                f"{self._folder}: holds a search with other overrides; give another sweep=NAME"
            )
        self._study.set_user_attr("space", space)

    def next_trials(self) -> list[Any]:
        """The trials to run now: those that were running, else new ones; none at the end."""
        from optuna.trial import TrialState

        trials = self._study.get_trials(deepcopy=False)
        begun = [t for t in trials if t.state == TrialState.RUNNING]
        for trial in begun:
            if "words" not in trial.user_attrs:  # the process ended before it had values
                self._study.tell(trial.number, state=TrialState.FAIL)
        begun = [t for t in begun if "words" in t.user_attrs]
        if begun:
            return begun
        real = [t for t in trials if "words" in t.user_attrs]
        new = min(self._config.at_once, self._config.trials - len(real))
        return [self._ask() for _ in range(new)]

    def _ask(self) -> Any:
        trial = self._study.ask()
        trial.set_user_attr("words", [d.suggest(trial) for d in self._space.dimensions])
        return trial

    def jobs(self, trial: Any) -> list[Job]:
        """The jobs of a trial, one per seed."""
        words, dimensions = list(map(str, trial.user_attrs["words"])), self._space.dimensions
        if not all(map(Dimension.holds, dimensions, words)) or len(words) != len(dimensions):
            raise ConfigError(
                f"{self._folder / STUDY_FILE}: trial {trial.number} has values that are not "
                f"searched ({' '.join(words)}); move it away"
            )
        checked = check_jobs(self._space.jobs(words), self._args)
        swept = [*(d.key for d in self._space.dimensions), "seed"]
        named = [(job_name(job, swept), job, config) for job, config in checked]
        return make_jobs(self._folder, named)

    def complete(self, number: int, jobs: Sequence[Job], ledger: Ledger) -> str:
        """Give the study a trial's mean over its seeds, or its failure; returns a line on it."""
        from optuna.trial import TrialState

        values = [self._value(job) for job in jobs if ledger.status(job.name) == "finished"]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        chosen = " ".join(self._study.get_trials(deepcopy=False)[number].user_attrs["words"])
        head = f"trial {number + 1}/{self._config.trials} {chosen}"
        if len(finite) < len(jobs):
            self._study.tell(number, state=TrialState.FAIL)
            return f"{head}: failed, {len(finite)} of {len(jobs)} seeds have {self._config.metric}"
        mean = sum(finite) / len(finite)
        self._study.tell(number, mean)
        return f"{head}: {self._config.metric} {mean:.4g} over {len(finite)} seeds"

    def _value(self, job: Job) -> float | None:
        return last_recorded(read_rows(job.folder / "metrics.jsonl")).get(self._config.metric)

    def table(self) -> str:
        """The five best trials."""
        trials = [t for t in self._study.get_trials(deepcopy=False) if t.value is not None]
        up = self._config.direction == "maximize"
        trials.sort(key=lambda trial: trial.value, reverse=up)
        seeds = len(self._space.seeds)
        lines = [f"best of {len(trials)} trials, {self._config.metric} over {seeds} seeds:"]
        lines += [f"  {t.value:10.4g}  {' '.join(t.user_attrs['words'])}" for t in trials[:5]]
        return "\n".join(lines)
