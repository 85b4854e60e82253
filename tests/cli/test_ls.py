"""``klrl ls``: how runs and sweeps stand, of folders made by hand."""

import json
from datetime import datetime
from pathlib import Path

from klrl.cli.ls import ls_command
from klrl.report.listing import last_values
from klrl.report.runs import find_runs
from tests.report.toys import rows_of, write_run, write_sweep
from tests.runs.commands import live_elsewhere


def listed(capsys, *words: str) -> list[list[str]]:
    """The lines of ``klrl ls``, each by its columns of two or more spaces."""
    assert ls_command(list(words)) == 0
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[1:]]


def at(day: int) -> str:
    return f"2026-01-{day:02d}T12:00:00+00:00"


def local(day: int) -> str:
    return datetime.fromisoformat(at(day)).astimezone().strftime("%Y-%m-%d %H:%M")


def test_a_line_says_state_progress_return_and_kl(tmp_path, capsys) -> None:
    """The reward rises by one per row; the KL is that of the last row."""
    write_run(tmp_path / "b", started=at(1))
    write_run(tmp_path / "a", started=at(2), rows=rows_of(reward=-7.0, kl=-1e-9)[:11])
    assert listed(capsys, str(tmp_path)) == [
        ["b", "finished", "2,000/2,000 frames", "100%", "0", "1", local(1)],
        ["a", "finished", "1,100/2,000 frames", "55%", "-16", "0", local(2)],
    ]


def test_the_closing_evaluation_has_its_error_and_stands_beside_the_best(tmp_path, capsys) -> None:
    rows = rows_of(reward=5.0)
    rows[9] |= {"eval/return": 40.0, "eval/return_se": 3.0}
    config = {"eval": {"every": None, "evaluations": 10}}
    write_run(tmp_path / "a", rows=rows, config=config, started=at(1))
    best = {"eval/best_return": -141.25, "eval/best_return_se": 12.3}
    rows[19] |= {"eval/return": -152.68, "eval/return_se": 9.9, "eval/kl_ref": 0.125, **best}
    write_run(tmp_path / "b", rows=rows, config=config, started=at(2))
    # An evaluation of one episode has no error, and not that of the one before.
    del rows[19]["eval/return_se"]
    write_run(tmp_path / "c", rows=rows, config=config, started=at(3))
    assert [line[4:-2] for line in listed(capsys, str(tmp_path))] == [
        ["40.0 +- 3.0"],
        ["-152.7 +- 9.9", "-141 +- 12"],
        ["-152.68", "-141 +- 12"],
    ]
    assert ls_command([str(tmp_path), "--json"]) == 0
    keys = ("return", "return_se", "best_return", "best_return_se", "kl")
    assert [[run[key] for key in keys] for run in json.loads(capsys.readouterr().out)] == [
        [40.0, 3.0, None, None, 1.0],
        [-152.68, 9.9, -141.25, 12.3, 0.125],
        [-152.68, None, -141.25, 12.3, 0.125],
    ]


def test_a_run_whose_process_is_gone_was_interrupted(tmp_path, capsys) -> None:
    write_run(tmp_path / "a", started=at(1))
    live_elsewhere(tmp_path / "a")
    write_run(tmp_path / "b", status="running", started=at(2))
    write_run(tmp_path / "c", status="failed", error="the loss is nan\nmore", started=at(3))
    lines = listed(capsys, str(tmp_path))
    assert [line[1] for line in lines] == ["running", "interrupted", "failed"]
    assert lines[2][-1] == "the loss is nan"


def sweep(root: Path) -> Path:
    """Five jobs: their manifests know better than sweep.json."""
    write_sweep(
        root,
        ("seed=0", ["seed=0"], "waiting", None),
        ("seed=1", ["seed=1"], "waiting", None),
        ("seed=2", ["seed=2"], "failed", "no model there"),
        ("seed=3", ["seed=3"], "waiting", None),
        ("seed=4", ["seed=4"], "running", None),
    )
    write_run(root / "seed=0", started=at(3))
    write_run(root / "seed=1", started=at(2), status="interrupted", rows=rows_of()[:1])
    return root


def test_a_sweep_is_a_line_and_its_folder_lists_the_jobs(tmp_path, capsys) -> None:
    sweep(tmp_path / "deep" / "first")
    write_run(tmp_path / "last", started=at(9))
    first, last = listed(capsys, str(tmp_path))
    assert first == [
        "deep/first",
        "failed",
        "1/5 jobs",
        "20%",
        local(2),
        "1 failed, 1 finished, 1 interrupted, 2 waiting",
    ]
    assert last[0] == "last"
    write_run(tmp_path / "deep" / "first" / "beside")
    jobs = listed(capsys, str(tmp_path / "deep" / "first"))
    assert [line[:2] for line in jobs] == [
        ["seed=0", "finished"],
        ["seed=1", "interrupted"],
        ["seed=2", "failed"],
        ["seed=3", "waiting"],
        ["seed=4", "waiting"],
        ["beside", "finished"],
    ]
    assert jobs[1][2:4] == ["100/2,000 frames", "5%"]
    assert jobs[2][-1] == "no model there"


def test_what_is_broken_is_a_line_and_no_end(tmp_path, capsys) -> None:
    write_run(tmp_path / "half")
    (tmp_path / "half" / "manifest.json").write_text("{")
    write_run(tmp_path / "open")
    (tmp_path / "open" / ".hydra" / "config.yaml").write_text("a: [")
    sweep(tmp_path / "three")
    (tmp_path / "three" / "sweep.json").write_text('{"jobs": 3}')
    write_run(tmp_path / "gone")
    (tmp_path / "gone" / ".hydra" / "config.yaml").unlink()
    write_run(tmp_path / "other")
    (tmp_path / "other" / "manifest.json").write_text('{"entries": []}')
    write_run(tmp_path / "cut")
    metrics = tmp_path / "cut" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"frames": 99')
    sweep(tmp_path / "jobs")
    (tmp_path / "jobs" / "seed=0" / "manifest.json").write_text("[]")
    lines = {line[0]: line[1:] for line in listed(capsys, str(tmp_path))}
    assert lines["half"][0] == lines["open"][0] == lines["three"][0] == "broken"
    assert "its manifest.json is broken" in lines["half"][-1]
    assert "its .hydra/config.yaml is broken" in lines["open"][-1]
    assert "the list of jobs is broken" in lines["three"][-1]
    assert lines["gone"] == ["broken", "it has no .hydra/config.yaml"]
    assert lines["other"] == ["broken", "its manifest.json does not belong to a run (no status)"]
    assert lines["cut"][:2] == ["finished", "2,000/2,000 frames"]
    assert lines["jobs"][:2] == ["failed", "0/5 jobs"]
    assert "1 broken" in lines["jobs"][-1]


def test_json_holds_the_same(tmp_path, capsys) -> None:
    write_run(tmp_path / "a", started=at(1), rows=rows_of(kl=0.25)[:10])
    sweep(tmp_path / "first")
    assert ls_command([str(tmp_path), "--json"]) == 0
    run, jobs = json.loads(capsys.readouterr().out)
    assert run == {
        "path": str(tmp_path / "a"),
        "state": "finished",
        "unit": "frames",
        "done": 1000,
        "total": 2000,
        "started": at(1),
        "return": -10.0,
        "return_se": None,
        "best_return": None,
        "best_return_se": None,
        "kl": 0.25,
        "note": "",
    }
    assert jobs["jobs"] == {"failed": 1, "finished": 1, "interrupted": 1, "waiting": 2}
    assert (jobs["done"], jobs["total"], jobs["unit"]) == (1, 5, "jobs")


def test_a_file_of_many_blocks_is_read_from_its_end(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"frames": i, "x" * 50_000: 1.0} for i in range(9)]
    rows[0]["reward/episode"] = 3.0
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert last_values(path) == {**rows[8], "reward/episode": 3.0}
    path.write_text("")
    assert last_values(path) == {}
    assert last_values(tmp_path / "none") == {}


def test_a_link_to_runs_on_another_disk_is_followed_once(tmp_path, capsys) -> None:
    """A run with two names, and a link to the folder above, are listed once."""
    disk, outputs = tmp_path / "disk", tmp_path / "outputs"
    write_run(disk / "a", seed=1)
    write_run(outputs / "b", started=at(3))
    (outputs / "latest").symlink_to(outputs / "b")
    (outputs / "moved").symlink_to(disk)
    (outputs / "above").symlink_to(tmp_path)
    (disk / "outputs").symlink_to(outputs)
    names = [line[0] for line in listed(capsys, str(outputs))]
    assert sorted(Path(outputs, name).resolve().name for name in names) == ["a", "b"]
    assert [run.path.name for run in find_runs([str(outputs / "moved")]).runs] == ["a", "b"]
