"""Plans the evaluations of a run, makes them when they are due, and tracks the best policy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import device

from klrl.base import ranks
from klrl.base.errors import EnvError, NonFiniteError, RewardError
from klrl.config import JobConfig
from klrl.domains import Domain
from klrl.runs.checkpoint import Counters, load_component
from klrl.runs.folder import RunFolder
from klrl.runs.metrics import Row, require_declared
from klrl.runs.record import Recorder
from klrl.runs.state import Component, State
from klrl.train.scores import CLOSING, IN_RUN, Evaluation, Size, Starts

#: Assumed longest episode, in steps, of an environment that declares no limit.
USUAL_STEPS = 1_000
#: A run has more than two evaluations only if each has this share of ``eval.episodes`` or more.
_LEAST = Fraction(1, 4)
#: Smallest number of episodes that has a standard error.
_FEWEST = 2
#: For each frame of the run, the evaluation at the end may take
#: max(_CLOSING_SHARE, _CLOSING_TIMES * ``eval.share``) steps; or more, if two episodes need more.
_CLOSING_SHARE, _CLOSING_TIMES = 0.5, 6
NOTHING = Size(0, 0)
#: Numbers of start states that limit no evaluation.
MANY = (10**9, 10**9)


@dataclass(frozen=True)
class Schedule:
    """The evaluations of a run."""

    iterations: frozenset[int]  # evaluate after these; 0 means before the first update
    size: Size  # of each evaluation during the run
    closing: Size  # after the last iteration; it has its own start states

    def line(self, domain: Domain, longest: int | None, starts: tuple[int, int] = MANY) -> str:
        """The schedule as a line; ``starts``: most episodes during the run, and at the end."""
        each = f"({_count_text(self.size, longest, starts[0])} {domain.episode}s each)"
        none = "none during the run (eval.share is too small for evaluations at start and end)"
        during = f"{len(self.iterations)} during the run {each}" if self.iterations else none
        closing = f"{_count_text(self.closing, longest, starts[1])} {domain.episode}s at the end"
        return f"evaluations: {during}, then {closing}"


def fitting(size: Size, longest: int | None) -> int:
    """Count the episodes that fit into ``size`` if each has ``longest`` steps."""
    episodes, steps = size
    return episodes if steps is None else min(episodes, steps // (longest or USUAL_STEPS))


def _count_text(size: Size, longest: int | None, starts: int) -> str:
    """Write the number of episodes: ``8``, or ``3 to 8`` if long episodes allow only 3."""
    least, most = (min(count, starts) for count in (fitting(size, longest), size.episodes))
    return f"{least}" if longest == 1 or least == most else f"{least} to {most}"


def schedule(config: JobConfig, longest: int | None) -> Schedule:
    """Plan the evaluations of a run.

    Without ``eval.every``, the evaluations during the run take at most ``eval.share`` times as many
    steps as the run has frames. A step of an evaluation usually takes less time than a frame of
    training, which includes the update (in hopper, whose simulator is slow, 1.1 times as long).
    ``longest``: steps of the longest episode; None if not known; 1 for language.
    """
    evals = config.eval
    if not evals.on:
        return Schedule(frozenset(), NOTHING, NOTHING)
    longest = longest or USUAL_STEPS
    frames = config.iterations * config.frames_per_iteration
    most = int(max(_CLOSING_SHARE, _CLOSING_TIMES * evals.share) * frames)
    closing = Size(evals.final, max(most, _FEWEST * longest))
    # Allow steps for two of the longest episodes, since an incomplete episode has no return.
    largest = Size(evals.episodes, max(evals.steps, min(_FEWEST, evals.episodes) * longest))
    if evals.every is not None:
        every = {*range(evals.every, config.iterations, evals.every), config.iterations}
        return Schedule(frozenset(every), largest, closing)
    steps = int(evals.share * frames)
    count = _count(evals.evaluations, largest, steps, longest)
    if not count:
        return Schedule(frozenset(), NOTHING, closing)
    size = Size(evals.episodes, min(largest.steps or steps, steps // count))
    if count == 1:
        return Schedule(frozenset({config.iterations}), size, closing)
    evenly = (round(Fraction(config.iterations * i, count - 1)) for i in range(count))
    return Schedule(frozenset(evenly), size, closing)


def _count(wanted: int, largest: Size, steps: int, longest: int) -> int:
    """Count the evaluations, at most ``wanted``, that fit; 0 if min(wanted, 2) do not fit."""
    most = fitting(largest, longest)
    least = min(most, max(_FEWEST, int(_LEAST * largest.episodes)))
    for count in range(wanted, 2, -1):
        if steps // count >= least * longest:
            return count
    ends = min(wanted, 2)
    return ends if min(most, steps // ends // longest) >= min(_FEWEST, largest.episodes) else 0


# ------------------------------------------------------------------------- during the run

_SECONDS = "time/evaluation"
#: This metric chooses the best policy of a job that learns from data.
_NLL = "nll/held_out"
_FEW = 30  # a mean over fewer prompts is rough


class Played(Protocol):
    """The part of :class:`klrl.train.loop.Parts` that evaluations use."""

    device: device
    longest_episode: int | None
    starts: tuple[int, int]

    def evaluation(self, starts: Starts, size: Size) -> Evaluation:
        """Evaluate the current policy; training's random state is unchanged."""

    def held_out(self) -> Row:
        """Return ``nll/held_out`` of a job that learns from data; else an empty row."""

    def components(self) -> dict[str, Component]:
        """Return the parts of a checkpoint by name; ``agent`` is the policy."""


class Evaluations:
    """Evaluates the policy when an evaluation is due, and at the end; tracks the best result."""

    def __init__(
        self, config: JobConfig, domain: Domain, parts: Played, counters: Counters
    ) -> None:
        self.schedule: Schedule = schedule(config, parts.longest_episode)
        of = config.eval
        #: The settings on which the best return depends; None for ``nll/held_out``.
        self.how = None if config.collector.imitates else [of.sampled, of.episodes, of.steps]
        self._on, self._last, self._patience = of.on, config.iterations, config.collector.patience
        self._domain, self._parts, self._counters = domain, parts, counters

    @property
    def over(self) -> bool:
        """Whether no iteration is left, or ``collector.patience`` iterations gave no new best."""
        now = self._counters
        stalled = now.iteration - now.best_iteration >= (self._patience or self._last)
        return now.iteration >= self._last or stalled

    def lines(self) -> Sequence[str]:
        """Return the line about evaluations that is printed at the start of a run."""
        line = self.schedule.line(self._domain, self._parts.longest_episode, self._parts.starts)
        few = "; few prompts give a rough mean: add some in env.eval_data or env.eval_share"
        return [line + few * (min(self._parts.starts) < _FEW)] if self._on else []

    def start(self, recorder: Recorder) -> bool:
        """If due, evaluate before the first update; return whether to save ``best``."""
        row: Row = {"iteration": 0, self._domain.axis: 0}
        improved = self.during(row)
        if 0 in self.schedule.iterations or _NLL in row:
            recorder.record(row)
        return improved

    def during(self, row: Row) -> bool:
        """If due, evaluate and add the result to ``row``; return whether to save ``best``.

        Rank 0 of the run's processes evaluates, and the others get its results.
        """
        improved, result, counted = ranks.first(partial(self._during, row))
        row |= result
        self._counters.load_state_dict(counted)
        return improved

    def _during(self, row: Row) -> tuple[bool, Row, State]:
        improved = self._improved(row)
        return improved, row, self._counters.state_dict()

    def _improved(self, row: Row) -> bool:
        counters = self._counters
        row |= self._parts.held_out()
        if counters.iteration in self.schedule.iterations:
            self._play(row, IN_RUN, self.schedule.size)
        value, best = row.get("eval/return"), counters.best_return
        if _NLL in row:
            value = -row[_NLL]
        else:  # patience applies only to jobs that learn from data
            counters.best_iteration = counters.iteration
        if value is None or (best is not None and value <= best):
            return False
        counters.best_return, counters.best_iteration = value, counters.iteration
        return True

    def closing(self, row: Row, files: RunFolder, recorder: Recorder, improved: bool) -> None:
        """If training is over, evaluate the last and the best policy; add the results to ``row``.

        Both policies start from the same states, none of which was used to choose the best policy.
        If ``row`` has results of an evaluation already, they are replaced.
        """
        if not self.over or ranks.rank():
            return
        if self._counters.iteration < self._last:
            recorder.say(
                f"ended early: {_NLL} was best at iteration {self._counters.best_iteration}, and "
                f"not in the {self._patience} after it; collector.patience=null switches this off"
            )
        if not self.schedule.closing.episodes:
            return
        try:
            self._play(row, CLOSING, self.schedule.closing)
        except (EnvError, RewardError, NonFiniteError) as error:  # must not fail a finished run
            files.guard.failed("closing evaluation", error, "the run is complete without it")
            return
        if self._counters.best_return is None:
            return
        best: Row | None = row
        if not improved:
            best = files.guard.call("best checkpoint", self._play_best, files.place, recorder)
            row[_SECONDS] += (best or {}).get(_SECONDS, 0.0)
        for name in ("eval/return", "eval/return_se"):
            if best and name in best:
                row[name.replace("/", "/best_")] = best[name]

    def _play(self, row: Row, starts: Starts, size: Size) -> None:
        """Evaluate; replace ``eval/...`` in ``row``, and add the seconds to those in ``row``."""
        began = time.perf_counter()
        result = self._parts.evaluation(starts, size)
        seconds = time.perf_counter() - began
        require_declared(result.row)
        for name in [name for name in row if name.startswith("eval/")]:
            del row[name]
        row.update(result.row)
        row[_SECONDS] = row.get(_SECONDS, 0.0) + seconds

    def _play_best(self, folder: Path, recorder: Recorder) -> Row:
        """Load the best checkpoint's policy, make its closing evaluation, restore the policy."""
        agent, row = self._parts.components()["agent"], Row()
        state = agent.state_dict()
        now = {name: each.detach().to("cpu", copy=True) for name, each in state.items()}
        try:
            load_component(folder, "best", "agent", agent, self._parts.device, recorder.say)
            self._play(row, CLOSING, self.schedule.closing)
        finally:
            agent.load_state_dict(now)
        return row
