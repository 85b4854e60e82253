"""Where the KL to the reference is charged, against enumeration of all actions.

Of whole episodes: tests/kl/test_charge.py; of runs: tests/test_one_program.py.
"""

from dataclasses import replace

import pytest
import torch

from klrl.losses.policy import ClipLoss, KLPENLoss
from klrl.losses.terms import reference_kl
from tests.conftest import QUICK
from tests.losses.test_functional import CLIP, KLPEN
from tests.losses.test_policy import numbers
from tests.runs.commands import exits, rows_of

DOUBLE = torch.float64
ACTIONS = 7


def softmax_policies(distance: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of theta (differentiable), of the policy that sampled, and of the reference."""
    generator = torch.Generator().manual_seed(0)
    ref = torch.randn(ACTIONS, generator=generator, dtype=DOUBLE)
    old = ref + distance * torch.randn(ACTIONS, generator=generator, dtype=DOUBLE)
    theta = old + 0.3 * torch.randn(ACTIONS, generator=generator, dtype=DOUBLE)
    return theta.requires_grad_(), old, ref


def exact_gradient(theta: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    log_p, log_q = theta.log_softmax(0), ref.log_softmax(0)
    return torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), theta)[0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("distance", [0.2, 1.0])
def test_the_losss_estimators_have_the_gradient_of_the_kl(estimator: str, distance: float) -> None:
    """In expectation over pi_old, at pi_theta != pi_old; k1 and k3 exactly, k2 through w."""
    theta, old, ref = softmax_policies(distance)
    old_log_p = old.log_softmax(0)
    per_action = reference_kl(estimator, theta.log_softmax(0), old_log_p, ref.log_softmax(0))
    gradient = torch.autograd.grad((old_log_p.exp() * per_action).sum(), theta)[0]
    torch.testing.assert_close(gradient, exact_gradient(theta, ref), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
@pytest.mark.parametrize("kind", [ClipLoss, KLPENLoss])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_scaling_the_advantage_scales_all_of_the_loss(kind, estimator: str, masked: bool) -> None:
    """kl.coef is reward per nat: what multiplies the rewards multiplies the KL beside them.

    From advantages of mean 0 that were estimated from rewards times s, and divided by their spread
    s * std, the gradient is that of the rewards as they are, divided by std.
    """
    config = replace(KLPEN if kind is KLPENLoss else CLIP, entropy_bonus=False, critic_coeff=0.0)
    scale, coef, zero = 0.1, torch.tensor(0.4, dtype=DOUBLE), torch.zeros((), dtype=DOUBLE)
    plain = numbers(3, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    mask = mask if masked else torch.ones_like(mask)
    real = plain.advantage.detach()[mask]
    std, mean = torch.std_mean(real)
    plain = replace(plain, advantage=plain.advantage.detach() - mean, mask=mask if masked else None)

    def gradients(normalize: bool, factor: float, reward_scale: float) -> list[torch.Tensor]:
        settings = replace(config, normalize_advantage=normalize)
        loss = kind(settings, estimator, reward_scale=reward_scale)
        scored = replace(plain, advantage=factor * plain.advantage)
        total = loss(scored, zero, coef).total
        leaves = [plain.log_prob, plain.exact_ref]
        return list(torch.autograd.grad(total, leaves, materialize_grads=True))

    unscaled = gradients(normalize=False, factor=1.0, reward_scale=1.0)
    assert sum(float(g.abs().sum()) for g in unscaled) > 0.1
    scaled = gradients(normalize=False, factor=scale, reward_scale=scale)
    for one, other in zip(scaled, unscaled, strict=True):
        torch.testing.assert_close(one, scale * other, rtol=1e-12, atol=1e-15)
    normalized = gradients(normalize=True, factor=scale, reward_scale=scale)
    for one, other in zip(normalized, unscaled, strict=True):
        torch.testing.assert_close(one, other / std, rtol=1e-12, atol=1e-15)


@pytest.mark.integration
def test_a_split_kl_charged_at_every_step_is_in_reward_and_loss(tmp_path) -> None:
    words = ("kl.placement=split", "kl.estimator=exact", "kl.apply=step", "kl.coef=0.5")
    exits(*QUICK, *words, "optim.lr=0.01", "frames=192", "hydra.run.dir=run")
    rows = rows_of(tmp_path / "run")
    for row in rows:
        expected = 0.5 * row["kl/ref/exact"]
        assert row["kl/ref/penalty"] == pytest.approx(expected, abs=1e-6)
        assert row["reward/shaped"] == pytest.approx(row["reward/raw"] - expected, abs=1e-6)
    assert rows[-1]["kl/ref/exact"] > 1e-4
    assert rows[-1]["loss/kl_ref"] > 0
