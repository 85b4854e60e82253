"""A rollout of a policy that has left its reference."""

from tensordict import TensorDictBase

from klrl.train.loop import Training
from tests.agents import moved


def moved_rollout(training: Training, by: float) -> TensorDictBase:
    """A batch that is not charged yet, after noise of this scale on all weights."""
    moved(training.parts.agent.modules, by)
    rollout = training.parts.rollout(0)
    batch = rollout.collect()
    rollout.close()
    return batch
