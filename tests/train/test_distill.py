"""Distillation: a student learns another run's policy from the divergence alone."""

from pathlib import Path

import pytest

from klrl.runs.folder import RunFolder
from klrl.runs.resume import stored_config
from klrl.train.loop import Training
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


#: Jobs without a reward and without a penalty in it: the loss has the penalty.
ALONE = {
    "preset": ("experiment=distill",),
    "any job": ("kl.placement=loss", "kl.estimator=exact", "advantage.reward_weight=0"),
    "sampled, normalized": (
        *("kl.placement=loss", "kl.estimator=k2", "advantage.reward_weight=0"),
        *("loss=klpen", "loss.normalize_advantage=true", "env.normalize_reward=true"),
    ),
    "one trunk": ("experiment=distill", "actor.share_trunk=true"),
    "trpo": ("experiment=distill", "loss=trpo"),
}


@pytest.mark.parametrize("words", ALONE.values(), ids=ALONE)
def test_a_student_that_equals_its_teacher_stays(settings, words: tuple[str, ...]) -> None:
    """The errors of its critic are no advantages."""
    shape = ["actor.hidden=[8]", "env.normalize_observation=false"]
    shape += [word for word in words if "share_trunk" in word]
    Training(settings("optim.lr=0.01", *shape)).train(RunFolder(Path("teacher")))
    start = ("reference=checkpoint", "reference.path=teacher", "actor.init=teacher")
    job = (*words, *start, *shape, "optim.lr=0.01", "frames=512")
    Training(settings(*job)).train(RunFolder(Path("student")))
    kls = [row["kl/ref/exact"] for row in rows_of(Path("student")) if "kl/ref/exact" in row]
    assert len(kls) >= 4
    assert max(map(abs, kls)) < 1e-6
