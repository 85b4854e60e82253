"""Collect rollouts by TorchRL (``collector=torchrl``); save and restore running episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import TransformedEnv

from klrl.base.errors import first_line
from klrl.base.seeds import generators_kept
from klrl.control.env.copies import VectorGymEnv
from klrl.control.env.episodes import LONGEST
from klrl.control.policy.actor import Agent
from klrl.control.run.vector import VectorRollout


class TorchRLRollout:
    """``collector=torchrl``: TorchRL's Collector; a rollout has ``steps`` steps of every copy."""

    def __init__(self, env: TransformedEnv, agent: Agent, steps: int, device: torch.device) -> None:
        from torchrl.collectors import Collector  # slow: imports all collectors

        self._base = env.base_env
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

    def restart(self) -> None:
        """Begin new episodes with the next rollout."""
        self._collector._make_carrier()

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the start of the next rollout; empty if it cannot be saved.

        The collector's own ``state_dict`` lacks the environment and the carrier, TorchRL's name for
        the TensorDict with the next observation and the returns and lengths of running episodes.
        """
        episodes = self._base.episodes() if isinstance(self._base, VectorGymEnv) else None
        if episodes is None:
            return {}
        return {
            "episodes": episodes,
            "carrier": self._collector._carrier.to_dict(),
            "trajectories": self._collector._traj_pool.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._base.play_again(state["episodes"])
        before = self._collector._carrier
        carrier = TensorDict({}, before.batch_size, before.device, before.names)
        for key, value in TensorDict(state["carrier"], before.batch_size).items(True, True):
            now = before.get(key, None)  # with a policy on a GPU, entries are on two devices
            carrier.set(key, value.to("cpu" if now is None else now.device))
        self._collector._carrier = carrier
        self._collector._traj_pool.load_state_dict(state["trajectories"])


# ------------------------------------------------------------------ running episodes, for resume

ControlRollout = VectorRollout | TorchRLRollout


class RunningEpisodes:
    """Checkpoint component with the running episodes and the state of their collector."""

    def __init__(self) -> None:
        self.repeatable = self.new = False
        self._why = "the run has not begun"  # reason why a resume begins new episodes, or empty
        self._rollout: ControlRollout | None = None
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the collector's state; before :meth:`begin`, the loaded state."""
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
        make: Callable[[], ControlRollout],
        reseed: Callable[[], None],
        say: Callable[[str], None],
    ) -> ControlRollout:
        """Make the collector, and restore its loaded state.

        If restoring fails, ``reseed`` seeds new episodes. ``say`` gets a line if this resume begins
        new episodes, or else if a later resume will.
        """
        loaded, self._loaded = self._loaded, {}
        if "episodes" in loaded:
            why = self._go_on(loaded, make, reseed)
            if why:  # the failed replay overrides the result of prove()
                self.repeatable, self._why = False, why
        else:
            self._rollout = make()
            why = self._why or f"the checkpoint has no episodes, or one had over {LONGEST:,} steps"
        assert self._rollout is not None
        self.new = iteration > 0 and bool(why)
        if self.new:
            say(f"resume: this run begins new episodes: {why}")
        elif self._why:
            say(f"resume: a later resume will begin new episodes: {self._why}")
        return self._rollout

    def _go_on(
        self,
        loaded: Mapping[str, Any],
        make: Callable[[], ControlRollout],
        reseed: Callable[[], None],
    ) -> str:
        """Make the collector and restore a state; return why this failed, else an empty string."""
        with generators_kept():  # TorchRL's collector draws random numbers when it is made
            rollout = self._rollout = make()
            try:
                rollout.load_state_dict(loaded)
            except Exception as error:  # a changed environment may raise anything
                reseed()
                rollout.restart()
                return f"{type(error).__name__}: {first_line(error)}"
        return ""
