"""Makes the rollout of each ``collector``: an object with ``collect()`` and ``close()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.envs import TransformedEnv

from klrl.config import Config
from klrl.control.actor import Agent
from klrl.control.copies import VectorGymEnv
from klrl.control.vector import VectorRollout


@dataclass(frozen=True)
class RolloutContext:
    """The arguments from which a control run's rollout is made."""

    config: Config
    env: TransformedEnv | None  # None where the workers make their own
    agent: Agent
    device: torch.device
    seed: int
    say: Callable[[str], None] = print


def vector_rollout(context: RolloutContext) -> VectorRollout:
    """``collector=vector``."""
    steps = context.config.collector.steps
    return VectorRollout(context.env, context.agent, steps, context.device)


def torchrl_rollout(context: RolloutContext) -> TorchRLRollout:
    """``collector=torchrl``."""
    steps = context.config.collector.steps
    return TorchRLRollout(context.env, context.agent.actor, steps, context.device)


class TorchRLRollout:
    """TorchRL's collector in this process: rollouts of ``steps`` steps of every copy."""

    def __init__(
        self, env: TransformedEnv, actor: nn.Module, steps: int, device: torch.device
    ) -> None:
        from torchrl.collectors import Collector  # which imports all of TorchRL's

        self._base = env.base_env
        self._collector = Collector(
            env,
            actor,
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
        """The next rollout, [N, T]."""
        return next(self._batches)

    def close(self) -> None:
        """Close the collector and its environment."""
        self._collector.shutdown()

    def restart(self) -> None:
        """Begin new episodes with the next rollout."""
        self._collector._make_carrier()

    def state_dict(self) -> dict[str, Any]:
        """What the next rollout starts from; empty if that cannot be saved.

        The collector's own holds neither its carrier, which is what the policy sees next with the
        sums of running episodes, nor the environment.
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
        """Go on from :meth:`state_dict`."""
        self._base.play_again(state["episodes"])
        before = self._collector._carrier
        carrier = TensorDict({}, before.batch_size, before.device, before.names)
        for key, value in TensorDict(state["carrier"], before.batch_size).items(True, True):
            now = before.get(key, None)  # a policy on a GPU has its carrier's parts in two places
            carrier.set(key, value.to("cpu" if now is None else now.device))
        self._collector._carrier = carrier
        self._collector._traj_pool.load_state_dict(state["trajectories"])
