"""Group advantages and token-level GAE against plain Python."""

import statistics

import pytest
import torch

from klrl.kl.charge import to_go as to_go_sum
from klrl.language.data.batch import response_mask
from klrl.language.model.causal_lm import ValueHead
from klrl.language.run.advantage import (
    group_advantage,
    group_centred,
    group_normalized,
    leave_one_out,
    token_gae,
)
from klrl.language.run.scoring import ScoringLayout
from tests.language.toys import FAMILIES, GROUP, network, rollout, rows

SCORES = [1.0, 0.0, 0.5, 2.0, 2.0, -1.0]
#: The baseline -> a score among those of its group, in plain Python.
BY_HAND = {
    group_normalized: lambda s, g: (s - statistics.mean(g)) / statistics.stdev(g),
    group_centred: lambda s, g: s - statistics.mean(g),
    leave_one_out: lambda s, g: s - (sum(g) - s) / 2,
}
baselines = pytest.mark.parametrize("baseline", BY_HAND)


@baselines
def test_a_group_is_compared_by_hand(baseline) -> None:
    expected = [BY_HAND[baseline](s, g) for g in (SCORES[:3], SCORES[3:]) for s in g]
    torch.testing.assert_close(baseline(torch.tensor(SCORES), 3), torch.tensor(expected))


@baselines
@pytest.mark.parametrize("score", [0.0, 0.1, 1e8, 1e-12, -3.3])
def test_groups_without_spread_give_zero(baseline, score) -> None:
    found = baseline(torch.full((14,), score), 7)
    bound = 0 if baseline is group_normalized else 1e-6 * abs(score)
    assert found.abs().max() <= bound


def test_small_spreads_are_still_normalised() -> None:
    """1.000 and 1.001 differ on purpose; 1e-7 apart is rounding."""
    assert group_normalized(torch.tensor([1.0, 1.001]), 2).abs().min() > 0.5


def test_the_kl_enters_after_the_normalisation() -> None:
    score, kl = torch.tensor([4.0, 0.0]), torch.tensor([[0.1, 0.2, 9.0], [0.4, 9.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    root = 2**-0.5
    for placement, expected in (
        ("reward", [[root - 0.15, root - 0.1, 0], [-root - 0.2, 0, 0]]),
        ("split", [[root - 0.1, root, 0], [-root, 0, 0]]),
        ("loss", [[root, root, 0], [-root, 0, 0]]),
    ):
        to_go = to_go_sum(kl, mask, placement)
        found = group_advantage(score, 2, "normalized", to_go, mask, 0.5)
        torch.testing.assert_close(found, torch.tensor(expected).unsqueeze(-1))


def test_shaped_is_the_advantage_of_the_shaped_score_over_the_spread() -> None:
    """Scores 4, 0 and 1, 1: spreads sqrt(8) and none, whose KL is charged as it stands."""
    score, kl = torch.tensor([4.0, 0.0, 1.0, 1.0]), torch.tensor([[0.1], [0.4], [0.2], [0.6]])
    mask = torch.ones(4, 1, dtype=torch.bool)
    found = group_advantage(score, 2, "normalized_shaped", kl, mask, 0.5)
    first, second = (2 - 0.05) / 8**0.5, (-2 - 0.2) / 8**0.5
    torch.testing.assert_close(found.flatten(), torch.tensor([first, second, -0.1, -0.3]))


def plain_gae(reward, value, gamma, lmbda):
    """One sequence, backwards, in plain Python (Schulman et al. 2016, eq. 16)."""
    advantage, after, out = 0.0, 0.0, []
    for r, v in zip(reversed(reward), reversed(value), strict=True):
        delta = r + gamma * after - v
        advantage = delta + gamma * lmbda * advantage
        after = v
        out.append(advantage)
    return out[::-1]


@pytest.mark.parametrize(("gamma", "lmbda"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (1.0, 0.0)])
def test_gae_by_hand(gamma, lmbda) -> None:
    mask = torch.arange(7) < torch.tensor([7, 1, 4, 6])[:, None]
    reward = torch.randn(4, 7).masked_fill(~mask, torch.nan)
    value = torch.randn(4, 7).masked_fill(~mask, torch.nan)
    advantage, target = token_gae(reward.unsqueeze(-1), value, mask, gamma, lmbda)
    assert advantage.shape == target.shape == (4, 7, 1)
    for row, n in enumerate(mask.sum(1).tolist()):
        expected = plain_gae(reward[row, :n].tolist(), value[row, :n].tolist(), gamma, lmbda)
        torch.testing.assert_close(advantage[row, :n, 0], torch.tensor(expected))
        torch.testing.assert_close(target[row, :n, 0], torch.tensor(expected) + value[row, :n])
        assert not advantage[row, n:].any()
        assert not target[row, n:].any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [False, True], ids=["packed", "shared"])
def test_the_value_is_that_of_the_prefix(family, shared) -> None:
    """w . h + b of the last hidden state of prompt and tokens before t, by plain transformers."""
    model, batch = network(family), rollout(pads=2)
    critic = ValueHead(model)
    states = ScoringLayout(GROUP, shared, "").states(model, batch)
    mask = response_mask(batch)
    assert not critic(states, mask).any(), "a new critic says 0"
    torch.nn.init.normal_(critic.linear.weight)
    torch.nn.init.normal_(critic.linear.bias)
    value = critic(states, mask)
    assert value.shape == mask.shape
    assert not value[~mask].any()
    for row, (prompt, response) in enumerate(rows(batch)):
        ids = torch.cat([prompt, response])
        hidden = model.base_model(ids[None]).last_hidden_state[0]
        expected = hidden @ critic.linear.weight[0] + critic.linear.bias
        n = len(response)
        torch.testing.assert_close(
            value[row, :n], expected[len(prompt) - 1 : -1], atol=2e-5, rtol=1e-5
        )


@pytest.mark.parametrize("detach", [False, True])
def test_the_critics_gradient_reaches_the_network_unless_detached(detach) -> None:
    model, batch = network(), rollout()
    critic = ValueHead(model, detach=detach)
    torch.nn.init.normal_(critic.linear.weight)
    states = ScoringLayout(GROUP, True, "").states(model, batch)
    critic(states, response_mask(batch)).square().sum().backward()
    assert critic.linear.weight.grad.abs().sum() > 0
    assert (model.model.layers[0].mlp.up_proj.weight.grad is None) == detach


def test_what_stands_at_padding_reaches_no_gradient() -> None:
    """d/dw of the squared values over the real tokens, by hand; at padding a state may be NaN."""
    mask = torch.arange(4) < torch.tensor([4, 1, 2])[:, None]
    critic = ValueHead(network()).double()
    torch.nn.init.normal_(critic.linear.weight)
    width = critic.linear.in_features
    states = torch.randn(3, 4, width, dtype=torch.float64).masked_fill(~mask[..., None], torch.nan)
    states.requires_grad_()
    critic(states, mask).square().sum().backward()
    real = states.detach()[mask]
    slope = 2 * (real @ critic.linear.weight.detach()[0])
    torch.testing.assert_close(critic.linear.weight.grad[0], slope @ real)
    torch.testing.assert_close(critic.linear.bias.grad[0], slope.sum())
    assert not states.grad[~mask].any()
