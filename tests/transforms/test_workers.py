"""KL transforms inside the workers of a batched environment.

Whatever fails, the workers are closed: Python waits for them at its end, so a failure would show
as a suite that hangs.
"""

from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv

from tests.agents import agent_of, apart, gym, make_env
from tests.transforms.toys import charge

#: Forked workers start in a moment; spawned ones import torch first.
Workers = partial(ParallelEnv, 2, mp_start_method="fork")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:no .*log_prob.* for some actions:UserWarning"),
]


def policies(family: str = "normal") -> tuple[nn.Module, nn.Module]:
    """(a policy, its reference), the same each time."""
    torch.manual_seed(0)
    return apart(agent_of(make_env(gym("Pendulum-v1", 1), seed=0), family).actor)


def worker(name: str, family: str = "normal", shared: nn.Module | None = None) -> EnvBase:
    """An environment whose own transform charges the KL."""
    actor, reference = policies(family)
    transform = charge(name, actor if shared is None else shared, reference)
    return make_env(gym("Pendulum-v1", 1), seed=3, transforms=(transform,))


def check(env: EnvBase, family: str = "normal") -> None:
    """The KL is that of the actions in the batch."""
    actor, reference = policies(family)
    with closing(env), torch.no_grad():
        batch = env.rollout(6, actor, break_when_any_done=False)
        kl = (actor.log_prob(batch.copy()) - reference.log_prob(batch.copy())).unsqueeze(-1)
    torch.testing.assert_close(batch["next", "kl"], kl, atol=1e-5, rtol=1e-5)
    assert kl.abs().min() > 1e-6


@pytest.mark.parametrize("family", ["normal", "tanh_normal"])
def test_retrieval_works_inside_workers(family: str) -> None:
    check(Workers(partial(worker, "parts", family)), family)


@pytest.mark.parametrize("kind", [SerialEnv, partial(ParallelEnv, mp_start_method="fork")])
def test_without_shared_buffers_the_whole_transition_is_sent(kind) -> None:
    check(kind(2, partial(worker, "legacy"), use_buffers=False))


@pytest.mark.parametrize("name", ["legacy", "constrained, exact"])
def test_the_remedy_is_named_where_the_log_prob_was_left_behind(name: str, capfd) -> None:
    actor, _ = policies()
    env = Workers(partial(worker, name))
    with pytest.raises(RuntimeError, match="worker \\d"):
        env.rollout(2, actor)
    told = [line for line in capfd.readouterr().err.splitlines() if "no action_log_prob" in line]
    assert "in a worker of ParallelEnv" in told[0]
    assert "put this transform around the ParallelEnv" in told[0]


def test_a_shared_policy_is_followed_by_retrieval_in_the_workers() -> None:
    actor, reference = policies()
    actor.share_memory()
    kls = []
    with closing(Workers(partial(worker, "parts", shared=actor))) as env:
        for _ in range(2):
            with torch.no_grad():
                batch = env.rollout(4, actor)
                kl = actor.log_prob(batch.copy()) - reference.log_prob(batch.copy())
                for parameter in actor.parameters():
                    parameter.add_(0.2)
            torch.testing.assert_close(batch["next", "kl"].squeeze(-1), kl, atol=1e-5, rtol=1e-5)
            kls.append(float(kl.abs().mean()))
    assert kls[1] > 1.5 * kls[0]
