"""The objectives that have names, against the formulas of their papers in plain Python."""

import statistics

import pytest
import torch

from klrl.config import LANGUAGE, factory
from klrl.config.compose import job_config
from klrl.language.run.advantage import group_advantage
from klrl.losses.policy import Scored

GROUP, LENGTHS, SCORES = 4, (3, 1, 5, 2, 4, 4, 2, 1), (1.0, 0.0, 0.5, 2.0, 0.3, 0.3, -1.0, 0.8)
#: No EOS within the budget.
CUT = (2, 5)
LONGEST, LOW, HIGH = max(LENGTHS), 0.2, 0.28


def tokens() -> tuple[torch.Tensor, ...]:
    """Log-probs of pi_theta (learned) and pi_old, [B, R], and the mask."""
    rng = torch.Generator().manual_seed(0)
    new, old = (
        -torch.rand(len(LENGTHS), LONGEST, generator=rng, dtype=torch.float64) - 0.5
        for _ in range(2)
    )
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
    return new.requires_grad_(), old, mask


def clipped(ratio: torch.Tensor, advantage: float, high: float = LOW) -> torch.Tensor:
    """Of one token: min(w A, clip(w, 1 - low, 1 + high) A)."""
    bounded = ratio.clamp(1 - LOW, 1 + high)
    return torch.minimum(ratio * advantage, bounded * advantage)


def of_group(row: int) -> list[float]:
    first = row // GROUP * GROUP
    return list(SCORES[first : first + GROUP])


def normalized(row: int) -> float:
    scores = of_group(row)
    return (SCORES[row] - statistics.mean(scores)) / statistics.stdev(scores)


def grpo(new, old) -> torch.Tensor:
    """Shao et al. 2024, eq. 3 without its KL: 1/G sum_i 1/|o_i| sum_t clipped.

    The paper's k3 has not the KL's gradient; klrl's, weighted with the ratio, has.
    """
    rows = []
    for i, length in enumerate(LENGTHS):
        ratio = (new[i] - old[i]).exp()
        rows.append(sum(clipped(ratio[t], normalized(i)) for t in range(length)) / length)
    return -sum(rows) / len(rows)


def dr_grpo(new, old) -> torch.Tensor:
    """Liu et al. 2025, fig. 1: 1/G sum_i sum_t clipped, with A = R - mean(R)."""
    total = 0.0
    for i, length in enumerate(LENGTHS):
        ratio = (new[i] - old[i]).exp()
        advantage = SCORES[i] - statistics.mean(of_group(i))
        total = total + sum(clipped(ratio[t], advantage) for t in range(length))
    return -total / len(LENGTHS)


def dapo(new, old) -> torch.Tensor:
    """Yu et al. 2025, eq. 8 to 10: 1 / sum |o_i| sum_i sum_t clipped; cut responses left out."""
    total, count = 0.0, 0
    for i, length in enumerate(LENGTHS):
        if i not in CUT:
            ratio = (new[i] - old[i]).exp()
            total = total + sum(clipped(ratio[t], normalized(i), HIGH) for t in range(length))
            count += length
    return -total / count


def rloo(new, old) -> torch.Tensor:
    """Ahmadian et al. 2024, eq. 8: 1/k sum_i (R_i - mean of the others' R) grad log pi(y_i).

    Of a policy that sampled by itself: there is no ratio in it. The KL of the paper's R, baselined
    as the score is, has expectation 0 beside klrl's KL to go, and is left out here.
    """
    total = 0.0
    for i, length in enumerate(LENGTHS):
        others = [s for j, s in enumerate(of_group(i)) if j != i % GROUP]
        total = total + (SCORES[i] - statistics.mean(others)) * new[i, :length].sum()
    return -total / len(LENGTHS)


@pytest.mark.parametrize("formula", [grpo, dr_grpo, dapo, rloo])
def test_an_objective_is_its_papers(formula) -> None:
    name = formula.__name__
    config = job_config([f"loss={name}", f"advantage={name}", "experiment=sort_digits"])
    new, old, mask = tokens()
    if formula is rloo:
        new = old.clone().requires_grad_()
    expected = formula(new, old)
    (gradient,) = torch.autograd.grad(expected, new)

    zero = torch.zeros_like(old)
    scores = torch.tensor(SCORES, dtype=torch.float64)
    advantage = group_advantage(scores, GROUP, config.advantage.baseline, zero, mask, 0.0)
    cut = torch.zeros_like(mask)
    cut[list(CUT)] = config.loss.mask_truncated
    scored = Scored(new, old, advantage.squeeze(-1), zero, zero, mask=mask & ~cut)
    loss = factory("loss", config.loss, LANGUAGE)(config.loss)
    found = loss(scored, torch.tensor(0.0), torch.tensor(0.0)).total
    if formula is not rloo:
        torch.testing.assert_close(found, expected)
    (mine,) = torch.autograd.grad(found, new)
    torch.testing.assert_close(mine, gradient)
