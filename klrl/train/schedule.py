"""Plan the evaluations of a run: their iterations and numbers of episodes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from klrl.config import JobConfig
from klrl.domains import Domain

#: Assumed longest episode, in steps, of an environment that declares no limit.
USUAL_STEPS = 1_000
#: Smallest share of ``eval.episodes`` in an evaluation. If fewer episodes would fit, the run is
#: evaluated less often.
_LEAST = Fraction(1, 4)
#: Smallest number of episodes that has a standard error.
_FEWEST = 2
#: Per frame of the run, the closing evaluation takes at most
#: max(_CLOSING_SHARE, _CLOSING_TIMES * ``eval.share``) steps, unless two episodes need more.
_CLOSING_SHARE, _CLOSING_TIMES = 0.5, 6


class Size(NamedTuple):
    """Limits of an evaluation."""

    episodes: int
    steps: int | None = None  # of all episodes together; None for no limit


NOTHING = Size(0, 0)


@dataclass(frozen=True)
class Schedule:
    """The evaluations of a run."""

    iterations: frozenset[int]  # 0 is before the first update
    size: Size  # of each evaluation during the run
    closing: Size  # after the last iteration, from other start states

    def line(self, domain: Domain, longest: int | None) -> str:
        """The schedule as a line of text."""
        each = f"({_count_text(self.size, longest)} {domain.episode}s each)"
        none = "none during the run (eval.share is too small for an evaluation at both ends)"
        during = f"{len(self.iterations)} during the run {each}" if self.iterations else none
        closing = f"{_count_text(self.closing, longest)} {domain.episode}s at the end"
        return f"evaluations: {during}, then {closing}"


def fitting(size: Size, longest: int | None) -> int:
    """Count the episodes that fit if each has the longest possible length."""
    episodes, steps = size
    return episodes if steps is None else min(episodes, steps // (longest or USUAL_STEPS))


def _count_text(size: Size, longest: int | None) -> str:
    """Write the number of episodes: ``8``, or ``3 to 8`` if 8 fit only when they are short."""
    least = fitting(size, longest)
    return f"{least}" if least == size.episodes else f"{least} to {size.episodes}"


def schedule(config: JobConfig, longest: int | None) -> Schedule:
    """Plan the evaluations of a run from its settings alone.

    Without ``eval.every``, the evaluations during the run take at most ``eval.share`` times as many
    steps as the run has frames. An evaluation's step usually costs less time than a frame of
    training, whose time includes the update. In a slow simulator it may cost a little more (hopper:
    1.1 frames).
    ``longest``: steps of the longest episode; None if not known; 1 for language.
    """
    evals = config.eval
    if not evals.on:
        return Schedule(frozenset(), NOTHING, NOTHING)
    longest = longest or USUAL_STEPS
    frames = config.iterations * config.frames_per_iteration
    most = int(max(_CLOSING_SHARE, _CLOSING_TIMES * evals.share) * frames)
    closing = Size(evals.final, max(most, _FEWEST * longest))
    # Leave time for two of the longest episodes, since an incomplete episode has no return.
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
    """Count the evaluations that fit in ``steps``; 0 if not even the first and the last fit."""
    most = fitting(largest, longest)
    least = min(most, max(_FEWEST, int(_LEAST * largest.episodes)))
    for count in range(wanted, 2, -1):
        if steps // count >= least * longest:
            return count
    ends = min(wanted, 2)
    return ends if min(most, steps // ends // longest) >= min(_FEWEST, largest.episodes) else 0
