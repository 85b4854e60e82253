"""The doctor agrees with the published figures here, and says so when something is broken."""

from __future__ import annotations

import json

import pytest

from klrl.doctor.__main__ import examine, main
from klrl.doctor.lines import off
from klrl.kl import divergence
from klrl.kl.controllers import AdaptiveKLController


@pytest.fixture(scope="module")
def lines() -> list:
    return examine()


def test_every_line_of_klrls_own_is_within_tolerance(lines) -> None:
    assert off(lines) == []
    assert sum(line.own for line in lines) > 80
    assert {line.section.split(" (")[0].split(",")[0] for line in lines} >= {
        "Estimators of KL(pi||ref)",
        "Sequences",
        "Placements",
    }


def test_the_workarounds_are_still_needed(lines) -> None:
    """A line that changed tells that TorchRL was mended: drop the workaround and this line."""
    assert [line.name for line in lines if not line.own and not line.ok] == []


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
    move = AdaptiveKLController._move
    monkeypatch.setattr(AdaptiveKLController, "_move", lambda self, kl, n: move(self, -kl, n))
    assert {line.name for line in off(examine())} == {"adaptive, KL = 1.1 target"}
