"""Distillation: a student learns another run's policy from the divergence alone."""

from pathlib import Path

import pytest

from klrl.runs.resume import stored_config
from tests.conftest import QUICK
from tests.runs.commands import exits, rows_of

pytestmark = pytest.mark.integration


def test_a_student_of_another_width_learns_the_teachers_policy() -> None:
    """What it learns from tells nothing of the reward; the record does."""
    teacher = ("env.normalize_observation=true", "actor.hidden=[16]", "optim.lr=0.01")
    assert exits(*QUICK, *teacher, "frames=512", "hydra.run.dir=teacher") == 0
    student = (
        *("experiment=distill", "reference.path=teacher", "env.normalize_observation=true"),
        *("actor.hidden=[4]", "frames=2048", "env.num_envs=2", "collector.steps=64"),
        *("learner.minibatches=2", "optim.lr=0.01", "eval.every=0", "logger=none"),
    )
    assert exits(*student, "hydra.run.dir=student") == 0
    rows = rows_of(Path("student"))
    assert stored_config(Path("student")).actor.hidden == [4]
    assert rows[0]["kl/ref/exact"] > 0.01
    assert rows[-1]["kl/ref/exact"] < 0.2 * rows[0]["kl/ref/exact"]
    for row in rows:
        assert row["reward/raw"] < -1
        shaped = row["reward/raw"] - row["kl/ref/penalty"]
        assert row["reward/shaped"] == pytest.approx(shaped, abs=1e-5)
        # A critic of the reward would start at losses of order 10; the penalty's is below.
        assert row["loss/critic"] < 5
