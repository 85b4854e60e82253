"""``klrl verify`` of control runs: records that are false or damaged, and tasks that differ."""

import json
import shutil
from pathlib import Path

import pytest

import klrl
from klrl.train.verify import Record, verify_record
from tests.conftest import QUICK
from tests.runs.commands import exits, said

pytestmark = pytest.mark.integration

WORDS = (
    *(word for word in QUICK if word != "eval.every=0"),
    *("frames=256", "env.kwargs={max_episode_steps:20}"),
    *("eval.evaluations=2", "eval.episodes=2", "eval.share=1", "eval.final=4"),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return klrl.run(*WORDS, folder=tmp_path_factory.mktemp("finished") / "run").folder


@pytest.fixture
def run(finished: Path) -> Path:
    return Path(shutil.copytree(finished, "run"))


def verified(run: Path) -> Record:
    verify_record(run, klrl.load_run(str(run)).config, "cpu", record := Record())
    return record


def write(run: Path, rows: list[dict]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_true_record_has_no_problem(run: Path) -> None:
    assert verified(run).problems == []


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("iteration", {}), ("iteration", {"iteration": None})),
        *(("frames", {}), ("frames", {"frames": float("inf")})),
        *(("eval/return", {"eval/return": None}), ("eval/return", {"eval/return": float("nan")})),
        ("iteration", {"iteration": float("inf")}),
    ],
)
def test_a_row_without_a_number_is_a_problem(run: Path, name: str, change: dict, capsys) -> None:
    rows = lines_of(run)
    del rows[-1][name]
    rows[-1] |= change
    write(run, rows)
    code, out, error = said(capsys, "verify", "run")
    assert code == 1, error
    assert f"metrics.jsonl: row {len(rows)} has no finite {name}\n" in out
    assert "metrics.jsonl: " in out.replace("metrics.jsonl: row ", ""), "digests are compared too"


@pytest.mark.parametrize("which", ["last", "best"])
def test_a_checkpoint_that_is_gone_is_a_problem_among_others(run: Path, which: str, capsys) -> None:
    rows = lines_of(run)
    rows[1]["frames"] += 1
    write(run, rows)
    shutil.rmtree(run / "checkpoints" / which)
    code, out, _ = said(capsys, "verify", "run")
    assert code == 1
    assert f"checkpoint {which}: no intact entry is left" in out
    assert "metrics.jsonl: iteration 1 has frames=65" in out


def test_a_number_of_a_task_that_does_not_repeat_itself_is_not_called_wrong() -> None:
    task = ("env=custom", "env.target=tests.control.toys:Unseeded")
    words = (*(word for word in WORDS if not word.startswith("env")), *task)
    found = verified(klrl.run(*words, folder="run").folder)
    assert found.problems == []
    assert "closing evaluations that differ: the manifest says repeatable: no" in found.unseen
    assert any(line.startswith("eval/return: recorded ") for line in found.unseen)
    assert exits("verify", "run") == 0
