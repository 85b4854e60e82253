"""Runs that charge another divergence than the reverse KL: what they record, and what moves."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from klrl.control.run.kl import DIVERGENCE, ERROR
from klrl.train.loop import Training
from tests.agents import moved_rollout
from tests.conftest import QUICK
from tests.runs.commands import exits, rows_of

pytestmark = pytest.mark.integration

EXACT = ("kl.estimator=exact", "kl.coef=0.5", "optim.lr=0.01")
LR, TARGET = 0.7, 0.02
DUAL = ("controller=dual", f"controller.target={TARGET}", f"controller.lr={LR}")


def assert_charged(rows: list[dict], placement: str) -> None:
    """The row's sums, and a controller that moves on what is charged."""
    assert rows[0]["div/ref/charged"] == pytest.approx(0, abs=1e-6), "a policy is its reference"
    for row, after in itertools.pairwise(rows):
        charged = row["div/ref/charged"]
        factor = math.exp(LR * (charged / TARGET - 1))
        assert after["kl/ref/coef"] == pytest.approx(row["kl/ref/coef"] * factor, rel=1e-5)
    last = rows[-1]
    charged = last["div/ref/charged"]
    assert charged > 1e-5
    assert charged != pytest.approx(last["kl/ref/exact"], rel=1e-3)
    penalty = last["kl/ref/coef"] * charged if placement == "split" else 0.0
    assert last["kl/ref/penalty"] == pytest.approx(penalty, rel=1e-5)
    assert last["reward/shaped"] == pytest.approx(last["reward/raw"] - penalty, abs=1e-6)
    assert last["loss/kl_ref"] > 0


@pytest.mark.parametrize(
    ("placement", "divergence", "more", "sampled"),
    [
        ("loss", "forward", (), False),
        ("split", "js", (), True),
        ("loss", "js", ("actor=tanh_normal", "kl.samples_mc_js=4"), True),
        ("split", "js", ("env=cartpole",), False),
    ],
)
def test_a_control_run_records_what_it_charges(placement, divergence, more, sampled) -> None:
    words = (*QUICK, "frames=256", f"kl.placement={placement}", f"kl.divergence={divergence}")
    assert exits(*words, *EXACT, *DUAL, *more, "hydra.run.dir=run") == 0
    rows = rows_of(Path("run"))
    assert_charged(rows, placement)
    assert all(("div/ref/charged_error" in row) is sampled for row in rows)


def test_the_charged_rollout_is_the_rewards_less_coef_times_the_divergence(settings) -> None:
    """Of a Gaussian js, step by step; the stated error is that of its draws."""
    words = ("kl.placement=split", "kl.divergence=js", "kl.samples_mc_js=64")
    training = Training(settings(*EXACT, *words))
    batch = moved_rollout(training, by=0.3)
    raw = batch["next", "reward"].clone()
    measured = training.parts.charge_kl(batch)
    shaped = raw - 0.5 * batch[DIVERGENCE].unsqueeze(-1)
    torch.testing.assert_close(batch["next", "reward"], shaped)
    torch.testing.assert_close(batch["next", "reward_raw"], raw)
    torch.testing.assert_close(measured["div/ref/charged"], batch[DIVERGENCE].mean())
    assert (batch[ERROR] > 0).all()
    with pytest.raises(RuntimeError, match="charged"):
        training.parts.charge_kl(batch)
