"""Plan the evaluations of a run: their iterations and numbers of episodes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from klrl.config import JobConfig
from klrl.domains import Domain

#: Assumed longest episode, in steps, of an environment that declares no limit.
USUAL_STEPS = 1_000
#: A run has more than two evaluations only if each has this share of ``eval.episodes`` or more.
_LEAST = Fraction(1, 4)
#: Smallest number of episodes that has a standard error.
_FEWEST = 2
#: For each frame of the run, the evaluation at the end may take
#: max(_CLOSING_SHARE, _CLOSING_TIMES * ``eval.share``) steps; or more, if two episodes need more.
_CLOSING_SHARE, _CLOSING_TIMES = 0.5, 6


class Size(NamedTuple):
    """Limits of an evaluation."""

    episodes: int
    steps: int | None = None  # of all episodes together; None for no limit


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
