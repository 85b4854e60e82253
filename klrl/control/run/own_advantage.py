"""``advantage=custom``: a function of the user's that estimates advantages."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor

from klrl.config import CustomAdvantageConfig
from klrl.config.own import PartError, try_part
from klrl.control.policy.networks import Agent
from klrl.control.run.advantage import RewardNormalizer, take_excess
from klrl.kl.charge import KL_KEY, RAW_REWARD_KEY


def custom(
    config: CustomAdvantageConfig,
    critic: TensorDictModule,
    reward_scale: float,
    normalizer: RewardNormalizer | None,
    agent: Agent,
) -> OwnAdvantage:
    """``advantage=custom``: make the user's function, and try it on a synthetic rollout."""
    given = {
        "config": config,
        "critic": critic,
        "reward_scale": reward_scale,
        "normalizer": normalizer,
    }
    follower = deepcopy(normalizer)
    trial, use = {"normalizer": lambda: follower}, partial(_try, agent)
    made = try_part("advantage", config, given, object, use, trial=trial)
    return OwnAdvantage(*made, reward_scale, normalizer)


@dataclass(frozen=True)
class OwnAdvantage:
    """Wrapper of the user's function that writes the advantages of a rollout."""

    part: Any  # saved in checkpoints if it has state_dict and load_state_dict
    unsaved: bool  # whether ``part`` has state that no checkpoint saves
    reward_scale: float
    normalizer: RewardNormalizer | None

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the advantages of a rollout."""
        self.part(batch)
        take_excess(batch, self.reward_scale, self.normalizer)
        return batch


@torch.no_grad()
def _try(agent: Agent, estimate: Callable[[TensorDictBase], object]) -> None:
    """Call the user's function on a synthetic rollout [2, 3], and check what it writes."""
    estimate(batch := _made_up(agent))
    for key in ("advantage", "value_target", "state_value"):
        value = batch.get(key, None)
        if value is None:
            raise PartError(f"wrote no {key}; write it into the rollout, [N, T, 1]")
        if value.shape != (2, 3, 1) or value.dtype != torch.float32:
            raise PartError(
                f"wrote {key} of shape {tuple(value.shape)}, {value.dtype}; give [N, T, 1] = "
                "(2, 3, 1), float32"
            )
        if not value.isfinite().all():
            raise PartError(f"wrote values of {key} that are not finite")


def _made_up(agent: Agent) -> TensorDictBase:
    """Make a synthetic rollout [2, 3], with a terminated and a truncated episode."""
    generator = torch.Generator().manual_seed(0)
    like = next(agent.critic.parameters())
    seen = agent.synthetic_observations(12).reshape(2, 2, 3, -1)

    def normal() -> Tensor:
        return torch.randn(2, 3, 1, generator=generator).to(like)

    terminated, truncated = (torch.zeros(2, 3, 1, dtype=torch.bool) for _ in range(2))
    terminated[0, 1], truncated[1, 0] = True, True
    no, steps = torch.zeros_like(terminated), torch.tensor([[1, 2, 1], [1, 1, 2]])[..., None]
    after = {
        "observation": seen[1],
        **{key: normal() for key in ("reward", RAW_REWARD_KEY, KL_KEY, "episode_reward")},
        "step_count": steps,
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated | truncated,
    }
    root = {
        "observation": seen[0],
        **dict.fromkeys(("done", "terminated", "truncated"), no),
        "episode_reward": normal(),
        "step_count": steps - 1,
        "collector": {"traj_ids": torch.tensor([[0, 0, 2], [1, 3, 3]])},
        "next": after,
    }
    acted: TensorDictBase = agent.actor(TensorDict(root, [2, 3], device=like.device))
    return acted
