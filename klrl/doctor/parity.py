"""Compares ``kl=legacy`` with ``kl=retrieve`` on the same batch: their numbers must be equal."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from klrl.config import EnvConfig, GaussianActorConfig, LegacyKLConfig, RetrieveKLConfig
from klrl.control.actor import make_agent
from klrl.control.env import make_env
from klrl.control.kl import make_reference_kl
from klrl.doctor.lines import KnownNumber
from klrl.kl.reference import freeze


def parity_lines() -> Iterator[KnownNumber]:
    """Yield the largest differences over 4 x 200 steps of Pendulum, away from the reference."""
    config = EnvConfig("Pendulum-v1", {}, 4, True, 1.0, name="gym")
    for distribution in ("normal", "tanh_normal"):
        torch.manual_seed(0)
        env = make_env(config, seed=0)
        actor = GaussianActorConfig([32], "tanh", False, init_std=1.0, name=distribution)
        agent = make_agent(actor, env, normalize=True, separate=False)
        reference = freeze(agent.actor)
        with torch.no_grad():
            for parameter in agent.actor.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        batch = env.rollout(200, agent.actor, break_when_any_done=False).detach()
        charged_steps = {}
        modes = (
            ("legacy", LegacyKLConfig(0.5, "rollout", name="legacy")),
            ("retrieve", RetrieveKLConfig(0.5, "rollout", "k1", "reward", False, name="retrieve")),
        )
        for name, mode in modes:
            kl = make_reference_kl(mode, agent.actor, reference)
            assert kl is not None
            assert kl.transform is not None
            charged_steps[name] = kl.transform(batch.clone())["next"]
        legacy, retrieve = charged_steps["legacy"], charged_steps["retrieve"]
        size = float(legacy["kl_penalty"].abs().mean())
        section = f"legacy against retrieve, {distribution}, mean |KL| {size:.2f}: largest gap"
        for key in ("reward", "kl_penalty", "ref_log_prob"):
            gap = (legacy[key] - retrieve[key]).abs().max()
            yield KnownNumber(section, key, 0.0, float(gap), 1e-5, "each other")
