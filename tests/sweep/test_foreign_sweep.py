"""A sweep's folder from elsewhere: nothing in it is written through, and no pickle is loaded."""

import dataclasses
import json
import os
import pickle
import time
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution, distribution_to_json

from klrl.sweep import queue, slurm
from klrl.sweep.jobs import make_jobs
from tests.sweep.commands import FOLDER, SLURM, sweep

SEARCH = (
    *("search=optuna", "search.metric=reward/raw", "kl.coef=interval(0.05,0.2)"),
    *("search.trials=1", "search.at_once=1"),
)


@pytest.fixture
def precious() -> Path:
    """A file and a folder that links lead to."""
    folder = Path("precious").resolve()
    folder.mkdir()
    (folder / "file").write_text("text")
    FOLDER.mkdir(parents=True)
    return folder


def is_untouched(precious: Path) -> bool:
    return [(p.name, p.read_text()) for p in precious.iterdir()] == [("file", "text")]


@pytest.mark.parametrize(
    ("name", "to", "words"),
    [
        ("owner.json", "file", ()),
        ("owner.json", "new", ()),
        (".submitit", ".", ("launcher=submitit", "launcher.cluster=local")),
        ("study.journal", "file", SEARCH),
        ("job", ".", ()),
        ("job/log.txt", "new", ("launcher=joblib", "launcher.n_jobs=2")),
    ],
)
def test_a_link_in_a_sweeps_folder_is_refused(name, to, words, precious: Path, capfd) -> None:
    (FOLDER / name).parent.mkdir(exist_ok=True)
    (FOLDER / name).symlink_to(precious / to)
    assert sweep("frames=64", *words) == 2
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert f"{Path(name).name} is a link" in said.replace(f"{name}: is", f"{name} is"), said
    assert is_untouched(precious)
    if "/" not in name:
        assert (FOLDER / name).is_symlink(), "klrl removes nothing that it did not write"


def test_a_link_in_place_of_a_file_that_is_replaced_is_replaced(precious: Path) -> None:
    for name in ("sweep.tmp", "job/manifest.tmp", "job/.hydra/config.tmp", "job/curves.png"):
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / name).symlink_to(precious / "file")
    assert sweep("frames=64") == 0
    assert is_untouched(precious)
    assert not (FOLDER / "job" / "curves.png").is_symlink()


@pytest.mark.parametrize("name", ["../../../elsewhere", "/elsewhere", "..", ".", "a/b"])
def test_a_job_stays_in_its_sweeps_folder(name: str, precious: Path, capsys) -> None:
    job = {"name": name, "overrides": [], "identity": ""}
    (FOLDER / "sweep.json").write_text(json.dumps({"commands": [""], "jobs": [job]}))
    assert sweep("frames=64") == 2
    assert f"name={name} is outside the sweep's folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("sweep.json", "pipe", "the list of jobs is broken (OSError: it is not a regular file)"),
        ("sweep.json", "deep", "the list of jobs is broken (RecursionError: "),
        ("sweep.json", "number", "the list of jobs is broken (TypeError: 'int' object is not"),
        ("sweep.json", "folder", "the list of jobs is broken (OSError: it is not a regular file)"),
        ("sweep.tmp", "folder", "sweep.tmp: is a folder, where klrl writes a file; move it away"),
    ],
)
def test_what_is_no_file_in_a_sweeps_folder_is_refused(name, kind, said, precious, capsys) -> None:
    path = FOLDER / name
    texts = {"deep": "[" * 10**5, "number": '{"commands": [], "jobs": 3}'}
    make = {"pipe": os.mkfifo, "folder": Path.mkdir}
    make.get(kind, lambda path: path.write_text(texts[kind]))(path)
    assert sweep("frames=64") == 2
    assert said in capsys.readouterr().err


def study(*logs: dict) -> None:
    """A journal with a trial that was running."""
    begin = {"op_code": 0, "worker_id": "w", "study_name": "klrl", "directions": [2]}
    began = "2026-01-01T00:00:00.000000"
    trial = {"op_code": 4, "worker_id": "w", "study_id": 0, "datetime_start": began}
    lines = [json.dumps(each) + "\n" for each in (begin, trial, *logs)]
    (FOLDER / "study.journal").write_text("".join(lines))


def test_a_search_takes_no_words_but_its_own(precious: Path, capsys) -> None:
    Path("evil.py").write_text("open('ran', 'w')")
    value = "0.1 controller=custom controller.target=evil:Controller"
    given = {"param_name": "kl.coef", "param_value_internal": 0.0}
    given["distribution"] = distribution_to_json(CategoricalDistribution([value]))
    study({"op_code": 5, "worker_id": "w", "trial_id": 0, **given})
    assert sweep("frames=64", *SEARCH) == 2
    said = capsys.readouterr().err
    assert "study.journal: trial 0 has values that are not searched (kl.coef=0.1 contr" in said
    assert not Path("ran").exists()


@pytest.mark.parametrize("text", ["{}\n", "[1]\n", "\n", '{"op_code": 99}\n'])
def test_a_broken_study_is_refused_in_a_line(text: str, precious: Path, capsys) -> None:
    (FOLDER / "study.journal").write_text(text)
    assert sweep("frames=64", *SEARCH) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "study.journal: the study is broken (" in line
    assert "move it away" in line


def test_a_lock_beside_a_study_is_nobodys(precious: Path) -> None:
    """The sweep's folder is locked; Optuna waited 30 seconds for whoever left this."""
    study()
    (FOLDER / "study.journal.lock").symlink_to(FOLDER / "study.journal")
    began = time.monotonic()
    assert sweep("frames=64", *SEARCH) == 0
    assert time.monotonic() - began < 20


class Planted:
    """Its pickle writes a file when it is loaded."""

    def __reduce__(self):
        return exec, ("open('planted.txt', 'w').write('ran')",)


def test_no_pickle_that_lay_in_a_sweeps_folder_is_loaded(settings, monkeypatch) -> None:
    """As submitit calls the outcome of a job: in ``.submitit`` itself, and below it."""
    (job,) = make_jobs(FOLDER, [("job", [], settings())])
    for folder in (queue.submissions(FOLDER), queue.submissions(FOLDER) / "more"):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("12_0_result.pkl", "12_outcome.json"):
            (folder / name).write_bytes(pickle.dumps(("success", Planted())))
    monkeypatch.setattr(slurm, "in_queue", lambda folder: {})
    monkeypatch.setattr(slurm, "about", lambda queue: {"JobState": "COMPLETED"})
    monkeypatch.setattr(queue, "_ASK", 0.0)
    (outcome,) = queue.submitit(SLURM, [dataclasses.replace(job, queued="12")], FOLDER)
    assert (outcome.name, outcome.status) == ("job", "failed")
    assert not Path("planted.txt").exists()


def test_what_a_job_unpickles_lies_in_a_folder_that_its_sweep_made() -> None:
    FOLDER.mkdir(parents=True)
    folders = [Path(queue._executor(SLURM, FOLDER, "local").folder) for _ in range(2)]
    assert len({*folders}) == 2
    for each in folders:
        assert each.parent == queue.submissions(FOLDER)
        assert each.stat().st_mode & 0o777 == 0o700
        assert not list(each.iterdir())
