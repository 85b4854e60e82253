"""``collector.staleness`` of control: a waiting rollout has mu's distributions in its states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from klrl.base.seeds import generators_kept
from klrl.config import Config
from klrl.control.policy.networks import Agent
from klrl.control.run.advantage import EXCESS
from klrl.control.run.kl import SAMPLER_LOG_PROB
from klrl.control.run.rollout import add_policy
from klrl.kl.charge import KL_KEY, RAW_REWARD_KEY, ReferenceKL
from klrl.runs.metrics import Row
from klrl.train import stale

#: Bytes of a frame's reward, flags, trajectory, return and length of its episode.
_REST = 4 + 6 + 8 + 2 * (4 + 8)


class StaleFrames(stale.StaleRollout):
    """The rollouts [N, T] of N updates ago, scored by the policy of today."""

    def __init__(self, config: Config, agent: Agent) -> None:
        super().__init__(config.collector.staleness)
        self._agent, self._corrected = agent, config.corrects_sampler

    def sample(self) -> dict[str, Any]:
        """Sample a rollout with the current policy."""
        return {"batch": self.rollout.collect().to_dict()}

    @torch.no_grad()
    def recall(self, oldest: Mapping[str, Any]) -> TensorDictBase:
        """Put mu's outputs below "sampler", and those of the current policy in their place."""
        log_mu, device = oldest["batch"]["action_log_prob"], next(self._agent.actor.parameters())
        batch = TensorDict(oldest["batch"], log_mu.shape, device.device, names=[None, "time"])
        for key in self._agent.family.param_keys:
            batch.set(("sampler", key), batch.get(key))
        batch.set(SAMPLER_LOG_PROB, batch.get("action_log_prob"))
        add_policy(self._agent, batch)
        return batch

    def charge(self, batch: TensorDictBase, kl: ReferenceKL) -> Tensor:
        """Give a charged estimate the weight w = pi_old / mu [N, T] of its action; return w.

        E_mu[w k1] is the KL of pi_old in the step's state, which earlier actions are charged. A
        loss that corrects mu gives a step's own k1 this weight itself, hence :data:`EXCESS`.
        """
        weight = (batch.get("action_log_prob") - batch.get(SAMPLER_LOG_PROB)).exp()
        if kl.charges_reward and kl.estimator != "exact":
            after = batch.get("next")
            own = after.get(KL_KEY)
            after.set(KL_KEY, applied := weight.unsqueeze(-1) * own)
            after.set("reward", kl.shaped(after.get(RAW_REWARD_KEY), applied))
            if self._corrected:
                batch.set(EXCESS, kl.coef * (applied - own))
        return weight

    def row(self, batch: TensorDictBase) -> Row:
        """Compare mu with the policy before the update, in nats per frame."""
        log_mu, old = batch.get(SAMPLER_LOG_PROB), batch.get("action_log_prob")
        return stale.compare(self._agent.family.kl(batch["sampler"], batch), log_mu, old, self.lag)


@torch.no_grad()
def room(config: Config, agent: Agent, device: torch.device) -> list[str]:
    """Return a line about the memory of the waiting rollouts; see stale.room."""
    seen = agent.synthetic_observations(1).to(device)
    with generators_kept():  # an actor draws
        acted = agent.actor(TensorDict({"observation": seen, "next": {"observation": seen}}, [1]))
    size = config.frames_per_iteration * (acted.bytes() + _REST)
    return stale.room(config, size, device, "env.num_envs or collector.steps")
