"""How the copies of an environment are saved: the best way that is proved to go on to the bit.

A new copy takes up the state of a first one; both then take the same random steps, and answer with
the same bytes or the way is no good. None of the copies that a run plays in takes part.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from torchrl.checkpoint import GlobalRNGState

from klrl.base.errors import first_line
from klrl.base.seeds import generators_kept
from klrl.base.time_limit import TookTooLong, within
from klrl.control.env_state import Reader, Reading, State, offers_state, simulates, write
from klrl.control.plain_values import decode, encode

#: What a resumed run does with the running episodes: goes on to the bit, from their saved state or
#: by taking their steps again; or starts new ones.
EXACT, REPLAYED, ANEW = "exact", "replayed", "anew"

#: Steps that are compared, and those after which: early in an episode, and later.
STEPS, AFTER = 16, (1, 24)
#: Of the first copy's reset.
_SEED = 1
#: An episode of more steps is not replayed.
_LONGEST = 20_000

Make = Callable[[], gymnasium.Env]
Call = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True)
class Way:
    """How copies are saved.

    Attributes:
        tier: exact, replayed or anew.
        why: what kept it from a better one.
        reader: of their state; None for anew.
    """

    tier: str
    why: str = ""
    reader: Reader | None = None

    def keep(self, env: gymnasium.Env) -> gymnasium.Env:
        """A copy that can be saved in this way; before its first reset."""
        if self.tier != REPLAYED or self.reader is None:
            return env
        return Recorded(env, self.reader)

    def read(self, env: gymnasium.Env) -> State | None:
        """What another copy takes up; None where this one cannot be saved."""
        if isinstance(env, Recorded):
            return env.record()
        return None if self.reader is None else {"state": self.reader.read(env)}


def take_up(env: gymnasium.Env, saved: Mapping[str, Any]) -> None:
    """Go on where a copy was saved, in whichever way.

    Raises:
        Exception: the state is not one of this environment, or whatever that raises.
    """
    if isinstance(env, Recorded):
        env.take_up(saved)
        return
    write(env, saved["state"])
    if "actions" in saved:
        env.reset(seed=saved["seed"])
        for action in decode(saved["actions"]):
            env.step(action)


class Recorded(gymnasium.Wrapper):
    """Keeps what its episode began with and the actions since.

    Args:
        env: a copy.
        reader: of its state before a reset: generators, and what lasts from episode to episode.
    """

    def __init__(self, env: gymnasium.Env, reader: Reader) -> None:
        super().__init__(env)
        self._reader = reader
        self._begun: State | None = None
        self._actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """As the environment's."""
        self._begun = {"state": self._reader.read(self.env), "seed": seed}
        self._actions = []
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """As the environment's."""
        if len(self._actions) <= _LONGEST:
            self._actions.append(np.array(action))
        return self.env.step(action)

    def record(self) -> State | None:
        """What :func:`take_up` takes; None where the episode is too long."""
        if self._begun is None or len(self._actions) > _LONGEST:
            return None
        return {**self._begun, "actions": encode(np.array(self._actions))}

    def take_up(self, saved: Mapping[str, Any]) -> None:
        """As :func:`take_up`, and go on with the record."""
        take_up(self.env, saved)
        replayed = "actions" in saved
        self._begun = {name: saved[name] for name in ("state", "seed")} if replayed else None
        self._actions = list(decode(saved["actions"])) if replayed else []


# ------------------------------------------------------------------------------------------ proof


def prove(make: Make, timeout: float | None = None) -> Way:
    """The best way for the copies of an environment.

    It costs some copies and some hundred steps. torch's, numpy's and Python's generators are left
    as they were.

    Args:
        make: makes a copy.
        timeout: seconds that a step or a reset may take.
    """
    try:
        with generators_kept():
            return _prove(make, partial(within, timeout))
    except TookTooLong:
        return Way(ANEW, f"a step or a reset took longer than {timeout:g} s")
    except Exception as error:  # someone else's code: it may raise anything
        return Way(ANEW, f"another copy fails: {first_line(error)}")


def _prove(make: Make, call: Call) -> Way:
    why = ""
    with _made(make, call) as first:
        for tier, reading in _readings(first):
            with _made(make, call) as made:
                way = Way(tier, why, call(partial(Reader, reading, made)))
            difference = _difference(way, first, make, call)
            if not difference:
                return way if tier == REPLAYED else Way(tier, reader=way.reader)
            if not why:
                why = f"its attributes do not hold its state ({difference})"
        return Way(ANEW, f"neither its attributes nor its actions tell its state ({difference})")


def _readings(env: gymnasium.Env) -> Iterator[tuple[str, Reading]]:
    """Ways from the best on; each is tried unless the one before is good."""
    if offers_state(env):
        yield EXACT, Reading(own=True)
    yield EXACT, Reading()
    if simulates(env):
        yield EXACT, Reading(derived=True)
    yield REPLAYED, Reading()


@contextmanager
def _made(make: Make, call: Call) -> Iterator[gymnasium.Env]:
    env = call(make)
    try:
        yield env
    finally:
        env.close()


def _difference(way: Way, first: gymnasium.Env, make: Make, call: Call) -> str:
    """Where a new copy answers otherwise than the first one, whose state it took up."""
    player, generators = _Player(way.keep(first), call), GlobalRNGState()
    player.reset(_SEED)
    for steps in AFTER:
        player.steps(steps)
        with _made(make, call) as second:
            try:
                saved = json.loads(json.dumps(way.read(player.env)))
                call(partial(take_up, second, saved))
                before, actions = generators.state_dict(), player.actions(STEPS)
                expected = player.play(actions)
                generators.load_state_dict(before)
                found = _Player(second, call).play(actions)
            except TookTooLong:
                raise
            except Exception as error:  # what the state lacks may make the environment fail
                return f"taking it up raises {type(error).__name__}"
        for step, (mine, other) in enumerate(zip(expected, found, strict=False), 1):
            if mine != other:
                return f"step {step} after it differs"
    return ""


class _Player:
    """Plays a copy with random actions from a generator of its own."""

    def __init__(self, env: gymnasium.Env, call: Call) -> None:
        self.env, self._call = env, call
        self._space = copy.deepcopy(env.action_space)
        self._space.seed(_SEED)

    def reset(self, seed: int | None = None) -> Any:
        return _as_bytes(self._call(partial(self.env.reset, seed=seed))[0])

    def actions(self, count: int) -> list[Any]:
        return [self._space.sample() for _ in range(count)]

    def steps(self, count: int) -> None:
        self.play(self.actions(count), close=False)

    def play(self, actions: list[Any], *, close: bool = True) -> list[Any]:
        """All answers; episodes that end are followed by others, and so is the last one."""
        answers = []
        for action in actions:
            answers.append(self._step(action))
            if any(answers[-1][2:]):
                answers.append(self.reset())
        if close:
            answers += [self.reset(), self._step(actions[0])]
        return answers

    def _step(self, action: Any) -> tuple[Any, ...]:
        observation, reward, terminated, truncated, _ = self._call(partial(self.env.step, action))
        return _as_bytes(observation), _as_bytes(reward), bool(terminated), bool(truncated)


def _as_bytes(value: Any) -> tuple[str, bytes]:
    array = np.asarray(value)
    return f"{array.dtype.str} {array.shape}", array.tobytes()
