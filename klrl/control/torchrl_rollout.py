"""``collector=torchrl``: TorchRL's Collector in this process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv


class TorchRLRollout:
    """Rollouts of ``steps`` steps of every copy.

    Args:
        env: the environment, on the CPU.
        actor: the live policy; its weights are used as they are at each rollout.
        steps: T.
        device: of the policy and of the batches.
    """

    def __init__(
        self, env: TransformedEnv, actor: nn.Module, steps: int, device: torch.device
    ) -> None:
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
