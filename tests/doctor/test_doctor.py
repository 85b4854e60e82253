"""The doctor, and the published figures (``benchmarks.published``), say what is broken."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from benchmarks.published import divergences, estimates, rules, tokens, upstream
from benchmarks.published.__main__ import every_line
from klrl.cli.doctor import main
from klrl.doctor import examine
from klrl.doctor.lines import off
from klrl.kl import estimators as divergence
from klrl.kl.controllers import AdaptiveKLController


@pytest.fixture(scope="module")
def lines() -> list:
    return list(every_line())


def test_every_line_of_klrls_own_is_within_tolerance(lines) -> None:
    assert off(lines) == []
    assert len(lines) > 80
    assert {line.section.split(" (")[0].split(",")[0] for line in lines} >= {
        "Estimators of KL(pi||ref)",
        "Sequences",
        "Placements",
        "k2 in the loss without w",
        "KL(pi||ref) of sequences",
    }


def test_the_doctors_dozen_is_right() -> None:
    assert off(examine()) == []
    assert len(examine()) == 16


def test_moments_of_sequences_are_those_of_all_sequences() -> None:
    """The doctor's recursion against a sum over 3^4 sequences."""
    log_p = torch.randn(3, 3, dtype=torch.float64).log_softmax(-1)
    adds = torch.randn(3, 3, dtype=torch.float64)
    weights, sums = [], []
    for sequence in product(range(3), repeat=4):
        steps = list(zip((0, *sequence), sequence, strict=False))
        weights.append(sum(float(log_p[step]) for step in steps))
        sums.append(sum(float(adds[step]) for step in steps))
    p, x = torch.tensor(weights, dtype=torch.float64).exp(), torch.tensor(sums, dtype=torch.float64)
    mean = float((p * x).sum())
    std = float((p * (x - mean) ** 2).sum().sqrt())
    assert tokens.moments(log_p, adds, 4) == pytest.approx((mean, std), rel=1e-9)


def test_the_workarounds_are_still_needed() -> None:
    """A changed line shows that TorchRL was fixed: drop the workaround and this line."""
    assert off(upstream.upstream_lines()) == []


def test_parity_and_json(capsys) -> None:
    main(["--parity", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert {line["name"] for line in told} == {"reward", "kl_penalty", "ref_log_prob"}
    assert all(line["ok"] for line in told)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_a_broken_estimator_is_found(monkeypatch, capsys, name: str) -> None:
    whole = divergence.ESTIMATORS[name]
    monkeypatch.setitem(divergence.ESTIMATORS, name, lambda ratio: whole(-ratio) * 1.1)
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 1
    assert "OFF" in capsys.readouterr().out


def test_a_broken_controller_is_found(monkeypatch) -> None:
    move = AdaptiveKLController.move
    monkeypatch.setattr(AdaptiveKLController, "move", lambda self, kl, n: move(self, -kl, n))
    wrong = {line.name for line in off(rules.controller_lines())}
    assert wrong == {"adaptive, KL = 1.1 target"}


def test_a_forgotten_ratio_is_found(monkeypatch) -> None:
    def forgets(name, log_p, log_old, log_q):
        return divergence.ESTIMATORS[name](log_p - log_q)

    monkeypatch.setattr(estimates, "reference_kl", forgets)
    wrong = {line.name for line in off(list(estimates.forgotten_ratio_lines()))}
    assert wrong == {f"KL(old||new) {kl}: with w" for kl in estimates.DISTANCES}


def test_a_biased_kl_per_token_is_found(monkeypatch) -> None:
    whole = tokens.exact_kl
    monkeypatch.setattr(tokens, "exact_kl", lambda p, q: 1.05 * whole(p, q))
    wrong = {line.name for line in off(list(tokens.token_lines()))}
    assert wrong == {
        f"exact per token (Rao-Blackwellised): {what} / true" for what in ("bias", "std")
    }


def test_a_divergence_of_another_direction_is_found(monkeypatch) -> None:
    whole = divergences.over_actions
    monkeypatch.setattr(divergences, "over_actions", lambda name, p, q: whole("reverse", p, q))
    broken = {line.name for line in off(divergences.divergence_lines())}
    assert {f"{name}, KL of the chain 0.1: split, exact" for name in ("forward", "js")} <= broken
    assert not any(name.startswith("reverse") for name in broken)
