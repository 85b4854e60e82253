"""What must hold before a control run is believed: a fresh policy is its reference."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential
from torchrl.envs import EnvBase

from klrl.control.actor import Agent
from klrl.control.observation import Layout
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
    size = env.observation_spec_unbatched["observation"].shape[-1]
    seen = made_up(agent.layout, size, OBSERVATIONS)
    seen = seen.to(like) if agent.layout is None else seen.to(like.device)  # bytes stay bytes
    policy, ref = _params(agent.actor, seen), _params(reference.module, seen)
    remedy = "report this: a fresh policy must be its reference"
    kl = agent.family.kl(policy, ref)
    return run_checks([kl_at_start(kl, CONTROL, like.dtype, remedy)])


def made_up(layout: Layout | None, size: int, count: int) -> torch.Tensor:
    """Observations [count, D] to try networks with, always the same."""
    if layout is not None:
        return torch.from_numpy(layout.drawn(np.random.default_rng(0), count))
    return torch.randn(count, size, generator=torch.Generator().manual_seed(0))


def _params(actor: ProbabilisticTensorDictSequential, seen: torch.Tensor) -> TensorDict:
    """The parameters of pi(.|s) at observations [B, D]."""
    return actor.get_dist_params(TensorDict({"observation": seen}, seen.shape[:1]))
