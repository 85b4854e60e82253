"""Targets in nats per token or per response: of a controller, of beta, of the epochs' end."""

import math
from pathlib import Path

import pytest

from klrl.runs.folder import RunFolder
from klrl.train.loop import Training
from tests.runs.commands import rows_of

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("unit", "measured"), [("sequence", "exact_seq"), ("token", "exact")])
def test_a_controller_is_given_the_kl_in_the_unit_of_its_target(job, unit, measured) -> None:
    """ln coef += lr (KL / target - 1), written out with the rows' own KLs."""
    words = ("controller=dual", "controller.target=0.01", "controller.lr=0.5", "kl.coef=0.5")
    config = job(*words, f"controller.unit={unit}", "frames=48")
    Training(config).train(RunFolder(Path("run")))
    rows, coef = rows_of(Path("run")), 0.5
    for row in rows:
        assert row["kl/ref/coef"] == pytest.approx(coef)
        coef *= math.exp(0.5 * (row[f"kl/ref/{measured}"] / 0.01 - 1))
    assert len(rows) == 3
    assert rows[-1]["kl/ref/exact_seq"] != pytest.approx(rows[-1]["kl/ref/exact"])


@pytest.mark.parametrize(("target", "bound", "at"), [(1e-9, "max", 1.0), (50.0, "min", -1.0)])
def test_held_stays_at_a_bound_that_keeps_the_target_out_of_reach(job, target, bound, at) -> None:
    """A target far below the KL needs more than coef_max, one far above less than coef_min."""
    words = ("controller=held", f"controller.target={target}", "controller.unit=token")
    limits = ("controller.coef_min=0.05", "controller.coef_max=0.2", "kl.coef=0.1")
    # Each run is longer than held waits for a KL that does not rise.
    Training(job(*words, *limits, "frames=480")).train(RunFolder(Path("run")))
    rows = rows_of(Path("run"))
    coefs = [row["kl/ref/coef"] for row in rows]
    assert coefs[0] == pytest.approx(0.1)
    held = [row for row in rows if "kl/ref/at_bound" in row]
    assert rows[-len(held) :] == held, "it stays there"
    assert len(held) >= 3
    for row in held:
        assert row["kl/ref/at_bound"] == at
        assert row["kl/ref/coef"] == pytest.approx({"max": 0.2, "min": 0.05}[bound])


def test_a_target_of_the_trust_region_may_be_per_response(job) -> None:
    """KL(old||new) of a response is the sum over its tokens: (d / dtarg)^g with d = KL * length."""
    words = ("loss=klpen", "loss.beta_rule=proportional", "loss.dtarg=5e-3", "loss.unit=sequence")
    Training(job(*words, "frames=48")).train(RunFolder(Path("run")))
    rows, beta = rows_of(Path("run")), 1.0
    for row in rows:
        per_response = row["kl/old/exact"] * row["reward/episode_length"]
        assert row["kl/old/target"] == pytest.approx(5e-3 / row["reward/episode_length"])
        assert row["kl/old/beta"] == pytest.approx(beta, rel=1e-5)
        factor = (per_response / 5e-3) ** 0.5
        assert 0.25 < factor < 4
        beta *= factor
    assert len(rows) == 3
    assert all(row["reward/episode_length"] > 1.5 for row in rows)


def test_a_cap_of_the_epochs_may_be_per_response(job) -> None:
    once = job("learner.epochs=1", "frames=16")
    Training(once).train(RunFolder(Path("once")))
    (row,) = rows_of(Path("once"))
    length = row["reward/episode_length"]
    assert length > 2.5
    cap = row["kl/old/exact"] * length / 2 / 1.5  # the KL is above 1.5 caps per response alone
    epochs = {}
    for unit in ("token", "sequence"):
        words = ("learner.epochs=2", "frames=16", f"loss.target_kl={cap}", f"loss.unit={unit}")
        Training(job(*words)).train(RunFolder(Path(unit)))
        (row,) = rows_of(Path(unit))
        epochs[unit] = row["learner/epochs"]
    assert epochs == {"token": 2, "sequence": 1}
