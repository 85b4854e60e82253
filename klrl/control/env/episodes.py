"""Save running episodes as seeds and actions, and check that an environment can replay them.

Every reset is seeded. On resume, a copy is reset with its episode's seed and repeats the actions,
so an environment need not expose its state. A replay fails if state survives a seeded reset, such
as a wrapper's running mean; :func:`why_unrepeatable` detects this before the run. Its steps also
show whether episodes depend on seeds, and whether float32 is too coarse for the observations.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any
from zlib import crc32

import gymnasium
import numpy as np
import torch

from klrl.base.errors import first_line
from klrl.base.seeds import generators_kept
from klrl.base.time_limit import TookTooLong, within
from klrl.control.env.observation import Layout, any_action

#: Longest episode that is saved, in steps.
LONGEST = 20_000
#: Steps that one copy plays before the comparison, and most steps of a compared episode.
_PAST, _COMPARED = 40, 24
_STATE = "; it keeps state across resets, which the new copies of an evaluation lack"

Call = Callable[[Callable[[], Any]], Any]
Make = Callable[[], gymnasium.Env]
Say = Callable[[str], None]
Shown = list[list[np.ndarray]]


class Episodes:
    """The running episodes of N copies that are stepped together.

    Args:
        results: structured array [N]: the last observation, reward and end flags of each copy.
    """

    def __init__(self, results: np.ndarray) -> None:
        rows = results.view(np.uint8).reshape(len(results), -1)
        self.rows = [row.data for row in rows]
        #: For each copy, a checksum of all observations, rewards and flags of its episode.
        self.digests = [0] * len(rows)
        self._steps = 0
        self._begun = np.zeros(len(rows), np.int64)
        self._actions: deque[np.ndarray] = deque(maxlen=LONGEST)

    def begin(self, index: int, observation: np.ndarray) -> None:
        """Begin an episode of copy ``index``, which was just reset."""
        self._begun[index] = self._steps
        self.digests[index] = crc32(observation.data)
        for _ in range(len(self._actions) - self._longest):
            self._actions.popleft()

    def act(self, actions: np.ndarray) -> None:
        """Record the actions [N, ...] of a step, before the copies take it."""
        self._steps += 1
        self._actions.append(actions.copy())

    @property
    def _longest(self) -> int:
        return self._steps - int(self._begun.min())

    def state(self) -> dict[str, object] | None:
        """Return the state for :func:`replayed`, with checksums; None if an episode is too long."""
        if self._longest > LONGEST:
            return None
        begun = (self._begun - self._begun.min()).tolist()
        actions = torch.from_numpy(np.array(list(self._actions)))
        return {"begun": begun, "actions": actions, "digests": self.digests.copy()}


def replayed(state: Mapping[str, Any]) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield the resets and steps of :meth:`Episodes.state` in order, as (mask [N], actions).

    The mask selects the copies to step; if actions is None, the copies to reset.
    """
    begun = np.array(state["begun"])
    for step, actions in enumerate([*state["actions"].cpu().numpy(), None]):
        if (begins := begun == step).any():
            yield begins, None
        if actions is not None:
            yield begun <= step, actions


# ------------------------------------------------------------------------------------------ check


def why_unrepeatable(
    make: Make,
    timeout: float | None = None,
    say: Say = lambda _: None,
    layout: Layout | None = None,
) -> str:
    """Return the reason why seed and actions do not determine an episode; empty if they do.

    Plays one of two copies, then compares the results of both to the byte. The copies step in turn,
    which also detects draws from a shared generator. Global generators are restored.

    Args:
        make: makes a copy.
        timeout: seconds that a step or a reset may take.
        say: gets a line if seeds change nothing, or if float32 loses changes of an observation.
        layout: the layout of observations, which may have a mask of actions.
    """
    call: Call = partial(within, timeout)
    difference = partial(_difference, make, call, layout)
    try:
        with generators_kept(), np.errstate(all="ignore"):
            shown: Shown = []
            why = difference(_PAST, shown)
            _say_coarse(shown, say)
            unlike = (difference(0, [], shift) for shift in range(1, 7))
            if (why or (np.ptp(shown[-1], 0) == 0).all()) and not any(unlike):
                say(
                    "episodes: copies with seven different seeds begin the same one, given equal "
                    "actions; for chance, call super().reset(seed=seed), and use self.np_random"
                )
            # If even two new copies differ, the cause is draws from elsewhere, not state.
            return why + _STATE * bool(why and not difference(0, []))
    except TookTooLong:
        return f"a step or a reset took longer than {timeout:g} s"
    except Exception as error:  # an environment may raise anything
        return f"a second copy of the environment raises an error: {first_line(error)}"


def _difference(
    make: Make, call: Call, layout: Layout | None, past: int, shown: Shown, shift: int = 0
) -> str:
    """Say how a copy that has played ``past`` steps differs from a new one; empty if equal.

    ``shown`` gets the observations of past episodes; ``shift`` is added to the new copy's seeds.
    """
    with closing(call(make)) as played, closing(call(make)) as fresh:
        space, rng = copy.deepcopy(played.action_space), np.random.default_rng(0)
        space.seed(0)
        draw = partial(any_action, layout, space)
        seen, ended = None, True
        for _ in range(past):
            seen = _reset(played, 0, call) if ended else seen
            shown += [[]] * ended
            shown[-1].append(np.array(seen))
            seen, result = _step(played, draw(seen, rng), call)
            ended = any(result[2:])
        shown.append([np.array(_reset(played, seed, call)) for seed in range(past and 3)])
        for seed in (1, 2):  # at the second seed, ``fresh`` has played too
            seen = _reset(played, seed, call)
            if _as_bytes(seen) != _as_bytes(_reset(fresh, seed + shift, call)):
                return "after the same seeded reset, a used copy differs from a new one"
            for step in range(1, _COMPARED + 1):
                action = draw(seen, rng)
                seen, result = _step(played, action, call)
                if result != _step(fresh, action, call)[1]:
                    return f"two copies with the same seed and actions differ in step {step}"
                if any(result[2:]):
                    break
        return ""


def _say_coarse(episodes: Shown, say: Say) -> None:
    """Name a number of observations [D] whose changes float32 loses, unless it comes to rest."""
    for numbers in (np.array(episode, np.float64) for episode in episodes):
        steps = np.spacing(np.abs(numbers).max(0).astype(np.float32))
        changes, kept = (np.abs(np.diff(x, axis=0)) for x in (numbers, numbers.astype(np.float32)))
        moved = changes > 1e-6 * steps  # smaller ones are the simulator's own rounding
        lost = 4 * (moved & (kept == 0)).sum(0) > moved.sum(0)
        if (lost := lost & (np.ptp(numbers, 0) < 1000 * steps)).any():
            i = int(lost.argmax())
            say(
                f"observation: number {i} is about {numbers[0, i]:g} and changes by up to "
                f"{changes[:, i].max():.3g}, but float32 has steps of {steps[i]:g} there; subtract "
                "a constant from it by a wrapper, as in env.wrappers=[module:Wrapper]"
            )
            break


def _reset(env: gymnasium.Env, seed: int, call: Call) -> object:
    return call(partial(env.reset, seed=seed))[0]


def _step(env: gymnasium.Env, action: object, call: Call) -> tuple[object, tuple[object, ...]]:
    seen, reward, terminated, truncated, _ = call(partial(env.step, action))
    return seen, (_as_bytes(seen), _as_bytes(reward), bool(terminated), bool(truncated))


def _as_bytes(value: object) -> tuple[str, bytes]:
    array = np.asarray(value)
    return f"{array.dtype.str} {array.shape}", array.tobytes()
