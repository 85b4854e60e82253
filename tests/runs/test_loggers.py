"""``logger=tensorboard``: the rows, read by TensorBoard."""

import json
from pathlib import Path
from typing import Any

import pytest

from klrl.domains import CONTROL, LANGUAGE
from klrl.runs.folder import RunFolder
from klrl.runs.loggers import LoggedRun, open_loggers

written = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs klrl[tensorboard]"
)

ROWS = [
    {"frames": 64, "kl/ref/exact": 0.5, "eval/return": -3.0},
    {"frames": 128, "kl/ref/exact": 0.25, "eval/return": None},
]


def events(run: Path) -> Any:
    read = written.EventAccumulator(
        str(run / "tensorboard"), {"tensors": 0, "scalars": 0, "images": 0}
    )
    read.Reload()
    return read


def from_tensorboard(run: Path) -> dict[str, list[tuple[int, float]]]:
    read = events(run)
    return {
        name: [(each.step, each.value) for each in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }


def series(rows: list[dict]) -> dict[str, list[tuple[int, float]]]:
    """What the loggers should hold of ``metrics.jsonl``."""
    names = {name for row in rows for name in row}
    return {
        name: [(row["frames"], row[name]) for row in rows if row.get(name) is not None]
        for name in names
    }


def opened(folder: Path, rows=None, domain=CONTROL) -> LoggedRun:
    settings = {"kl": {"coef": 0.1}}
    guard = RunFolder(folder).guard
    return LoggedRun(folder, settings, None, "id", domain, guard, lambda: rows or [], print)


def test_rows_are_read_back_by_tensorboard(settings, tmp_path) -> None:
    config = settings("logger=none", "logger.also=[tensorboard]").logger
    with open_loggers(config, opened(tmp_path, [])) as (logger,):
        for row in ROWS:
            logger.log(row)
    assert from_tensorboard(tmp_path) == series(ROWS)
    text = events(tmp_path).Tensors("settings/text_summary")[0].tensor_proto.string_val[0]
    assert json.loads(text) == {"kl": {"coef": 0.1}}


def test_a_file_that_is_a_link_loses_the_link_alone(settings, tmp_path) -> None:
    """Of a run from elsewhere."""
    (precious := tmp_path / "mine").write_text("mine")
    link = tmp_path / "tensorboard" / "events.out.tfevents.1"
    link.parent.mkdir()
    link.symlink_to(precious)
    with open_loggers(settings("logger=tensorboard").logger, opened(tmp_path, ROWS)):
        assert not link.is_symlink()
    assert precious.read_text() == "mine"


def test_a_resumed_run_writes_its_files_anew_from_the_rows_that_it_keeps(
    settings, tmp_path
) -> None:
    config = settings("logger=tensorboard").logger
    mine = tmp_path / "tensorboard" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with open_loggers(config, opened(tmp_path, [])) as (logger,):
        logger.log(ROWS[0])
        logger.log({"frames": 128, "kl/ref/exact": 9.0, "kl/ref/k1": 1.0})  # cut by the resume
    with open_loggers(config, opened(tmp_path, ROWS[:1])) as (logger,):
        logger.log(ROWS[1])
    assert from_tensorboard(tmp_path) == series(ROWS)
    assert mine.read_text() == "mine", "a user's file stays"


def test_responses_are_text_in_tensorboard(settings, tmp_path) -> None:
    config = settings("logger=tensorboard").logger
    samples = [{"prompt": "3 1 2", "response": "1 2 3", "reward": 1.0}]
    with open_loggers(config, opened(tmp_path, [], LANGUAGE)) as (logger,):
        logger.log({"samples": 64, "kl/ref/k1": 0.5})
        logger.log_samples(samples)
    told = events(tmp_path).Tensors("samples_shown/text_summary")[0]
    assert told.step == 64
    assert json.loads(told.tensor_proto.string_val[0]) == samples
