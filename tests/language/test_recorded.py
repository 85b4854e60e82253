"""What a line of ``samples.jsonl`` must hold: no field that is missing or wrong hides another."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from klrl.language.run.verify import Verdict, verify_run
from klrl.runs.folder import RunFolder
from klrl.runs.resume import resumed_config
from klrl.train.loop import Training, start
from tests.runs.commands import exits, samples_of

pytestmark = pytest.mark.integration


@pytest.fixture
def run(job) -> Path:
    """Four lines each of iterations 1, 2 and 3, of weights 0, 16 and 32; 16 has no checkpoint."""
    Training(job("checkpoint.every=2", "collector.samples_count=4")).train(RunFolder(Path("run")))
    return Path("run")


def of_lines(found: Verdict) -> list[str]:
    """Lines that are not a sample of the run; one less moves the prompts of the others."""
    lines = [line for line in found.problems if line.startswith("samples.jsonl line ")]
    return [line for line in lines if ": its " not in line and ": the field " not in line]


def write(run: Path, samples: list[dict[str, Any]]) -> None:
    (run / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))


@pytest.mark.parametrize("name", ["log_probs", "ref_log_probs", "kl", "weights", "iteration"])
def test_a_field_that_is_missing_is_a_problem(run: Path, capsys, name: str) -> None:
    samples = samples_of(run)
    for place in (1, 5):
        del samples[place][name]
    write(run, samples)
    found = verify_run(run)
    assert of_lines(found) == [f"samples.jsonl line {n}: has no {name}" for n in (2, 6)]
    capsys.readouterr()
    assert exits("verify", "run") == 1
    assert f"samples.jsonl line 2: has no {name}" in capsys.readouterr().out


def test_truncated_is_true_or_false(run: Path) -> None:
    """1 equals true, and was scored as not truncated."""
    samples = samples_of(run)
    samples[0]["truncated"] = int(samples[0]["truncated"])
    write(run, samples)
    assert of_lines(verify_run(run)) == ["samples.jsonl line 1: is not a valid sample"]


@pytest.mark.parametrize("name", ["ref_log_probs", "kl"])
def test_a_field_that_all_lines_lack_is_a_problem(run: Path, name: str) -> None:
    samples = samples_of(run)
    write(run, [{key: each[key] for key in each if key != name} for each in samples])
    found = verify_run(run)
    assert len(of_lines(found)) == len(samples)


def test_numbers_of_a_reference_that_the_run_has_not_are_a_problem(job) -> None:
    Training(job("kl=none", "frames=16")).train(RunFolder(Path("run")))
    samples = samples_of(Path("run"))
    samples[0]["kl"] = [0.0] * len(samples[0]["response_ids"])
    write(Path("run"), samples)
    (line,) = of_lines(verify_run("run"))
    assert line == "samples.jsonl line 1: has kl, but the run has no reference"


def test_weights_are_the_samples_before_the_iteration(run: Path) -> None:
    """A line of other weights would be said to be of weights that are gone, changed or not."""
    samples = samples_of(run)
    assert [each["weights"] for each in samples] == [0] * 4 + [16] * 4 + [32] * 4
    samples[0]["weights"] = 9999
    samples[1] |= {"weights": 16, "log_probs": [-9.0] * len(samples[1]["response_ids"])}
    samples[2] |= {"weights": 16, "iteration": 2}
    samples[3] |= {"weights": 160, "iteration": 11, "samples": 176}
    samples[4] |= {"iteration": 0, "samples": 0}
    write(run, samples)
    found = verify_run(run)
    assert of_lines(found) == [
        "samples.jsonl line 1: has weights=9999, samples=16; iteration 1 has weights=0, samples=16",
        "samples.jsonl line 2: has weights=16, samples=16; iteration 1 has weights=0, samples=16",
        "samples.jsonl line 3: has weights=16, samples=16; iteration 2 has weights=16, samples=32",
        "samples.jsonl line 4: has weights=160, but the run has only 32 samples",
        "samples.jsonl line 5: is not a valid sample",
    ]
    assert "policy of 3 samples, whose weights are gone" in found.unseen  # lines 6 to 8


def test_the_record_of_a_resumed_run_is_true(run: Path) -> None:
    folder, config = resumed_config("run", ["frames=80"])
    start(config, RunFolder(folder), resume=True)
    found = verify_run(run)
    assert found.ok
    assert [each["weights"] for each in samples_of(run)[::4]] == [0, 16, 32, 48, 64, 80]
    for entry in sorted(run.glob("checkpoints/*/frames-*"))[:-1]:
        shutil.rmtree(entry)
    (run / "metrics.jsonl").unlink()
    found = verify_run(run)
    assert all(each.ok for each in found.measures)
    assert {line.partition(":")[0] for line in found.problems} == {"metrics.jsonl"}
    assert "policy of 16 samples, whose weights are gone" in found.unseen


def test_the_record_of_a_run_that_was_killed_is_true(run: Path) -> None:
    """Its last samples are of an iteration that has no row and no checkpoint yet."""
    shutil.rmtree(run / "checkpoints/last/frames-000000000032")
    write(run, samples_of(run)[:8])
    (row, _) = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(row)
    assert not verify_run(run).ok  # of a finished run rows are missing
    manifest = run / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"finished"', '"running"'))
    assert verify_run(run).ok


BATCHES = """
def shared(prompts, responses, rows):
    return [1 / prompts.count(each) for each in prompts]


def centred(prompts, responses, rows):
    lengths = [len(each) for each in responses]
    return [each - sum(lengths) / len(lengths) for each in lengths]
"""


@pytest.mark.parametrize("name", ["shared", "centred"])
def test_a_score_that_depends_on_the_batch_is_not_compared(
    job, tmp_path: Path, monkeypatch, name: str
) -> None:
    """The file has one response to each of four prompts; the three others of each are gone."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_batch.py").write_text(BATCHES)
    config = job(f"env.reward=of_batch:{name}", "collector.samples_count=4", "frames=16")
    Training(config).train(RunFolder(Path("run")))
    samples = samples_of(Path("run"))
    scored = [each for each in samples if "reward" in each]
    assert len({str(each["prompt"]) for each in scored}) == 4
    if name == "shared":
        assert [each["reward"] for each in scored] == [1 / 4] * 4  # alone or together: 1
    found = verify_run("run")
    assert found.problems == []
    (line,) = [line for line in found.unseen if line.startswith("rewards of samples")]
    assert "env.reward scores a response differently in a different batch" in line
    assert not [line for line in found.looked if line.startswith("rewards")]
    scored[0]["gold"] += 1
    write(Path("run"), samples)
    lines = [line for line in verify_run("run").problems if ": its gold is " in line]
    assert [line.partition(":")[0] for line in lines] == ["samples.jsonl line 1"]
