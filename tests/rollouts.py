"""A rollout of a policy that has left its reference."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from klrl.train.loop import Training


def moved_rollout(training: Training, by: float) -> TensorDictBase:
    """A batch that is not charged yet, after noise of this scale on all weights."""
    with torch.no_grad():
        for parameter in training.parts.agent.modules.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    rollout = training.parts.rollout(0)
    batch = rollout.collect()
    rollout.close()
    return batch
