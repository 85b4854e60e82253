"""Networks from specs, and the observation normaliser against numpy."""

import numpy as np
import pytest
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

from klrl.control.policy.networks import ObservationNormalizer, can_be_paired
from klrl.control.run.step import eager_step
from klrl.kl import exact_kl, freeze
from tests.agents import agent_of, gym, make_env
from tests.control.updates import made, minibatch


def agent_for(env_id: str, distribution: str, **how: object):
    env = make_env(gym(env_id), seed=0)
    return agent_of(env, distribution, (16, 16), **how), env


CASES = [
    ("Pendulum-v1", "mlp", "normal"),
    ("CartPole-v1", "mlp", "categorical"),
    ("HalfCheetah-v5", "tanh_normal", "tanh_normal"),
    ("Acrobot-v1", "categorical", "categorical"),
]


@pytest.mark.parametrize(("env_id", "distribution", "family"), CASES)
def test_the_actor_agrees_with_its_own_distribution(env_id, distribution, family) -> None:
    """What the batch holds is what TorchRL's distribution says of it, and the family too."""
    agent, env = agent_for(env_id, distribution)
    assert agent.family.name == family
    batch = env.rollout(20, agent.actor, break_when_any_done=False)
    theirs = agent.actor.get_dist(batch.copy()).log_prob(batch["action"])
    torch.testing.assert_close(batch["action_log_prob"], theirs, atol=2e-4, rtol=1e-4)
    params = {key: batch[key] for key in agent.family.param_keys}
    ours = agent.family.log_prob(params, batch[agent.family.sample_key])
    torch.testing.assert_close(batch["action_log_prob"], ours)
    other = {key: value + 0.1 for key, value in params.items()}
    dists = [agent.family.distribution(**p) for p in (params, other)]
    torch.testing.assert_close(agent.family.kl(params, other), exact_kl(*dists))


def test_tanh_actions_stay_inside_the_bounds_and_deterministic_ones_are_the_median() -> None:
    agent, env = agent_for("Pendulum-v1", "tanh_normal", init_std=3.0)
    batch = env.rollout(100, agent.actor, break_when_any_done=False)
    assert batch["action"].abs().max() <= 2.0
    assert batch["action"].abs().max() > 1.9
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        still = agent.actor(env.reset())
    torch.testing.assert_close(still["action"], 2.0 * still["loc"].tanh())


def test_the_reference_scores_the_pre_tanh_sample_of_a_saturated_action() -> None:
    """log pi - log pi_ref of one sample is that of the Gaussians, however saturated the action."""
    agent, env = agent_for("Pendulum-v1", "tanh_normal", init_std=8.0)
    reference = freeze(agent.actor)
    agent.policy_net.head.bias.data += 9.0
    batch = env.rollout(50, agent.actor, break_when_any_done=False)
    u, scale = batch["pre_tanh"], batch["scale"]
    ref = reference.get_dist_params(batch.select("observation"))
    gaussians = [torch.distributions.Normal(loc, scale) for loc in (batch["loc"], ref["loc"])]
    by_hand = (gaussians[0].log_prob(u) - gaussians[1].log_prob(u)).squeeze(-1)
    ours = batch["action_log_prob"] - reference.log_prob(batch.copy())
    torch.testing.assert_close(ours, by_hand, atol=1e-4, rtol=1e-4)


def test_first_policies_are_flat_and_orthogonal() -> None:
    agent, env = agent_for("Pendulum-v1", "normal", init_std=0.5)
    out = agent.actor(env.reset())
    assert out["loc"].abs().max() < 0.05
    torch.testing.assert_close(out["scale"], torch.full_like(out["scale"], 0.5))
    weight = agent.policy_net.trunk[2].weight
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(16), atol=1e-5, rtol=0)


def test_a_shared_trunk_is_one_and_separate_losses_keep_the_critic_out_of_it() -> None:
    for separate in (False, True):
        agent, env = agent_for("Pendulum-v1", "normal", share=True, separate=separate)
        agent.critic(env.reset())["state_value"].sum().backward()
        trunk_learned = agent.policy_net.trunk[0].weight.grad is not None
        assert trunk_learned is not separate
        assert agent.value_net.head.weight.grad is not None


def test_normalizer_is_numpys_mean_and_std_over_all_rollouts() -> None:
    rng = np.random.default_rng(0)
    rollouts = [rng.normal([3.0, -500.0], [0.1, 40.0], (4, 25, 2)) for _ in range(5)]
    normalizer = ObservationNormalizer(2)
    probe = torch.tensor([[3.05, -480.0]])
    torch.testing.assert_close(normalizer(torch.tensor([[3.0, -5.0]])), torch.tensor([[3.0, -5.0]]))
    for rollout in rollouts:
        normalizer.update(torch.as_tensor(rollout, dtype=torch.float32))
    seen = np.concatenate([r.reshape(-1, 2) for r in rollouts]).astype(np.float32)
    expected = (probe.numpy() - seen.mean(0, dtype=np.float64)) / seen.std(0, dtype=np.float64)
    np.testing.assert_allclose(normalizer(probe), expected, rtol=1e-5)


def test_a_constant_is_normalised_by_1_and_anything_else_as_before() -> None:
    """A constant up to float32's rounding; a change of .001 in use is then .001."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(3, 200))
    columns = {
        "0": (0 * noise, 1.0),
        "0.1": (0 * noise + 0.1, 1.0),
        "its last bit": (
            np.where(noise > 0, np.float32(0.7), np.nextafter(np.float32(0.7), 1)),
            1.0,
        ),
        "a simulator's rounding of 0": (1e-17 * noise, 1.0),
        "the last bit of a large number": (1e9 + 64.0 * (noise > 0), 32.0),
        "little, but something": (1e-5 * noise, 1e-4),
        "tiny, but more than rounding": (5e-8 * noise, 1e-4),
        "little of 3": (3 + 2e-6 * noise, 1e-4),
        "plain": (5 + 0.3 * noise, 0.3),
    }
    rollouts = np.stack([x for x, _ in columns.values()], -1).astype(np.float32)
    normalizer = ObservationNormalizer(len(columns))
    for rollout in rollouts:
        normalizer.update(torch.as_tensor(rollout))
    expected = torch.tensor([std for _, std in columns.values()])
    torch.testing.assert_close(normalizer.std, expected, rtol=0.1, atol=0)
    seen = torch.zeros(len(columns))
    seen[1] = 0.101
    assert float(normalizer(seen)[1]) == pytest.approx(0.001, rel=1e-3)


def test_an_observation_of_no_numbers_is_normalised() -> None:
    """Gymnasium has such a Box, for a bandit without context."""
    normalizer = ObservationNormalizer(0)
    normalizer.update(torch.empty(2, 3, 0))
    assert normalizer(torch.empty(2, 0)).shape == (2, 0)


def test_a_frozen_copy_keeps_its_own_normalizer() -> None:
    agent, env = agent_for("Pendulum-v1", "normal")
    reference = freeze(agent.actor)
    observation = env.reset()
    before = reference(observation.clone())["loc"]
    agent.normalizer.update(torch.randn(100, 3) * 5 + 7)
    with torch.no_grad():
        for parameter in agent.actor.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(reference(observation.clone())["loc"], before)
    assert (agent.actor(observation.clone())["loc"] - before).abs().min() > 0.1
    assert not any(p.requires_grad for p in reference.parameters())


@pytest.mark.parametrize("width", [8, 300])
def test_a_pair_steps_as_two_networks_do_to_the_bit(settings, width: int, monkeypatch) -> None:
    """Trunks of 256 or more are not paired, which is faster and changes no bit."""
    flat = []
    for wide in (0, 1000):
        monkeypatch.setattr("klrl.control.policy.networks.WIDE", wide)
        experiment, batch = made(settings, f"actor.hidden=[{width},{width}]")
        problem, example = minibatch(experiment, batch)
        assert can_be_paired(problem.agent.networks) == (wide > width)
        step = eager_step(problem)
        for _ in range(3):
            step(*example)
        flat.append(example[0].clone())
    assert torch.equal(*flat)
    monkeypatch.undo()
    assert can_be_paired(problem.agent.networks) == (width < 256)
