"""A run folder holds one run: what is another's is refused by name, by whoever goes on with it."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from klrl.base.errors import ConfigError
from klrl.report.diff import compare_bits
from klrl.report.listing import entries
from klrl.report.runs import find_runs
from klrl.runs.checkpoint import Checkpoints, load_component
from klrl.runs.rows import RowFile, read_rows
from tests.conftest import QUICK
from tests.report.toys import rows_of as toy_rows
from tests.report.toys import write_run
from tests.runs.commands import exits, manifest_of
from tests.runs.saves import CPU, Held, entry, save, small, steps

pytestmark = pytest.mark.timeout(300)

METRICS = Path("run/metrics.jsonl")
#: Iterations that come after no other.
NUMBERS = {"row 0 again": b'"iteration": 0', "row NaN": b'"iteration": NaN'}


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def marked(path: Path) -> dict:
    content = path.read_bytes()
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def written(folder: Path, run: str, rows: list[dict]) -> Path:
    """A toy run with an id, whose rows have it."""
    write_run(folder, rows=rows, id=run)
    content = "".join(json.dumps({"run": run, **row}) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(content)
    return folder


def test_the_digest_is_that_of_the_file_after_each_row_and_after_a_resume(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = RowFile(path, "frames", run="one")
    for frames in (1, 2, 3):
        file.log({"frames": frames})
        assert file.mark() == marked(path)
        if frames == 2:
            mark = file.mark()
    file.close()
    assert path.read_text().startswith('{"run": "one", "frames": 1}\n')
    again = RowFile(path, "frames", 2, mark, "one")
    assert again.mark() == mark == marked(path)
    again.log({"frames": 3})
    assert again.mark() == marked(path)
    again.close()


def test_rows_that_were_changed_before_the_checkpoint_are_told(tmp_path, capsys) -> None:
    path = tmp_path / "metrics.jsonl"
    file = RowFile(path, "frames")
    for frames in (1, 2):
        file.log({"frames": frames, "reward/raw": 0.5})
    mark = file.mark()
    file.close()
    path.write_bytes(path.read_bytes().replace(b"0.5", b"0.6", 1))  # as long as before
    RowFile(path, "frames", 2, mark).close()
    assert path.stat().st_size == mark["bytes"]
    (told,) = capsys.readouterr().err.splitlines()
    assert told == f"{path}: rows up to 2 frames were changed after the checkpoint"


@pytest.mark.parametrize(
    ("what", "left", "word"),
    [
        ("foreign", 20, "21, 22, 23, 24, 25, ..."),
        ("doubled", 20, "21, 22, 23, 24, 25, ..."),
        ("reversed", 1, "2, 3, 4, 5, 6, ..."),
        ("unnamed", 10, "11, 12, 13, 14, 15, ..."),
        ("row 0 again", 20, "21, 22"),
        ("row NaN", 20, "21, 22"),
    ],
)
def test_report_and_ls_tell_rows_that_are_not_the_runs_own(
    what: str, left: int, word: str, tmp_path, capsys
) -> None:
    folder = written(tmp_path / "a", "a1", toy_rows())
    path = folder / "metrics.jsonl"
    own = path.read_bytes().splitlines(keepends=True)
    foreign = [line.replace(b"a1", b"b2") for line in own]
    end = {name: re.sub(rb'"iteration": \d+', to, own[-1]) for name, to in NUMBERS.items()}
    content = {
        "foreign": own + foreign,
        "doubled": own * 2,
        "reversed": own[::-1],
        "unnamed": own[:10] + [line.replace(b'"run": "a1", ', b"") for line in own[10:]],
        **{name: [*own, line, line] for name, line in end.items()},
    }[what]
    path.write_bytes(b"".join(content))
    (run,) = find_runs([str(tmp_path)]).runs
    assert run.rows == left
    told = f"{path}: skipped lines {word}: of another run, or out of order\n"
    assert capsys.readouterr().err == told
    (listed,) = entries(tmp_path)
    assert listed.note == "metrics.jsonl: bad rows near its end were skipped"
    assert listed.done == (1000 if what == "unnamed" else 2000)


def test_the_id_of_a_row_is_no_number(tmp_path) -> None:
    first, second = (written(tmp_path / name, f"{name}1", toy_rows()) for name in "ab")
    assert read_rows(first / "metrics.jsonl") == toy_rows()
    (run, _) = find_runs([str(tmp_path)]).runs
    assert set(run.columns) == set(toy_rows()[0])
    assert compare_bits(first, second)[0]


def test_a_renamed_entry_is_refused_and_the_one_before_taken(capsys) -> None:
    save(64)
    save(128)
    entry(128).rename(entry(999))
    assert load_component(Path("run"), "last", "agent", Held(), CPU) == 64
    told = capsys.readouterr().err
    assert "frames-000000000999 is refused" in told
    assert "manifest.json: frames 128 contradict the folder's name" in told


def test_an_entry_of_another_run_is_refused_by_whoever_loads_it() -> None:
    write_run(Path("run"), id="a1" * 16)
    checkpoints = Checkpoints(Path("run/checkpoints"), small(64))
    checkpoints.save("last", 64, {"run": "a1" * 16})
    load_component(Path("run"), "last", "agent", Held(), CPU)
    shutil.rmtree(Path("run/checkpoints"))
    Checkpoints(Path("run/checkpoints"), small(64)).save("last", 64, {"run": "b2" * 16})
    with pytest.raises(ConfigError, match=r"frames-0+64: belongs to run b2b2b2b2, manifest.json"):
        load_component(Path("run"), "last", "agent", Held(), CPU)
    assert steps() == [64]


@pytest.mark.integration
def test_a_run_has_one_id_in_all_its_files_and_keeps_it() -> None:
    exits(*QUICK, "hydra.run.dir=run", "checkpoint.every=1")
    run = manifest_of(Path("run"))["id"]
    assert len(run) == 32
    assert exits("resume=run", "frames=192") == 0
    assert manifest_of(Path("run"))["id"] == run
    assert [line["run"] for line in lines_of(METRICS)] == [run] * 3
    for name in ("config", "overrides"):
        assert Path(f"run/.hydra/{name}.yaml").read_text().startswith(f"# run {run}\n")
    newest = json.loads((entry(192) / "manifest.json").read_text())["metadata"]
    assert newest["run"] == run
    assert newest["rows"] == {"metrics.jsonl": marked(METRICS), "samples.jsonl": {"bytes": 0}}


@pytest.mark.integration
@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints"])
def test_no_run_begins_among_the_files_of_another(left: str, capsys) -> None:
    exits(*QUICK, "hydra.run.dir=run")
    for path in set(Path("run").iterdir()) - {Path("run") / left}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = sorted(map(str, Path("run").rglob("*")))
    capsys.readouterr()
    assert exits(*QUICK, "hydra.run.dir=run") == 2
    told = capsys.readouterr().err
    assert sorted(map(str, Path("run").rglob("*"))) == before
    if left == "metrics.jsonl":
        assert "but no manifest.json; restore manifest.json, or move the folder away" in told


@pytest.mark.integration
def test_sweep_json_has_the_id_of_each_jobs_run_and_tells_another(capsys) -> None:
    for name in ("s", "t"):
        assert exits("-m", f"sweep={name}", *QUICK, "seed=0,1") == 0
    for name in ("s", "t"):
        folder = Path("outputs") / name
        told = {
            e["name"]: e["run"] for e in json.loads((folder / "sweep.json").read_text())["jobs"]
        }
        assert told == {job: manifest_of(folder / job)["id"] for job in ("seed=0", "seed=1")}
    shutil.rmtree("outputs/s/seed=0")
    shutil.copytree("outputs/t/seed=0", "outputs/s/seed=0")
    theirs = manifest_of(Path("outputs/t/seed=0"))["id"]
    capsys.readouterr()
    assert exits("-m", "sweep=s", *QUICK, "seed=0,1") == 0
    out = capsys.readouterr().out
    assert f"seed=0: has run {theirs[:8]}, but sweep.json has run" in out
    assert out.count("seed=0: has run") == 1
