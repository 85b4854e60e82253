"""A small environment with nested keys and two action heads, for tests of transforms."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import IndependentNormal


class TwoHeads(EnvBase):
    """Observation ("agent", "seen") [N, 3]; actions ("agent", "move") [N, 2], ("agent", "press").

    The reward ("agent", "reward") is minus the squared distance of the move; ten steps an episode.
    """

    def __init__(self, num_envs: int = 2) -> None:
        super().__init__(batch_size=torch.Size([num_envs]))
        n = num_envs
        seen = Composite(seen=Unbounded(shape=(n, 3)), shape=(n,))
        self.observation_spec = Composite(agent=seen, shape=(n,))
        action = Composite(
            move=Bounded(-1.0, 1.0, shape=(n, 2)), press=Categorical(3, shape=(n,)), shape=(n,)
        )
        self.action_spec = Composite(agent=action, shape=(n,))
        reward = Composite(reward=Unbounded(shape=(n, 1)), shape=(n,))
        self.reward_spec = Composite(agent=reward, shape=(n,))
        flag = Categorical(2, dtype=torch.bool, shape=(n, 1))
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=(n,)
        )
        self._steps = torch.zeros(n, 1, dtype=torch.long)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self._steps[mask if mask is not None else slice(None)] = 0
        return self._told(torch.zeros(self.batch_size[0], 1, dtype=torch.bool))

    def _told(self, done: torch.Tensor, **more: object) -> TensorDict:
        agent = {"seen": torch.randn(*self.batch_size, 3), **more}
        flags = {"done": done, "terminated": torch.zeros_like(done), "truncated": done.clone()}
        return TensorDict({"agent": agent, **flags}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._steps += 1
        move = tensordict["agent", "move"]
        return self._told(self._steps >= 10, reward=-(move**2).sum(-1, keepdim=True))

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)


class Heads(nn.Module):
    """Parameters of both heads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 7)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loc, log_scale, logits = self.net(seen).split((2, 2, 3), -1)
        return loc, log_scale.tanh().exp(), logits


def two_headed_actor() -> ProbabilisticTensorDictSequential:
    """A policy over both heads, as TorchRL's composite distributions want it."""
    params = [("params", "move", "loc"), ("params", "move", "scale"), ("params", "press", "logits")]
    return ProbabilisticTensorDictSequential(
        TensorDictModule(Heads(), [("agent", "seen")], params),
        ProbabilisticTensorDictModule(
            in_keys=["params"],
            out_keys=[("agent", "move"), ("agent", "press")],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {
                    "move": IndependentNormal,
                    "press": torch.distributions.Categorical,
                },
                "name_map": {"move": ("agent", "move"), "press": ("agent", "press")},
            },
            return_log_prob=True,
            default_interaction_type="random",
        ),
    )
