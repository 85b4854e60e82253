"""One run that holds what klrl never writes: a line of its own, and the others are shown."""

import hashlib
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path

import numpy as np
import pytest
import yaml

import klrl
from klrl.cli.wrapper import exit_code, run_command
from klrl.report.runs import find_runs, read_columns
from tests.report.toys import rows_of, write_run
from tests.runs.commands import exits

Shown = Callable[..., str]


@pytest.fixture
def shown(monkeypatch) -> Shown:
    """Run a command on a terminal that takes UTF-8 alone; what it prints, once it ended well."""

    def run(name: str, *words: str) -> str:
        raw = BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", TextIOWrapper(raw, encoding="utf-8", errors="strict"))
            assert exit_code(f"klrl {name}", partial(run_command, name), list(words)) == 0
            sys.stdout.flush()
            return raw.getvalue().decode()

    return run


INFINITE = float("inf")
#: Settings, entries of the manifest, values of a row; whether ``ls`` and the report can show it.
BAD: dict[str, tuple[dict, dict, dict, bool, bool]] = {
    "frames": ({"frames": INFINITE}, {}, {}, False, True),
    "evaluations": ({"eval": {"every": INFINITE}}, {}, {}, True, True),
    "rows": ({}, {}, {"frames": INFINITE}, False, True),
    "seed": ({"seed": INFINITE}, {}, {}, True, False),
    "list_of_seeds": ({"seed": [1, 2]}, {}, {}, True, False),
    "half_a_surrogate": ({}, {"status": "\ud800"}, {}, True, True),
    "half_in_a_row": ({}, {}, {"\ud800": 1.0}, True, True),
    "time": ({}, {"started": "0001-01-01T00:00:00+14:00"}, {}, True, True),
    "caf\\udce9": ({"kl": {"name": "legacy", "coef": 0.1}}, {}, {}, True, True),  # as the good one
}


@pytest.mark.usefixtures("without_charts")
def test_bad_runs_end_no_list_and_no_report(tmp_path: Path, shown: Shown) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "good")
    for i, (case, (settings, manifest, row, *_)) in enumerate(BAD.items(), 1):
        folder = runs / case.encode().decode("unicode_escape")
        write_run(folder, rows=[{**each, **row} for each in rows_of()], **manifest)
        path = folder / ".hydra" / "config.yaml"
        stored = json.loads(path.read_text())
        stored["kl"]["coef"] = float(i)
        path.write_text(yaml.safe_dump({**stored, **settings}))
    table = shown("ls", str(runs))
    lines = {line.split()[0]: line for line in table.splitlines()[1:]}
    assert "finished" in lines["good"]
    assert len(json.loads(shown("ls", str(runs), "--json"))) == len(BAD) + 1 == len(lines)
    shown("report", str(runs), "-o", str(tmp_path / "report"))
    page = (tmp_path / "report" / "report.html").read_bytes().decode()
    for case, (*_, in_list, in_report) in BAD.items():
        assert ("broken (cannot convert float inf" in lines[case]) != in_list, case
        told = f"runs/{case}: its settings or rows are broken" in page
        assert told != in_report, case
    assert "caf\\udce9" in page


@pytest.mark.integration
def test_a_run_is_evaluated_where_its_name_is_no_utf8_and_its_task_unknown(
    settings, shown: Shown, capsys
) -> None:
    run = klrl.run(settings("frames=64")).folder
    moved = run.rename(run.with_name(os.fsdecode(b"caf\xe9")))
    assert "caf\\udce9" in shown("evaluate", str(moved), "--episodes=1")
    path = moved / ".hydra" / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    stored["env"]["id"] = "NoSuchTask-v0"
    path.write_text(yaml.safe_dump(stored))
    words = [str(moved), "--episodes=1"]
    assert exit_code("klrl evaluate", partial(run_command, "evaluate"), words) == 2
    edited, told = capsys.readouterr().err.splitlines()
    assert "has changed since the run began" in edited
    assert told.startswith("klrl evaluate: env.id=NoSuchTask-v0: Environment")


def test_a_pipe_in_place_of_rows_is_not_waited_for(tmp_path: Path, capsys) -> None:
    for name in "ab":
        write_run(tmp_path / name)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    os.mkfifo(tmp_path / "a" / "metrics.jsonl")
    words = [str(tmp_path / "a"), str(tmp_path / "b"), "--bits"]
    assert exit_code("klrl diff", partial(run_command, "diff"), words) == 2
    assert "metrics.jsonl: it is not a regular file; give another run" in capsys.readouterr().err


def test_a_report_is_not_written_through_a_link(tmp_path: Path, capsys) -> None:
    write_run(tmp_path / "a")
    (tmp_path / "mine").mkdir()
    (tmp_path / "a" / "report").symlink_to(tmp_path / "mine")
    assert exit_code("klrl report", partial(run_command, "report"), [str(tmp_path / "a")]) == 2
    assert "report: is a link" in capsys.readouterr().err
    assert not list((tmp_path / "mine").iterdir())


def sparse(path: Path) -> None:
    """30 GB of zeros that take no room on the disk."""
    path.touch()
    os.truncate(path, 30 * 10**9)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("make", [sparse, os.mkfifo, Path.mkdir])
def test_what_has_no_end_is_one_run_that_is_skipped(make, tmp_path: Path, shown: Shown) -> None:
    """In place of each file that is read whole; a directory of that name is no run's file."""
    runs = tmp_path / "runs"
    write_run(runs / "good")
    names = ("manifest.json", ".hydra/config.yaml", "metrics.jsonl", "owner.json")
    for name in names:
        folder = runs / Path(name).stem
        write_run(folder, status="running")
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
    (runs / "jobs").mkdir()
    make(runs / "jobs" / "sweep.json")
    table = shown("ls", str(runs))
    lines = {line.split()[0]: line.split()[1] for line in table.splitlines()[1:]}
    assert lines["good"] == "finished"
    assert lines["owner"] == "interrupted"
    assert lines["config"] == "broken"
    if make is sparse:
        assert (lines["manifest"], lines["jobs"]) == ("broken", "broken")
        assert "metrics.jsonl is larger than" in table
    shown("report", str(runs), "-o", str(tmp_path / "report"))


def test_columns_have_the_rows_that_are_read(tmp_path: Path) -> None:
    """Not the lines: 300 columns of these would take 7 GB."""
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    first, *_, last = (json.loads(line) for line in path.read_text().splitlines())
    last |= {f"late{i}": i for i in range(300)}
    first |= {"early": None, "once": 2}
    path.write_text(json.dumps(first) + "\n" + json.dumps(last) + "\n" * 3_000_000)
    tracemalloc.start()
    columns = read_columns(path)
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert {len(column) for column in columns.values()} == {2}
    np.testing.assert_equal(columns["late7"], [np.nan, 7])
    np.testing.assert_equal(columns["once"], [2, np.nan])
    np.testing.assert_equal(columns["early"], [np.nan, np.nan])


def test_a_run_without_end_of_metrics_or_memory_is_skipped(tmp_path: Path, monkeypatch) -> None:
    for name in ("good", "names"):
        write_run(tmp_path / name)
    path = tmp_path / "names" / "metrics.jsonl"
    *rows, last = path.read_text().splitlines()
    more = json.loads(last) | {f"k{i}": 1 for i in range(10_001)}
    path.write_text("\n".join([*rows, json.dumps(more), ""]))
    found = find_runs([str(tmp_path)])
    assert [run.path.name for run in found.runs] == ["good"]
    assert [line.partition(": ")[2] for line in found.skipped] == [
        f"its rows have too many metrics ({len(more):,})"
    ]

    def raises(path: Path) -> None:
        raise MemoryError

    monkeypatch.setattr("klrl.report.runs.read_columns", raises)
    assert len(find_runs([str(tmp_path)]).skipped) == 2


GOOD = {"name": "job", "overrides": ["seed=0"], "identity": "x", "numerics": 1}
WRONG: tuple[object, ...] = (
    *("text", 5, -1, 1e400, float("nan"), True, None, [], [[1]], {}, {"a": [1]}),
    *("\ud800", "\0", "x" * 300, 10**4000),
)


@pytest.mark.usefixtures("without_charts")
def test_no_sweep_json_ends_the_list_of_all_runs(tmp_path: Path, shown: Shown) -> None:
    """Every value in it of every wrong type."""
    runs = tmp_path / "runs"
    write_run(runs / "good")
    contents: list[object] = [*WRONG, {"commands": 5, "jobs": []}]
    contents += [
        {"commands": [], "jobs": [], name: v} for name in ("commands", "jobs") for v in WRONG
    ]
    contents += [{"commands": [v], "jobs": [v]} for v in WRONG]
    contents += [{"commands": ["x"], "jobs": [{**GOOD, key: v}]} for key in GOOD for v in WRONG]
    more = ("status", "error", "queue", "run")
    contents += [{"commands": ["x"], "jobs": [{**GOOD, key: v}]} for key in more for v in WRONG]
    for i, each in enumerate(contents):
        folder = runs / f"{i:03d}"
        folder.mkdir()
        (folder / "sweep.json").write_text(json.dumps(each))
    lines = shown("ls", str(runs)).splitlines()[1:]
    assert len(lines) == len(contents) + 1
    assert any(line.split()[:2] == ["good", "finished"] for line in lines)
    assert len(json.loads(shown("ls", str(runs), "--json"))) == len(lines)
    shown("report", str(runs), "-o", str(tmp_path / "report"))
    for i in range(len(contents)):
        shown("ls", str(runs / f"{i:03d}"))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        *((name, value, 2) for name in ("best_return", "iteration") for value in ("abc", [1])),
        *(("frames", None, 2), ("best_iteration", 1e400, 2), ("best_return", 10**400, 2)),
        *(("best_return", None, 0), ("best_return", float("nan"), 0)),
    ],
)
def test_counters_of_a_wrong_type_are_refused(
    name: str, value, code: int, settings, capsys
) -> None:
    """In an entry that is whole: its digests are those of what it holds."""
    run = klrl.run(settings("eval.every=1"), folder="run").folder
    for entry in run.glob("checkpoints/last/*"):
        state, manifest = (
            json.loads((entry / n).read_text()) for n in ("state.json", "manifest.json")
        )
        for item in state["counters"]["items"]:
            item[1] = value if item[0] == name else item[1]
        content = json.dumps(state).encode()
        (entry / "state.json").write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"]["state.json"] = {"bytes": len(content), "sha256": digest}
        text = json.dumps({**manifest, "sha256": "0" * 64})
        digest = hashlib.sha256(text.encode()).hexdigest()
        (entry / "manifest.json").write_text(text.replace("0" * 64, digest))
    assert exits("resume=run", "frames=192") == code
    if code:
        (line,) = capsys.readouterr().err.splitlines()
        assert "does not fit this run" in line
