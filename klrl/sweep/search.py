"""``search=optuna``: which values a sweep tries next, from the results so far.

A trial is one choice of the searched values; its seeds are jobs of their own, and its value is
the mean over them. The study lies in the sweep's folder, so that a search that is started again
goes on: trials that were told stay, one that was running is taken up with the values that it had.
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

from klrl.base.errors import ConfigError
from klrl.config import LauncherConfig, OptunaConfig
from klrl.config.overrides import SweepWords, expand, job_name, parse
from klrl.runs.loggers import read_rows
from klrl.runs.metrics import last_recorded
from klrl.sweep.check import check_jobs
from klrl.sweep.jobs import Job, Outcome, make_jobs
from klrl.sweep.ledger import Ledger
from klrl.sweep.run import check_launcher, close, command_of, run_jobs, sweep_folder

if TYPE_CHECKING:
    import optuna

STUDY_FILE = "study.journal"
#: Digits of a value that was chosen from an interval: the job gets what its folder's name says.
_DIGITS = 4


@dataclass(frozen=True)
class Dimension:
    """One searched setting.

    Attributes:
        key: its setting.
        low: end of an interval; None where it is a choice.
        high: likewise.
        log: whether the interval is searched in logarithms.
        choices: the values given.
    """

    key: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[str, ...] = ()

    def suggest(self, trial: optuna.Trial) -> str:
        """A value for this trial, as a word."""
        if self.low is None or self.high is None:
            return f"{self.key}={trial.suggest_categorical(self.key, self.choices)}"
        value = trial.suggest_float(self.key, self.low, self.high, log=self.log)
        return f"{self.key}={float(f'{value:.{_DIGITS}g}')!r}"

    @property
    def middle(self) -> str:
        """A word to check the other settings with."""
        if self.low is None or self.high is None:
            return f"{self.key}={self.choices[0]}"
        ends = (self.low, self.high)
        value = math.sqrt(ends[0] * ends[1]) if self.log else sum(ends) / 2
        return f"{self.key}={float(f'{value:.{_DIGITS}g}')!r}"


@dataclass(frozen=True)
class Space:
    """What a search's words say.

    Attributes:
        fixed: words that every job has.
        seeds: words of the seeds of each trial.
        dimensions: what is searched.
    """

    fixed: list[str]
    seeds: list[str]
    dimensions: list[Dimension]

    def jobs(self, chosen: Sequence[str]) -> list[list[str]]:
        """The words of a trial's jobs, one per seed."""
        return [[*self.fixed, *chosen, seed] for seed in self.seeds]

    def ends(self) -> list[list[str]]:
        """Jobs at the middle and at every end of the space, to check before the first runs."""
        middle = [d.middle for d in self.dimensions]
        found = self.jobs(middle)
        for i, dimension in enumerate(self.dimensions):
            values = dimension.choices or (dimension.low, dimension.high)
            for value in values:
                chosen = [*middle[:i], f"{dimension.key}={value}", *middle[i + 1 :]]
                found.append([*self.fixed, *chosen, self.seeds[0]])
        return found


def space_of(words: Sequence[str]) -> Space:
    """Read the job words of a search.

    Raises:
        ConfigError: nothing is searched, or an interval that cannot be.
    """
    fixed, seeds, dimensions = [], ["seed=0"], []
    for override in parse(words):
        key = override.get_key_element()
        if key == "seed":
            seeds = [words[0] for words in expand([str(override.input_line)])]
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
    words: SweepWords,
    config: OptunaConfig,
    launcher: LauncherConfig,
    overrides: Sequence[str],
    args: argparse.Namespace,
) -> int:
    """Run trials until there are ``search.trials``; the exit code, 1 where a job failed.

    Raises:
        ConfigError: a word or a job is refused, or the folder holds another search.
        Interrupted: a signal came; the trial that was running is taken up next time.
    """
    space = space_of(words.job)
    check_launcher(launcher, check_jobs(space.ends(), args))
    with sweep_folder(words) as folder:
        search = Search(folder, config, space, args)
        ledger = Ledger(folder, command_of(overrides, args), [])
        outcomes: list[Outcome] = []
        while trials := search.next_trials():
            jobs = {trial.number: search.jobs(trial) for trial in trials}
            flat = list({job.identity: job for group in jobs.values() for job in group}.values())
            ledger.add(flat)
            outcomes += run_jobs(folder, flat, launcher, ledger)
            for number, group in jobs.items():
                print(search.tell(number, group, ledger), flush=True)
        code = close(folder, ledger, outcomes)
        print(search.table())
        return code


class Search:
    """An Optuna study in a sweep's folder.

    Args:
        folder: the sweep's.
        config: of ``search``.
        space: what is searched.
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
        with warnings.catch_warnings():
            # Optuna calls its journal experimental in some versions; it is its only file storage.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            storage = optuna.storages.JournalStorage(
                optuna.storages.journal.JournalFileBackend(str(folder / STUDY_FILE))
            )
        self._study = optuna.create_study(
            study_name="klrl", storage=storage, direction=config.direction, load_if_exists=True
        )
        self._check_same()
        done = len(self._study.get_trials(deepcopy=False))
        # A sampler that starts anew must not repeat its first draws.
        self._study.sampler = optuna.samplers.TPESampler(seed=config.seed + done)

    def _check_same(self) -> None:
        mine = json.dumps(
            [self._space.fixed, self._space.seeds, [repr(d) for d in self._space.dimensions],
             self._config.metric, self._config.direction]
        )  # fmt: skip
        theirs = self._study.user_attrs.get("space")
        if theirs is not None and theirs != mine:
            raise ConfigError(
                f"{self._folder}: holds a search with other words; give another sweep=NAME"
            )
        self._study.set_user_attr("space", mine)

    def next_trials(self) -> list[Any]:
        """Trials to run now: those that were running, else new ones; none at the end."""
        from optuna.trial import TrialState

        trials = self._study.get_trials(deepcopy=False)
        begun = [t for t in trials if t.state == TrialState.RUNNING]
        for trial in begun:
            if "words" not in trial.user_attrs:  # it ended before it had its values
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
        checked = check_jobs(self._space.jobs(trial.user_attrs["words"]), self._args)
        swept = [*(d.key for d in self._space.dimensions), "seed"]
        named = [(job_name(words, swept), words, config) for words, config in checked]
        return make_jobs(self._folder, named)

    def tell(self, number: int, jobs: Sequence[Job], ledger: Ledger) -> str:
        """Give the study a trial's mean over its seeds, or that it failed; what to say of it."""
        from optuna.trial import TrialState

        values = [self._value(job) for job in jobs if ledger.status(job.name) == "finished"]
        found = [value for value in values if value is not None and math.isfinite(value)]
        words = " ".join(self._study.get_trials(deepcopy=False)[number].user_attrs["words"])
        head = f"trial {number + 1}/{self._config.trials} {words}"
        if len(found) < len(jobs):
            self._study.tell(number, state=TrialState.FAIL)
            return f"{head}: failed, {len(found)} of {len(jobs)} seeds have {self._config.metric}"
        mean = sum(found) / len(found)
        self._study.tell(number, mean)
        return f"{head}: {self._config.metric} {mean:.4g} over {len(found)} seeds"

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
