"""The policy loss of both domains: by hand, with a mask and without one, and with padding."""

from dataclasses import fields, replace

import pytest
import torch

from klrl.losses import terms
from klrl.losses.policy import ClipLoss, KLPENLoss, LossTerms, PolicyLoss, Scored
from klrl.runs.metrics import METRICS, Metric
from tests.losses.test_functional import CLIP, KLPEN

BETA, COEF = torch.tensor(0.7, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
ESTIMATORS = (None, "exact", "k1", "k2", "k3")
REDUCTIONS = ("mean", "sum", "token", "response", "sequence")
#: What gradients are taken of.
LEARNED = ("log_prob", "kl_old", "entropy", "value", "exact_ref")
ROWS, STEPS = 3, 5


def loss_of(kind: str, estimator: str | None = None, **settings) -> PolicyLoss:
    """``klpen`` or ``clip`` with an entropy bonus and a clipped smooth critic."""
    settings = {"clip_value": 0.4, **settings}
    if kind == "klpen":
        return KLPENLoss(replace(KLPEN, **settings), estimator)
    return ClipLoss(replace(CLIP, **settings), estimator)


def numbers(*shape: int) -> Scored:
    """Random ones for every entry, float64; no mask."""
    generator = torch.Generator().manual_seed(0)
    drawn = {
        field.name: 0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)
        for field in fields(Scored)
        if field.name != "mask"
    }
    return Scored(**{k: v.requires_grad_(k in LEARNED) for k, v in drawn.items()})


def at(scored: Scored, change, mask: torch.Tensor | None) -> Scored:
    """Every entry changed, with a mask."""
    held = {field.name: getattr(scored, field.name) for field in fields(Scored)}
    changed = {name: change(value) for name, value in held.items() if name != "mask"}
    return Scored(**changed, mask=mask)


def outcome(loss: PolicyLoss, scored: Scored, leaves: Scored) -> list[torch.Tensor]:
    """Total, measures, and the total's gradients with respect to the leaves."""
    found: LossTerms = loss(scored, BETA, COEF)
    inputs = [getattr(leaves, name) for name in LEARNED]
    gradients = torch.autograd.grad(found.total, inputs, materialize_grads=True)
    return [found.total, loss.measure(found.measured, scored.mask), *gradients]


@pytest.mark.parametrize("kind", ["klpen", "clip"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "token", "sequence"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
def test_rows_of_many_lengths_are_their_real_steps(kind, estimator, reduction, normalize) -> None:
    """As frames [B] without a mask; a sequence's loss is the sum over them by the rows."""
    mask = torch.arange(STEPS) < torch.tensor([[5], [3], [1]])
    leaves = numbers(ROWS, STEPS)
    settings = {"reduction": reduction, "normalize_advantage": normalize}
    tokens = at(leaves, lambda value: value.masked_fill(~mask, torch.nan), mask)
    loss = loss_of(kind, estimator, **settings)
    mine = outcome(loss, tokens, leaves)
    if reduction == "sequence":
        settings["reduction"] = "sum"
    other = outcome(
        loss_of(kind, estimator, **settings), at(leaves, lambda v: v[mask], None), leaves
    )
    rows = ROWS if reduction == "sequence" else 1
    other[1] /= torch.tensor([rows if METRICS[name].charged else 1 for name in loss.measures])
    for i, (value, expected) in enumerate(zip(mine, other, strict=True)):
        scaled = expected if i == 1 else expected / rows
        torch.testing.assert_close(value, scaled, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["klpen", "clip"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_padding_holds_reaches_no_gradient(kind, estimator) -> None:
    """The leaves themselves hold it: their gradient there is 0, not NaN."""
    mask = torch.tensor([[True, False], [True, True]])
    held = numbers(2, 2)
    values = {f.name: getattr(held, f.name) for f in fields(Scored) if f.name != "mask"}
    bad = {k: v.detach().masked_fill(~mask, torch.nan) for k, v in values.items()}
    scored = Scored(**{k: v.requires_grad_(k in LEARNED) for k, v in bad.items()}, mask=mask)
    for reduction in REDUCTIONS:
        found = outcome(loss_of(kind, estimator, reduction=reduction), scored, scored)
        assert all(value.isfinite().all() for value in found)
        assert all(float(gradient[0, 1]) == 0 for gradient in found[2:])
        assert float(found[2][0, 0]) != 0


def test_the_total_is_its_weighted_measures() -> None:
    """What is minimised is what the rows tell: objective + critic + entropy + kl_ref."""
    mask = torch.arange(STEPS) < torch.tensor([[5], [3], [1]])
    for kind in ("klpen", "clip"):
        for reduction in REDUCTIONS:
            loss = loss_of(kind, "k3", reduction=reduction, critic_coeff=0.6, entropy_coeff=0.2)
            found = loss(replace(numbers(ROWS, STEPS), mask=mask), BETA, COEF)
            means = dict(zip(loss.measures, loss.measure(found.measured, mask), strict=True))
            parts = loss.weighted(means, float(COEF))
            total = sum(parts[name] for name in loss.measures if METRICS[name].charged)
            torch.testing.assert_close(total, found.total)


def test_a_metric_is_reduced_as_its_declaration_says(monkeypatch) -> None:
    """Charged: a mean over two rows of the sums, 3 and 1. Observed: the mean over four steps."""
    mine = Metric("loss/mine", "mine", "mine", charged=True)
    monkeypatch.setitem(METRICS, mine.name, mine)
    loss = loss_of("clip", None, reduction="sequence")
    mask = torch.arange(STEPS) < torch.tensor([[3], [1]])
    ones = torch.ones(2, STEPS)
    assert loss.measure({"loss/mine": ones, "policy/entropy": ones}, mask).tolist() == [2.0, 1.0]


@pytest.mark.parametrize("masked", [False, True])
def test_equal_advantages_leave_the_kl_as_it_is(masked: bool) -> None:
    """Their spread is 0: nothing to divide the KL by, as a group of equal scores shows."""
    scored = numbers(ROWS, STEPS)
    mask = torch.ones(ROWS, STEPS, dtype=torch.bool) if masked else None
    scored = replace(scored, advantage=torch.ones(ROWS, STEPS, dtype=torch.float64), mask=mask)
    plain = replace(scored, advantage=torch.zeros(ROWS, STEPS, dtype=torch.float64))
    for kind in ("klpen", "clip"):
        found = loss_of(kind, "exact", normalize_advantage=True)(scored, BETA, COEF).total
        expected = loss_of(kind, "exact", normalize_advantage=False)(plain, BETA, COEF).total
        torch.testing.assert_close(found, expected)


def test_reductions_by_hand() -> None:
    value = torch.tensor([[1.0, 2.0, torch.nan], [4.0, torch.inf, torch.nan]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    by_hand = {"mean": 7 / 3, "token": 7 / 3, "sum": 7.0, "response": 11 / 4, "sequence": 7 / 2}
    assert {k: float(f(value, mask)) for k, f in terms.REDUCTIONS.items()} == pytest.approx(by_hand)
    whole = torch.tensor([[1.0, 2.0], [4.0, 5.0]])
    by_hand = {"mean": 3.0, "token": 3.0, "sum": 12.0, "response": 3.0, "sequence": 6.0}
    assert {k: float(f(whole, None)) for k, f in terms.REDUCTIONS.items()} == by_hand


def test_clip_and_klpen_by_hand() -> None:
    """Schulman et al. 2017: eq. 7 clips where it lowers the gain, eq. 8 subtracts beta KL."""
    ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5]])
    advantage = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    kl, zero, beta = torch.tensor([[0.1, 0.2, 0.3, 0.4]]), torch.zeros(1, 4), torch.tensor(2.0)
    scored = Scored(ratio.log(), zero, advantage, kl, zero)
    clipped = loss_of("clip").gain(scored, advantage, beta)
    torch.testing.assert_close(clipped, torch.tensor([[1.2, -1.5, 0.5, -0.8]]))
    gain = loss_of("klpen").gain(scored, advantage, beta)
    torch.testing.assert_close(gain, torch.tensor([[1.3, -1.9, -0.1, -1.3]]))


def test_exact_without_an_exact_kl_is_refused() -> None:
    with pytest.raises(ValueError, match="the exact KL is missing"):
        loss_of("klpen", "exact")(replace(numbers(4), exact_ref=None), BETA, COEF)


@pytest.mark.parametrize("kind", ["klpen", "clip"])
def test_a_term_that_is_not_there_is_recorded_as_zero_not_minus_zero(kind: str) -> None:
    loss = loss_of(kind, entropy_bonus=False)
    weighted = loss.weighted(dict.fromkeys(loss.measures, 0.5), 0.0)
    assert str(weighted["loss/entropy"]) == "0.0"


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_shares_add_up_and_rows_without_positions_have_none(reduction: str) -> None:
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    loss, parts = loss_of("clip", reduction=reduction), torch.eye(3, dtype=torch.bool)
    value = torch.tensor([[1.0, 2.0], [5.0, 5.0], [4.0, 5.0]], dtype=torch.float64)
    reduce = terms.REDUCTIONS[reduction]
    shares = [float(loss.share(rows, mask)) for rows in parts]
    assert shares[1] == 0
    added = sum(
        share * float(reduce(value[rows], mask[rows]))
        for share, rows in zip(shares, parts, strict=True)
    )
    assert added == pytest.approx(float(reduce(value, mask)))
