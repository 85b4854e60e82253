"""KL in the processes of TorchRL's collector: the main process's numbers, after weight updates."""

import copy
from functools import partial

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import EnvBase

from klrl.control.policy.networks import Agent
from klrl.kl import KLConstrainedTransform, KLRewardTransform, RetrieveKL, exact_kl, freeze
from tests.agents import agent_of, gym, make_env, moved

pytestmark = pytest.mark.services

PENDULUM = gym("Pendulum-v1")
COEF = 0.4


def charged_env(reference: nn.Module) -> EnvBase:
    """Three transforms, one after another, each with a reward and a KL of its own."""
    transforms = (
        KLRewardTransform(reference, COEF, out_keys="reward_k1", kl_key="k1"),
        KLConstrainedTransform(
            reference, COEF, estimator="exact", out_keys="reward_exact", kl_key="exact"
        ),
        RetrieveKL(
            ref_model=reference,
            ref_log_probs_full_key=("retrieved", "full"),
            kl_key="live",
            coeff=COEF,
            raw_reward_key="reward_raw",
        ),
    )
    return make_env(PENDULUM, seed=0, transforms=transforms)


def train(agent: Agent, by: float) -> None:
    """What an update leaves behind: other weights, other observation statistics."""
    moved(agent.actor, by)
    agent.normalizer.update(2 + 3 * torch.randn(500, 3))


def collected(agent: Agent, reference: nn.Module) -> list[tuple[nn.Module, TensorDictBase]]:
    """Three batches of two processes, each with the policy that sampled it.

    The collector has a copy of the policy: on a CPU it would share the memory of the one it is
    given, and the update would have nothing to do.
    """
    collector = Collector(
        [partial(charged_env, reference)] * 2,
        copy.deepcopy(agent.actor),
        num_collectors=2,
        sync=True,
        frames_per_batch=32,
        total_frames=96,
        auto_register_policy_transforms=False,
    )
    batches = []
    try:
        for batch in collector:
            batches.append((freeze(agent.actor), batch.clone()))
            train(agent, 0.2)
            collector.update_policy_weights_(agent.actor)
    finally:
        collector.shutdown()
    return batches


@torch.no_grad()
def test_the_kl_of_two_workers_is_the_main_processs_after_each_weight_update() -> None:
    agent = agent_of(make_env(PENDULUM, seed=0), "normal")
    reference = freeze(agent.actor)
    sizes = []
    for actor, batch in collected(agent, reference):
        dist, ref_dist = (model.get_dist(batch.copy()) for model in (actor, reference))
        action, after = batch["action"], batch["next"]
        k1 = (dist.log_prob(action) - ref_dist.log_prob(action)).unsqueeze(-1)
        exact = exact_kl(dist, ref_dist).unsqueeze(-1)
        for key, kl in (("k1", k1), ("exact", exact), ("live", k1)):
            torch.testing.assert_close(after[key], kl, atol=1e-5, rtol=1e-5)
        raw = after["reward_raw"]
        for key, kl in (("reward_k1", k1), ("reward_exact", exact), ("reward", k1)):
            torch.testing.assert_close(after[key], raw - COEF * kl, atol=1e-5, rtol=1e-5)
        sizes.append(float(exact.mean()))
    assert sizes[0] == 0.0
    assert sizes[1] > 0.01
    assert abs(sizes[2] - sizes[1]) > 0.01
