"""Collect rollouts by TorchRL (``collector=torchrl``); save and restore klrl's own episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import TransformedEnv

from klrl.base.errors import first_line
from klrl.base.seeds import generators_kept
from klrl.control.env.copies import VectorGymEnv
from klrl.control.env.episodes import LONGEST
from klrl.control.policy.actor import Agent
from klrl.control.run.vector import VectorRollout


class TorchRLRollout:
    """``collector=torchrl``: TorchRL's Collector; a rollout has ``steps`` steps of every copy.

    A resume begins new episodes: the Collector's ``state_dict`` lacks the running ones.
    """

    def __init__(self, env: TransformedEnv, agent: Agent, steps: int, device: torch.device) -> None:
        from torchrl.collectors import Collector  # slow: imports all collectors

        self._collector = Collector(
            env,
            agent.actor,
            frames_per_batch=steps * env.batch_size[0],
            total_frames=-1,
            policy_device=device,
            env_device=torch.device("cpu"),
            storing_device=device,
            # Silences TorchRL 0.14's FutureWarning; nothing here needs an InitTracker.
            auto_register_policy_transforms=False,
        )
        self._batches: Iterator[TensorDictBase] = iter(self._collector)

    def collect(self) -> TensorDictBase:
        """Collect the next rollout [N, T]."""
        return next(self._batches)

    def close(self) -> None:
        """Close the collector and its environment."""
        self._collector.shutdown()


# ------------------------------------------------------------------ running episodes, for resume


class RunningEpisodes:
    """Checkpoint component with the running episodes and the state of their collector."""

    def __init__(self) -> None:
        self.repeatable = self.new = False
        self._why = "the run has not begun"  # reason why a resume begins new episodes, or empty
        self._rollout: VectorRollout | None = None
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state; before :meth:`begin`, the loaded one."""
        return self._loaded if self._rollout is None else self._rollout.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store the state for :meth:`begin`."""
        self._loaded = dict(state)

    @property
    def manifest(self) -> dict[str, str]:
        """Manifest entries: whether episodes can be replayed, and whether a resume replays them."""
        return {
            "repeatable": "yes" if self.repeatable else "no",
            "resume": "anew" if self._why else "exact",
        }

    def check_repeatable(self, copies: VectorGymEnv, say: Callable[[str], None]) -> None:
        """Check whether episodes can be replayed; if so, start to record them."""
        self._why = copies.keep_episodes(say)
        self.repeatable = not self._why

    def begin(
        self,
        iteration: int,
        rollout: VectorRollout | TorchRLRollout,
        reseed: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """Restore the loaded state in a new collector.

        If restoring fails, ``reseed`` seeds new episodes. ``say`` gets a line if this resume begins
        new episodes, or else if a later resume will.
        """
        loaded, self._loaded = self._loaded, {}
        if isinstance(rollout, VectorRollout):
            self._rollout = rollout
        else:
            self._why = self._why or "collector=torchrl saves no episodes; collector=vector does"
        if self._rollout is not None and "episodes" in loaded:
            why = _go_on(self._rollout, loaded, reseed)
            if why:  # the failed replay overrides the result of the test before the run
                self.repeatable, self._why = False, why
        else:
            why = self._why or f"the checkpoint has no episodes, or one had over {LONGEST:,} steps"
        self.new = iteration > 0 and bool(why)
        if self.new:
            say(f"resume: this run begins new episodes: {why}")
        elif self._why:
            say(f"resume: a later resume will begin new episodes: {self._why}")


def _go_on(rollout: VectorRollout, loaded: Mapping[str, Any], reseed: Callable[[], None]) -> str:
    """Restore a state; return why this failed, else an empty string."""
    with generators_kept():  # an environment may draw from them
        try:
            rollout.load_state_dict(loaded)
        except Exception as error:  # a changed environment may raise anything
            reseed()
            rollout.restart()
            return f"{type(error).__name__}: {first_line(error)}"
    return ""
