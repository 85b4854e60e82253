"""A small environment of several agents, and policies for it, for tests of transforms."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import MultiAgentMLP, ProbabilisticActor

AGENTS, SEEN, MOVES = 3, 4, 2
ACTION, LOG_PROB = ("agents", "action"), ("agents", "action_log_prob")
#: Who is rewarded -> the key of the reward.
REWARDS = {"each": ("agents", "reward"), "team": "reward"}


class Agents(EnvBase):
    """Three agents that move in the plane; each is rewarded, or the team is.

    Observation ("agents", "observation") [*B, 3, 4], action ("agents", "action") [*B, 3, 2], reward
    ("agents", "reward") [*B, 3, 1] or "reward" [*B, 1]; ten steps an episode.
    """

    def __init__(self, rewarded: str, *batch: int) -> None:
        super().__init__(batch_size=torch.Size(batch))
        self.rewarded = rewarded
        seen = Composite(observation=Unbounded(shape=(*batch, AGENTS, SEEN)), shape=batch)
        self.observation_spec = Composite(agents=seen, shape=batch)
        action = Bounded(-1.0, 1.0, shape=(*batch, AGENTS, MOVES))
        self.action_spec = Composite(agents=Composite(action=action, shape=batch), shape=batch)
        each = Composite(reward=Unbounded(shape=(*batch, AGENTS, 1)), shape=batch)
        team = Composite(reward=Unbounded(shape=(*batch, 1)), shape=batch)
        self.reward_spec = Composite(agents=each, shape=batch) if rewarded == "each" else team
        flag = Categorical(2, dtype=torch.bool, shape=(*batch, 1))
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=batch
        )
        self._steps = torch.zeros(*self.batch_size, 1, dtype=torch.long)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self._steps[mask if mask is not None else slice(None)] = 0
        return self._state(torch.zeros(*self.batch_size, 1, dtype=torch.bool))

    def _state(self, done: torch.Tensor) -> TensorDict:
        seen = {"observation": torch.randn(*self.batch_size, AGENTS, SEEN)}
        flags = {"done": done, "terminated": torch.zeros_like(done), "truncated": done.clone()}
        return TensorDict({"agents": seen, **flags}, self.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self._steps += 1
        state = self._state(self._steps >= 10)
        reward = -(tensordict[ACTION] ** 2).sum(-1, keepdim=True)
        return state.set(
            REWARDS[self.rewarded], reward if self.rewarded == "each" else reward.sum(-2)
        )

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)


def agents_actor(distribution: type) -> ProbabilisticActor:
    """A network for each agent, TorchRL's own, and a Gaussian over its two moves."""
    net = MultiAgentMLP(
        SEEN, 2 * MOVES, AGENTS, centralised=False, share_params=False, num_cells=8, depth=1
    )
    params = [("agents", "loc"), ("agents", "scale")]
    module = TensorDictModule(
        nn.Sequential(net, NormalParamExtractor()), [("agents", "observation")], params
    )
    return ProbabilisticActor(
        module,
        in_keys=params,
        out_keys=[ACTION],
        distribution_class=distribution,
        return_log_prob=True,
        log_prob_key=LOG_PROB,
        default_interaction_type="random",
    )
