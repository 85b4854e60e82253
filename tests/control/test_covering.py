"""Every pair of env, actor, KL, loss and collector trains, resumes and is evaluated."""

import math

import pytest

import klrl
from tests.covering import Job, covering, pairs, possible, values, words
from tests.runs.commands import exits

#: Two iterations of 32 frames, then a third.
SMALL = (
    *("env.num_envs=2", "collector.steps=16", "learner.epochs=1", "learner.minibatches=2"),
    *("learner.compile=false", "actor.hidden=[8]", "logger=none", "eval.every=1"),
    *("eval.episodes=2", "eval.final=2", "eval.steps=800", "checkpoint.every=1", "device=cpu"),
)
JOBS = covering(possible())
#: Those of ``make test``.
QUICK = covering(JOBS, values)[:8]

pytestmark = pytest.mark.integration


def test_every_possible_pair_is_covered_by_few_jobs() -> None:
    left = {pair for job in possible() for pair in pairs(job)}
    assert left == {pair for job in JOBS for pair in pairs(job)}
    assert len(JOBS) <= 60
    kept = [len({job[factor] for job in QUICK}) for factor in range(5)]
    assert kept == [7, 6, 5, 4, 2]  # of 10 spaces, 6 actors, 5 KLs, 4 losses, 2 collectors


@pytest.mark.parametrize(
    "job",
    [job if job in QUICK else pytest.param(job, marks=pytest.mark.slow) for job in JOBS],
    ids="-".join,
)
def test_a_job_trains_resumes_and_is_evaluated(job: Job, tmp_path) -> None:
    folder = tmp_path / "run"
    run = klrl.run(*words(job), *SMALL, "frames=64", folder=folder)
    assert [row["frames"] for row in run.rows] == [32, 64]
    assert exits(f"resume={folder}", "frames=96") == 0
    rows = run.rows
    assert [row["frames"] for row in rows] == [32, 64, 96]
    numbers = [v for row in rows for v in row.values() if isinstance(v, float)]
    assert all(map(math.isfinite, numbers))
    if job[2] != "none":
        # A fresh policy is its reference; after an update it has left it.
        assert abs(rows[0]["kl/ref/exact"]) < 1e-5
        assert rows[-1]["kl/ref/exact"] > 0
    played = run.evaluate(2)
    assert played.mean is not None
    assert math.isfinite(played.mean)
