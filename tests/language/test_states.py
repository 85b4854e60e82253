"""``kl.exact``: when KLs are sums over the vocabulary, and whose hidden states a rollout keeps."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from klrl.base.errors import ConfigError
from klrl.cli.ls import ls_command
from klrl.domains import LANGUAGE
from klrl.language.data.batch import LOG_PROBS, REF_LOG_PROBS, response_mask, response_part
from klrl.language.model import vocabulary
from klrl.language.model.vocabulary import Against, NextTokens, token_measures
from klrl.language.run.rollout import REF_STATES, STATES
from klrl.losses.policy import PolicyLoss
from klrl.runs.folder import RunFolder
from klrl.runs.returns import shown_kl
from klrl.train.loop import Training
from tests.language.toys import of_tokens, truth
from tests.runs.commands import rows_of

FAST = ("frames=64", "eval.every=0", "optim.lr=0.003", "optim.lr_floor=0.003", "kl.coef=0.3")


def trained(job, name: str, *words: str) -> list[dict]:
    """Rows of the iterations of a small run."""
    Training(job(*FAST, *words)).train(RunFolder(Path(name)))
    return [row for row in rows_of(Path(name)) if "reward/raw" in row]


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 5], [2, 3, 3, 1]])
def test_states_that_come_in_pieces_give_the_same_bits(monkeypatch, pieces: list[int]) -> None:
    """In parts of seven tokens, which fit no piece."""
    torch.manual_seed(0)
    policy, reference = torch.nn.Linear(8, 40), torch.nn.Linear(8, 40)
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", 40 * 70)
    mask = torch.arange(6) < torch.tensor([6, 1, 3, 6, 2, 4, 5, 6, 1])[:, None]
    states, others = torch.randn(2, 9, 6, 8)
    tokens = torch.randint(40, mask.shape)
    names = ["reverse", "forward", "js"]
    with torch.no_grad():
        whole = [Against(NextTokens(others, reference, 0.7), names)]
        log_prob, [expected] = token_measures(NextTokens(states, policy), tokens, mask, whole)
        split = [Against(NextTokens(iter(others.split(pieces)), reference, 0.7), names)]
        again, [found] = token_measures(NextTokens(states, policy), tokens, mask, split)
    assert torch.equal(log_prob, again)
    assert torch.equal(expected.log_prob, found.log_prob)
    for name in names:
        assert torch.equal(expected.divergence[name], found.divergence[name])
    table = [(x.double() @ m.weight.double().T + m.bias.double()).detach() for x, m in
             ((states, policy), (others / 0.7, reference))]  # fmt: skip
    table[1] += reference.bias.double().detach() * (1 / 0.7 - 1)
    log_p, log_q = (each.log_softmax(-1) for each in table)
    by_hand = (log_p.exp() * (log_p - log_q)).sum(-1) * mask
    torch.testing.assert_close(found.divergence["reverse"].double(), by_hand, rtol=1e-4, atol=1e-6)


def prepared(job, *words: str):
    training = Training(job(*FAST, *words))
    batch = training.parts.rollout(0).collect()
    training.parts.charge_kl(batch)
    return training, batch


@pytest.mark.parametrize(
    ("words", "old", "ref"),
    [
        ([], True, False),
        (["kl.placement=loss", "kl.estimator=k3"], True, False),
        (["kl.placement=loss", "kl.estimator=exact"], True, True),
        (["kl.exact=charged"], False, False),
        (["kl.exact=charged", "kl.placement=loss", "kl.estimator=exact"], False, True),
        (["kl.exact=charged", "loss=klpen"], True, False),
        (["kl.exact=charged", "loss=klpen", "loss.kl_old=sampled"], False, False),
        (["kl.exact=charged", "advantage=gae"], True, False),
        (["kl.exact=charged", "loss=dppo", "loss.measure=tv_exact"], True, False),
        (["kl.exact=charged", "actor.dtype=bfloat16"], False, False),
        (["kl.exact=every:2"], False, False),
        (["kl.exact=every:1"], True, False),
    ],
)
def test_a_rollout_keeps_the_states_that_are_read(job, words, old: bool, ref: bool) -> None:
    _, batch = prepared(job, *words)
    found = {
        key for key, value in batch.items(True, True) if value.ndim == 3 and value.shape[2] > 1
    }
    assert (STATES in found) == old
    assert (REF_STATES in found) == ref
    assert found <= {STATES, REF_STATES, ("sampler", "states")}


def test_without_exact_kls_a_run_learns_the_same(job) -> None:
    """k1 is charged; every row has k3, in place of KLs over the vocabulary."""
    exact, sampled = (trained(job, each, f"kl.exact={each}") for each in ("always", "charged"))
    for one, other in zip(exact, sampled, strict=True):
        gone = {name for name in one if name not in other}
        names = ("exact", "forward", "exact_seq", "forward_seq")
        assert gone == {*(f"kl/ref/{name}" for name in names), "kl/old/exact"}
        assert other.keys() - one.keys() == {"kl/old/k3"}
        equal = {
            name for name in other if not name.startswith(("time/", "kl/ref/k", "kl/old", "run"))
        }
        assert {n: one[n] for n in equal} == {n: other[n] for n in equal}
        assert other["kl/ref/k3"] == pytest.approx(one["kl/ref/k3"], rel=1e-4, abs=1e-7)
        assert 0.2 < other["kl/old/k3"] / one["kl/old/exact"] < 5  # of 16 responses


def test_every_nth_row_has_exact_kls(job) -> None:
    exact, some = (trained(job, each[:3], f"kl.exact={each}") for each in ("always", "every:3"))
    assert len(some) == 4
    for one, other in zip(exact, some, strict=True):
        due = other["iteration"] == 3
        assert ("kl/ref/exact" in other, "kl/old/exact" in other) == (due, due)
        assert "kl/old/k3" in other
        for name in ("kl/ref/exact", "kl/old/exact", "kl/ref/forward") if due else ():
            assert other[name] == one[name]


def test_k3_of_an_update_is_that_of_its_tokens(job) -> None:
    training, batch = prepared(job, "kl.exact=charged", "actor.dtype=float64", "optim.lr=0.03")
    mask = response_mask(batch)
    training.parts.estimate_advantage(batch)
    row, model = training.learn(batch), training.parts.policy.model
    log_r = of_tokens(truth(model, batch), batch) - response_part(batch, LOG_PROBS)
    by_hand = float((log_r.exp() - 1 - log_r)[mask].mean())
    assert row["kl/old/k3"] == pytest.approx(by_hand, rel=1e-6)
    assert by_hand > 1e-4
    ref = of_tokens(truth(training.parts.reference.module, batch), batch)
    torch.testing.assert_close(response_part(batch, REF_LOG_PROBS), ref, rtol=0, atol=1e-9)


def test_a_controller_reads_k3_in_every_row(job, capsys) -> None:
    words = ("kl.exact=every:2", "controller=dual", "controller.target=0.01", "controller.lr=0.5")
    rows = trained(job, "run", *words)
    for row, following in pairwise(rows):
        moved = math.exp(0.5 * (row["kl/ref/k3"] / 0.01 - 1))
        assert following["kl/ref/coef"] == pytest.approx(row["kl/ref/coef"] * moved, rel=1e-9)
    told = "kl.exact=every:2: rows have kl/ref/k3 and kl/old/k3, which controller, loss.target_kl "
    assert f"{told}and loss.beta read; rows 2, 4, ... also exact KLs" in capsys.readouterr().out


def of_exact_row(job, *words: str):
    """The second update of a run with exact KLs in every second row: its row, and the next beta."""
    fixed = ("kl.exact=every:2", "actor.dtype=float64", "optim.lr=0.03", "learner.minibatches=1")
    training = Training(job(*FAST, *fixed, *words))
    batch = training.parts.rollout(1).collect()
    training.parts.charge_kl(batch)
    training.parts.estimate_advantage(batch)
    row, model, mask = training.learn(batch), training.parts.policy.model, response_mask(batch)
    log_r = of_tokens(truth(model, batch), batch) - response_part(batch, LOG_PROBS)
    by_hand = float((log_r.exp() - 1 - log_r)[mask].mean())
    assert row["kl/old/k3"] == pytest.approx(by_hand, rel=1e-6)
    return row, training.parts.learner.beta_rule.beta


def test_an_early_stop_reads_k3_also_where_exact_kls_are_known(job) -> None:
    row, _ = of_exact_row(job, "loss=clip", "learner.epochs=1")
    k3, exact = row["kl/old/k3"], row["kl/old/exact"]
    assert abs(k3 / exact - 1) > 0.01
    between = f"loss.target_kl={(k3 + exact) / 2 / 1.5}"
    row, _ = of_exact_row(job, "loss=clip", "learner.epochs=2", between)
    assert row["learner/epochs"] == (1 if k3 > exact else 2)


def test_beta_reads_k3_also_where_exact_kls_are_known(job) -> None:
    words = ("loss=klpen", "loss.kl_old=sampled", "loss.beta=0.5", "learner.epochs=1")
    row, _ = of_exact_row(job, *words)
    k3, exact = row["kl/old/k3"], row["kl/old/exact"]
    assert abs(k3 / exact - 1) > 0.01
    _, beta = of_exact_row(job, *words, f"loss.dtarg={(k3 + exact) / 2 / 1.5}")
    assert beta == (1.0 if k3 > exact else 0.5)


@pytest.mark.parametrize(("exact", "mark"), [("always", ""), ("charged", " by k3")])
def test_the_list_of_runs_marks_k3(job, capsys, exact: str, mark: str) -> None:
    rows = trained(job, "runs/one", f"kl.exact={exact}")
    ended = capsys.readouterr().out
    assert (
        f"| KL ref{mark} {shown_kl(rows[-1], LANGUAGE).removesuffix(mark)} | KL old{mark} " in ended
    )
    assert ls_command(["runs"]) == 0
    shown = f"{rows[-1]['kl/ref/exact' if exact == 'always' else 'kl/ref/k3']:.4g}{mark} "
    assert shown in capsys.readouterr().out
    assert f"KL(policy||reference){mark} " in ended.replace(" finished", "")


def test_a_stale_rollout_waits_without_states(job) -> None:
    words = ("loss.sampler_weight=truncate", "collector.staleness=1")
    training = Training(job(*FAST, *words, "kl.exact=charged"))
    assert any("take up to 0.0" in line for line in training.parts.preflight)
    rollout = training.parts.rollout(0)
    for _ in range(3):
        batch = rollout.collect()
        assert batch.get(STATES, None) is None
        training.parts.charge_kl(batch)
        row = training.parts.rewards(batch).own
        training.parts.estimate_advantage(batch)
        training.learn(batch)
    assert "kl/sampler/exact" not in row
    assert row["kl/sampler/k3"] > 0


class OfStates(PolicyLoss):
    """A custom loss that charges the exact KL(old||new)."""

    kl_old = "exact"

    def gain(self, scored, advantage, beta):
        return scored.log_prob - scored.kl_old


@pytest.mark.parametrize(
    ("exact", "more"),
    [
        ("charged", []),
        ("every:3", []),
        ("charged", ["kl.placement=loss", "kl.estimator=exact"]),
        ("always", []),
    ],
)
def test_a_custom_loss_that_reads_the_states_is_refused_without_them(job, exact, more) -> None:
    """It ended at the first update: no key "old"."""
    own = ("loss=custom", f"loss.target={__name__}:OfStates", f"kl.exact={exact}", *more)
    if exact == "always":
        assert all(row["kl/old/exact"] > 0 for row in trained(job, "run", *own))
        return
    with pytest.raises(ConfigError, match=f"kl.exact={exact}: the kl_old of loss=custom is exact"):
        Training(job(*FAST, *own))
    Training(job(*FAST, *own, f"loss.target={__name__}:OfTokens"))


class OfTokens(OfStates):
    kl_old = "sampled"
