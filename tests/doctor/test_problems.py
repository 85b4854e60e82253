"""The enumerated problems: against recursions over states, and finite differences of them."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.autograd import grad

from klrl.doctor.aims import Aim
from klrl.doctor.problems import DOUBLE, KINDS, Kind, Problem

kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def tables(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of policy and reference, and rewards, [states, actions]."""
    eye = torch.eye(problem.kind.states, dtype=DOUBLE)
    p, q = (network(eye).softmax(-1).detach() for network in (problem.policy, problem.ref))
    return p, q, problem._rewards


def recursion(kind: Kind, p: Tensor, q: Tensor, rewards: Tensor) -> tuple[float, float]:
    """E[return] and KL(pi||ref) of an episode, backwards over states."""

    def after(step: int, state: int) -> tuple[float, float]:
        gain = kl = 0.0
        for action in range(kind.actions):
            chance = float(p[state, action])
            last = step + 1 == kind.steps or (kind.ends and action == 0)
            later = (
                (0.0, 0.0) if last else after(step + 1, kind.starts + step * kind.actions + action)
            )
            own = float(rewards[state, action]) if last or not kind.ends else 0.0
            gain += chance * (own + later[0])
            kl += chance * (float((p[state, action] / q[state, action]).log()) + later[1])
        return gain, kl

    values = [after(0, start) for start in range(kind.starts)]
    return tuple(sum(x) / kind.starts for x in zip(*values, strict=True))  # type: ignore[return-value]


@kinds
def test_every_episode_stands_as_often_as_it_is_probable(kind: Kind) -> None:
    problem = Problem(kind, seed=5)
    p, _, _ = tables(problem)
    every = problem.everything
    rows = torch.cat([every.states[:, :1], every.actions], 1).tolist()
    for (start, *actions), count in Counter(map(tuple, rows)).items():
        state, chance = start, 1.0 / kind.starts
        for step, action in enumerate(actions):
            chance *= float(p[state, action])
            state = kind.starts + step * kind.actions + action
            if kind.ends and action == 0:
                assert actions[step:] == [0] * (kind.steps - step)
                break
        assert count / len(rows) == pytest.approx(chance, rel=1e-12)


@kinds
@pytest.mark.parametrize("stale", [0, 4])
def test_true_gradients_are_finite_differences_of_a_recursion(kind: Kind, stale: int) -> None:
    """At pi, which has moved from what sampled by .25 in each logit and update."""
    problem = Problem(kind, seed=7, stale=stale)
    kl = Aim("reverse", "sequence", "whole").value(problem)
    values = problem.expected_return(), kl
    gradients = [grad(value, problem.policy.weight)[0] for value in values]
    p, q, rewards = tables(problem)
    logits, width = p.log(), 1e-5
    assert kl.item() == pytest.approx(recursion(kind, p, q, rewards)[1], rel=1e-12)
    for state in range(kind.states):
        for action in range(kind.actions):
            ends = []
            for sign in (1, -1):
                moved = logits.clone()
                moved[state, action] += sign * width
                ends.append(recursion(kind, moved.softmax(-1), q, rewards))
            for gradient, high, low in zip(gradients, *ends, strict=True):
                assert float(gradient[state, action]) == pytest.approx(
                    (high - low) / (2 * width), abs=1e-9
                )


@kinds
@pytest.mark.parametrize("placement", ["loss", "split", "reward"])
def test_rewards_and_advantages_are_charged_as_the_placement_says(kind: Kind, placement) -> None:
    problem, coef = Problem(kind, seed=3), 0.7
    p, q, table = tables(problem)
    every = problem.everything
    numbers = problem.numbers(every, coef, placement)
    exact, k1 = (p * (p / q).log()).sum(-1), (p / q).log()
    by_state: dict[int, list[tuple[float, float]]] = {}
    for row in range(0, len(every.mask), 7):
        length = int(every.mask[row].sum())
        steps = [(int(every.states[row, t]), int(every.actions[row, t])) for t in range(length)]
        raw = [float(table[s]) if not kind.ends or s is steps[-1] else 0.0 for s in steps]
        kl = [float(exact[s] if placement == "split" else k1[s, a]) for s, a in steps]
        charge = [0.0 if placement == "loss" else coef * x for x in kl]
        assert numbers.rewards[row, :length].tolist() == pytest.approx(
            [r - c for r, c in zip(raw, charge, strict=True)], abs=1e-12
        )
        assert numbers.rewards[row, length:].eq(0).all()
        for t, (state, _) in enumerate(steps):
            own = t if placement == "reward" else t + 1  # split: the own step stands in the loss
            gain = sum(raw[t:]) - sum(charge[own:])
            by_state.setdefault(state, []).append((gain, float(numbers.advantages[row, t])))
    for pairs in by_state.values():  # one baseline per state
        baselines = [gain - advantage for gain, advantage in pairs]
        assert max(baselines) - min(baselines) < 1e-12
    for state in range(kind.states):
        here = (every.states == state) & every.mask
        if here.any():
            assert float(numbers.advantages[here].mean()) == pytest.approx(0.0, abs=1e-12)


@kinds
def test_pi_moves_away_from_the_policy_that_samples(kind: Kind) -> None:
    here, moved = Problem(kind, seed=5), Problem(kind, seed=5, stale=4)
    assert torch.equal(here.everything.actions, moved.everything.actions)
    numbers = moved.numbers(moved.everything, 0.5)
    old = here.numbers(here.everything, 0.5)
    assert torch.allclose(numbers.old_log_probs, old.log_probs, atol=1e-12)
    assert torch.equal(old.log_probs, old.old_log_probs)  # to the bit: a ratio of 1
    spread = (numbers.log_probs - numbers.old_log_probs)[numbers.mask].std()
    assert 0.2 < spread < 0.8  # sqrt(4) * .25, but for what normalising takes


def test_other_padding_changes_padding_alone_and_cuts_its_gradient() -> None:
    problem = Problem(KINDS[-1], seed=1)
    numbers = problem.numbers(problem.everything, 0.5)
    other = numbers.other_padding()
    mask = numbers.mask
    for name in ("log_probs", "ref_log_probs", "old_log_probs", "advantages", "logits"):
        a, b = getattr(numbers, name), getattr(other, name)
        assert torch.equal(a[mask], b[mask])
        assert not torch.isclose(a[~mask], b[~mask]).all()
    assert other.log_probs[~mask].sum().requires_grad
    (gradient,) = grad(other.log_probs[~mask].sum(), problem.policy.weight)
    assert gradient.eq(0).all()
