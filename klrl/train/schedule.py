"""When a run is evaluated, and how much. No torch: ``klrl plan`` asks too."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from klrl.config import JobConfig
from klrl.domains import Domain

#: What is reckoned with for an environment that does not say how long an episode may be.
USUAL_STEPS = 1_000
#: Of ``eval.episodes``, what an evaluation has at least; where that is too much, fewer are made.
_LEAST = Fraction(1, 4)
#: Fewer episodes have no standard error.
_FEWEST = 2
#: The closing evaluation of a short run takes at most this share of its frames.
_CLOSING_SHARE = Fraction(1, 2)


class Size(NamedTuple):
    """How much an evaluation may be."""

    episodes: int
    steps: int | None = None  # that they may take together; None for no limit


NOTHING = Size(0, 0)


@dataclass(frozen=True)
class Schedule:
    """The evaluations of a run."""

    iterations: frozenset[int]  # 0 is before the first update
    size: Size  # of each of these
    closing: Size  # after the last iteration, from other start states

    def line(self, domain: Domain, longest: int | None) -> str:
        """For a person to read."""
        each = f"({_told(self.size, longest)} {domain.episode}s each)"
        none = "none during the run (eval.share is too small for one at each end)"
        during = f"{len(self.iterations)} during the run {each}" if self.iterations else none
        closing = f"{_told(self.closing, longest)} {domain.episode}s at the end"
        return f"evaluations: {during}, then {closing}"


def fitting(size: Size, longest: int | None) -> int:
    """How many episodes fit if each is as long as it may be."""
    episodes, steps = size
    return episodes if steps is None else min(episodes, steps // (longest or USUAL_STEPS))


def _told(size: Size, longest: int | None) -> str:
    """How many episodes: those that surely fit, and those that do if they are short."""
    least = fitting(size, longest)
    return f"{least}" if least == size.episodes else f"{least} to {size.episodes}"


def schedule(config: JobConfig, longest: int | None) -> Schedule:
    """The evaluations of a run; they follow from its settings alone.

    Without ``eval.every``, all evaluations during the run take at most ``eval.share`` of as many
    steps as the training. A step costs less than a frame of training, which adds the update; where
    a slow simulator has few copies left to be stepped together, a little more (hopper: 1.1).
    ``longest``: steps of the longest episode; None: not known; 1 for language.
    """
    evals = config.eval
    if not evals.on:
        return Schedule(frozenset(), NOTHING, NOTHING)
    longest = longest or USUAL_STEPS
    frames = config.iterations * config.frames_per_iteration
    closing = Size(evals.final, max(int(_CLOSING_SHARE * frames), _FEWEST * longest))
    # An evaluation without a whole episode says nothing, however long one is.
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
    """How many evaluations ``steps`` are enough for; 0 where not for one at each end."""
    most = fitting(largest, longest)
    least = min(most, max(_FEWEST, int(_LEAST * largest.episodes)))
    for count in range(wanted, 2, -1):
        if steps // count >= least * longest:
            return count
    ends = min(wanted, 2)
    return ends if min(most, steps // ends // longest) >= min(_FEWEST, largest.episodes) else 0
