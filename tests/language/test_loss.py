"""KL and reward per token, and placements: by hand with plain transformers."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from klrl.config.placement import check_placement
from klrl.kl.charge import ReferenceKL, on_last, sampled_kl
from klrl.kl.charge import to_go as to_go_sum
from klrl.language.data.batch import on_response, response_mask, take_prompts
from klrl.language.model.vocabulary import Against, token_measures
from klrl.language.run.scoring import ScoringLayout
from tests.language.toys import EOS, FAMILIES, GROUP, network, rollout, truth

COEF = 0.3
ESTIMATORS = ("k1", "k2", "k3", "exact")
FORMULAS = {
    "k1": lambda r: r,
    "k2": lambda r: r * r / 2,
    "k3": lambda r: (-r).exp() - 1 + r,
}
SCORES = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0, 1.0, 0.25, 0.5, 0.75])


def by_hand(model, reference, batch, estimator, temperature):
    """KL per token of every row [n_i], from one plain forward per row and model."""
    rows = []
    tables = [truth(m, batch, temperature) for m in (model, reference)]
    for row, (p, q) in enumerate(zip(*tables, strict=True)):
        tokens = batch["tokens", "response"][row, : len(p)]
        if estimator == "exact":
            rows.append((p.exp() * (p - q)).sum(-1))
        else:
            r = (p - q).gather(-1, tokens[:, None]).squeeze(-1)
            rows.append(FORMULAS[estimator](r))
    return rows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("shared", [False, True], ids=["packed", "shared"])
@pytest.mark.parametrize("placement", ["reward", "loss", "split"])
def test_kl_and_shaped_reward_are_those_by_hand(family, estimator, shared, placement) -> None:
    """Pad == eos, truncated responses, temperature .7, padding on both sides."""
    model, reference = network(family), network(family, seed=1)
    batch = rollout(pads=3, tail=2, pad=EOS)
    mask, layout = response_mask(batch), ScoringLayout(GROUP, shared, "")
    pair = [layout.next_tokens(m, batch, 0.7) for m in (model, reference)]
    log_prob, [(ref, exact)] = token_measures(
        pair[0], batch["tokens", "response"], mask, [Against(pair[1])]
    )
    kl = sampled_kl(estimator, log_prob, ref, exact["reverse"], mask)
    reward = ReferenceKL(COEF, estimator, placement).shaped(on_last(SCORES, mask), kl)
    to_go = to_go_sum(kl, mask, placement)
    assert reward.shape == (9, 8)
    for row, expected in enumerate(by_hand(model, reference, batch, estimator, 0.7)):
        n = len(expected)
        close = {"atol": 1e-5, "rtol": 2e-6}
        torch.testing.assert_close(kl[row, :n].double(), expected, **close)
        shaped = torch.zeros(n, dtype=torch.float64)
        shaped[-1] = SCORES[row]
        if placement != "loss":
            shaped = shaped - COEF * expected
        torch.testing.assert_close(reward[row, :n].double(), shaped, **close)
        assert not reward[row, n:].any()
        first = {"reward": 0, "split": 1, "loss": n}[placement]
        left = [expected[t + first :].sum() for t in range(n)]
        torch.testing.assert_close(to_go[row, :n].double(), torch.stack(left), **close)
        assert not to_go[row, n:].any()


@pytest.mark.parametrize("shared", [False, True], ids=["packed", "shared"])
def test_mean_kl_is_invariant_to_padding_split_and_order(shared) -> None:
    model, reference = network().double(), network(seed=1).double()
    layout = ScoringLayout(GROUP, shared, "")

    def mean(batches):
        kl, masks = [], []
        for batch in batches:
            mask = response_mask(batch)
            pair = [layout.next_tokens(m, batch, 0.7) for m in (model, reference)]
            log_prob, [(ref, exact)] = token_measures(
                pair[0], batch["tokens", "response"], mask, [Against(pair[1])]
            )
            kl.append(sampled_kl("k3", log_prob, ref, exact["reverse"], mask)[mask])
            masks.append(mask.sum())
        return float(torch.cat(kl).detach().sum() / sum(masks))

    one, padded = rollout(), rollout(pads=8, tail=7)
    split = [take_prompts(one, torch.tensor(i), GROUP) for i in ([1], [2, 0])]
    value = mean([one])
    assert value > 0.1
    assert mean([padded]) == pytest.approx(value, abs=1e-6)
    assert mean(split) == pytest.approx(value, abs=1e-6)
    assert mean([one.flip(0)]) == pytest.approx(value, abs=1e-6)


# ---------------------------------------------------------------------------- terms and units


def test_what_padding_holds_reaches_nothing() -> None:
    mask = torch.tensor([[True, False]])
    log_prob = torch.tensor([[-1.0, torch.nan]], requires_grad=True)
    bad = torch.tensor([[-2.0, torch.inf]])
    kl = [sampled_kl(e, log_prob, bad, bad, mask) for e in ESTIMATORS]
    torch.stack(kl).sum().backward()
    assert all(term[0, 1] == 0 for term in kl)
    assert log_prob.grad.isfinite().all()
    assert log_prob.grad[0, 0] != 0
    assert log_prob.grad[0, 1] == 0


@pytest.mark.parametrize(
    ("placement", "estimator", "words"),
    [
        ("reward", "k3", "gradient is wrong"),
        ("split", "k1", "needs the exact KL"),
    ],
)
def test_wrong_pairs_are_refused(placement, estimator, words) -> None:
    with pytest.raises(ValueError, match=words):
        check_placement(placement, estimator)


def test_exact_without_an_exact_kl_is_refused() -> None:
    zero, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="the exact KL is missing"):
        sampled_kl("exact", zero, zero, None, mask)


def test_the_shaped_reward_agrees_with_the_transform_family() -> None:
    """The same batch through klrl.kl's KLComputation, which serves TorchRL's own stack."""
    from klrl.kl import KLComputation

    model, reference, batch = network(), network(seed=1), rollout(pads=2, tail=1)
    mask, layout = response_mask(batch), ScoringLayout(GROUP, True, "")
    pair = [layout.next_tokens(m, batch, 1.0) for m in (model, reference)]
    log_prob, [(ref, _)] = token_measures(
        pair[0], batch["tokens", "response"], mask, [Against(pair[1])]
    )
    width = batch["tokens", "prompt"].shape[1]
    full = [torch.nn.functional.pad(x.detach(), (width, 0)) for x in (log_prob, ref)]
    batch["next"] = TensorDict(
        {
            "log_probs": {"full": full[0]},
            "ref_log_probs": {"full": full[1]},
            "reward": SCORES[:, None],
        },
        [9],
    )
    out = KLComputation(
        gen_log_probs_full_key=("log_probs", "full"),
        ref_log_probs_full_key=("ref_log_probs", "full"),
        coeff=COEF,
    )(batch)
    kl = sampled_kl("k1", log_prob, ref, mask=mask)
    mine = ReferenceKL(COEF, "k1", "reward").shaped(on_last(SCORES, mask), kl)
    torch.testing.assert_close(out["next", "reward"][:, width:, 0], mine.detach())
    assert not on_response(batch, ("next", "log_probs", "full"))[~mask].any()
