"""A small environment of several agents, and policies for it, for tests of transforms."""

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.modules import MultiAgentMLP, ProbabilisticActor

from tests.transforms.heads import TenSteps

AGENTS, SEEN, MOVES = 3, 4, 2
ACTION, LOG_PROB = ("agents", "action"), ("agents", "action_log_prob")
#: Who is rewarded -> the key of the reward.
REWARDS = {"each": ("agents", "reward"), "team": "reward"}


class Agents(TenSteps):
    """Three agents that move in the plane; each is rewarded, or the team is.

    Observation ("agents", "observation") [*B, 3, 4], action ("agents", "action") [*B, 3, 2], reward
    ("agents", "reward") [*B, 3, 1] or "reward" [*B, 1].
    """

    def __init__(self, rewarded: str, *batch: int) -> None:
        super().__init__(*batch)
        self.rewarded = rewarded
        seen = Composite(observation=Unbounded(shape=(*batch, AGENTS, SEEN)), shape=batch)
        self.observation_spec = Composite(agents=seen, shape=batch)
        action = Bounded(-1.0, 1.0, shape=(*batch, AGENTS, MOVES))
        self.action_spec = Composite(agents=Composite(action=action, shape=batch), shape=batch)
        each = Composite(reward=Unbounded(shape=(*batch, AGENTS, 1)), shape=batch)
        team = Composite(reward=Unbounded(shape=(*batch, 1)), shape=batch)
        self.reward_spec = Composite(agents=each, shape=batch) if rewarded == "each" else team

    def seen(self) -> dict[str, object]:
        return {"agents": {"observation": torch.randn(*self.batch_size, AGENTS, SEEN)}}

    def rewards(self, tensordict: TensorDictBase) -> dict[str | tuple[str, str], torch.Tensor]:
        reward = -(tensordict[ACTION] ** 2).sum(-1, keepdim=True)
        return {REWARDS[self.rewarded]: reward if self.rewarded == "each" else reward.sum(-2)}


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
