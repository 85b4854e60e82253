"""What must hold before a control run is believed: a fresh policy is its reference."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential
from torchrl.envs import EnvBase

from klrl.control.actor import Agent
from klrl.domains import CONTROL
from klrl.kl.reference import THE_POLICY, FrozenReference
from klrl.train.preflight import kl_at_start, run_checks

#: Observations, drawn from a standard normal, at which the two are compared.
OBSERVATIONS = 64


@torch.no_grad()
def preflight_checks(
    agent: Agent, reference: FrozenReference | None, env: EnvBase, *, fresh: bool
) -> list[str]:
    """Compare policy and reference, where a fresh run begins with equal ones; the opening lines."""
    if reference is None or not fresh or reference.rule.source != THE_POLICY:
        return []
    like = next(agent.actor.parameters())
    seen = _observations(agent, env).to(like.device)
    policy, ref = _params(agent.actor, seen), _params(reference.module, seen)
    remedy = "report this: a fresh policy must be its reference"
    kl = agent.family.kl(policy, ref)
    return run_checks([kl_at_start(kl, CONTROL, like.dtype, remedy)])


def _observations(agent: Agent, env: EnvBase) -> torch.Tensor:
    """Made-up ones, from a generator of their own: a check moves none of the run's draws."""
    if agent.layout is not None:
        rng = np.random.default_rng(0)
        return torch.from_numpy(agent.layout.drawn(rng, OBSERVATIONS))
    size = env.observation_spec_unbatched["observation"].shape[-1]
    generator = torch.Generator().manual_seed(0)
    like = next(agent.actor.parameters())
    return torch.randn(OBSERVATIONS, size, generator=generator).to(like)


def _params(actor: ProbabilisticTensorDictSequential, seen: torch.Tensor) -> TensorDict:
    """The parameters of pi(.|s) at observations [B, D]."""
    return actor.get_dist_params(TensorDict({"observation": seen}, seen.shape[:1]))
