"""The doctor's numbers are right, a broken estimator is found, and TorchRL's faults are there."""

import json
import math
import re

import pytest
import torch
import torchrl.data
import torchrl.envs.transforms
from torchrl.modules import TanhNormal

from klrl.kl import estimators as divergence
from tests.runs.commands import exits


def test_the_doctors_dozen_and_the_parity_are_right(capsys) -> None:
    assert exits("doctor", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told) == 16
    assert {line["name"] for line in told[10:]} == {"reward", "kl_penalty", "ref_log_prob"}
    assert all(line["ok"] for line in told)
    assert exits("doctor") == 0
    found = re.findall(r"found +(\S+)", capsys.readouterr().out)
    assert found == ["0"] * 3 + ["0.3023"] + ["0"] * 12  # rounding errors are no findings


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_a_broken_estimator_is_found(monkeypatch, capsys, name: str) -> None:
    whole = divergence.ESTIMATORS[name]
    monkeypatch.setitem(divergence.ESTIMATORS, name, lambda ratio: whole(-ratio) * 1.1)
    assert exits("doctor") == 1
    assert "OFF" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchrls_faults_are_still_there() -> None:
    """Where one is gone, its workaround may go; two more are in tests/losses/test_functional.py."""
    assert not hasattr(torchrl.envs.transforms, "KLRewardTransform"), "for control"
    controller = torchrl.data.AdaptiveKLController(init_kl_coef=1.0, target=0.1, horizon=10)
    controller.update([1.0])
    assert float(controller.coef) < 1.0, "it lowers the coefficient above its target"
    loc, scale = torch.tensor([9.0]), torch.tensor([1e-3])
    exact = -math.log(1e-3) - 0.5 * math.log(2 * math.pi) + 2 * math.log(math.cosh(9.0))
    log_prob = float(TanhNormal(loc, scale, event_dims=1).log_prob(loc.tanh()))
    assert abs(log_prob - exact) > 0.1, "a saturated action's is clamped"
