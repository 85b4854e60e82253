"""``benchmarks/same_rows.py``: what it tells of two sets of rows."""

import json
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig

from benchmarks.same_rows import compare, read_rows
from benchmarks.small_jobs import JOBS, SLOW_JOBS, Job
from klrl.config.checks import to_config
from klrl.config.compose import compose
from klrl.runs.metrics import TIMES

ROWS = [
    {"iteration": 1, "frames": 64, "kl/ref/exact": 0.1, "loss/critic": 2.0},
    {"iteration": 2, "frames": 128, "kl/ref/exact": 0.2, "loss/critic": 3.0},
]


def changed(iteration: int, **values: float | None) -> list[dict[str, float]]:
    """The rows with other values in one of them; None leaves a metric out."""
    rows = [dict(row) for row in ROWS]
    rows[iteration - 1] |= {key.replace("_", "/"): v for key, v in values.items()}
    return [{k: v for k, v in row.items() if v is not None} for row in rows]


def test_times_are_left_out(tmp_path: Path) -> None:
    rows = [{**row, **dict.fromkeys(TIMES, 0.5)} for row in ROWS]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_rows(path) == ROWS


def test_the_first_differences_of_each_job_are_told_and_the_rest_counted(capsys) -> None:
    recorded = {"a": ROWS, "b": ROWS, "c": ROWS}
    found = {"a": ROWS, "b": changed(1, frames=65, loss_critic=2.5), "c": ROWS[:1]}
    assert not compare(recorded, found, first=1)
    assert capsys.readouterr().out.splitlines() == [
        "b, iteration 1: frames is 64 and 65",
        "b: 1 more",
        "c, row 2: only the first run has it, the second ends at 1",
        "6 rows of 3 jobs: 2 of 3 jobs differ",
    ]
    assert compare(recorded, recorded, first=1)
    assert capsys.readouterr().out == "6 rows of 3 jobs: equal\n"


def is_fresh(job: Job) -> bool:
    return not job.words.startswith("resume=")


@cache
def composed(job: Job) -> DictConfig:
    """What the command line makes of a job's words; Hydra wants ++ where a dictionary is open."""
    return compose(job.words.replace("env.kwargs.", "++env.kwargs.").split())


@pytest.mark.integration
def test_the_jobs_are_valid_and_in_order() -> None:
    seen: set[str] = set()
    for job in (*JOBS, *SLOW_JOBS):
        assert set(job.after) <= seen, job.name
        seen.add(job.name)
        read = [w.split("=", 1)[1] for w in job.words.split() if "=runs/" in w]
        assert {f"runs/{name}" for name in job.after} >= set(read), job.name
        if is_fresh(job):
            assert to_config(composed(job)).iterations == 4
    assert len(JOBS) == 16
