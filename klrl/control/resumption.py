"""The rollout as a component of the checkpoint, and how a resumed run goes on with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from klrl.base.errors import first_line
from klrl.base.seeds import generators_kept
from klrl.control.copies import VectorGymEnv
from klrl.control.episodes import LONGEST
from klrl.control.rollout import TorchRLRollout
from klrl.control.vector import VectorRollout
from klrl.train.loop import Rollout

#: What can be saved between two collections, and begin new episodes.
Kept = VectorRollout | TorchRLRollout


class RunningEpisodes:
    """The state of a run's rollout: its episodes, and what is carried from step to step."""

    def __init__(self) -> None:
        self.repeatable = self.new = False
        self._why = "they have not begun"  # a resumed run begins new ones; empty where it does not
        self._rollout: Rollout | None = None
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Of the rollout; empty where it has none."""
        if isinstance(self._rollout, Kept):
            return self._rollout.state_dict()
        return self._loaded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep it for the rollout to come."""
        self._loaded = dict(state)

    @property
    def manifest(self) -> dict[str, str]:
        """Whether they are a function of seeds and actions, and what a resumed run does."""
        return {
            "repeatable": "yes" if self.repeatable else "no",
            "resume": "anew" if self._why else "exact",
        }

    def prove(self, copies: VectorGymEnv, elsewhere: bool) -> None:
        """Find out whether they can be played again; ``elsewhere``: other processes play them."""
        self._why = copies.keep_episodes()
        self.repeatable = not self._why
        if elsewhere:
            self._why = "the workers of this collector have them"

    def begin(
        self,
        iteration: int,
        make: Callable[[], Rollout],
        reseed: Callable[[], None],
        say: Callable[[str], None],
    ) -> Rollout:
        """Make the rollout, and go on with what was loaded.

        ``reseed`` seeds the environments for new episodes once more; ``say`` takes a line where a
        resumed run has new episodes, or one of this run will have them.
        """
        loaded, self._loaded = self._loaded, {}
        if "episodes" in loaded:
            why = self._go_on(loaded, make, reseed)
            if why:  # whatever the trial found: these episodes did not repeat themselves
                self.repeatable, self._why = False, why
        else:
            self._rollout = make()
            why = self._why or f"this checkpoint holds none, or one of over {LONGEST:,} steps ran"
        assert self._rollout is not None
        self.new = iteration > 0 and bool(why)
        if self.new:
            say(f"resume: new episodes begin: {why}")
        elif self._why:
            say(f"resume: a resumed run begins new episodes: {self._why}")
        return self._rollout

    def _go_on(
        self, loaded: Mapping[str, Any], make: Callable[[], Rollout], reseed: Callable[[], None]
    ) -> str:
        """Make the rollout from a state; why that failed, else nothing."""
        with generators_kept():  # TorchRL's collector draws when it is made
            rollout = self._rollout = make()
            assert isinstance(rollout, Kept)
            try:
                rollout.load_state_dict(loaded)
            except Exception as error:  # of the environment too, which may be another version's
                reseed()
                rollout.restart()
                return f"{type(error).__name__}: {first_line(error)}"
        return ""
