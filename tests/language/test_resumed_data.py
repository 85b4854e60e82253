"""A run goes on with the rows that it began with, and with no others."""

import json
from pathlib import Path

import pytest

from klrl.base.errors import ConfigError
from klrl.config import SortDigitsConfig, TextConfig
from klrl.language.data.prompts import PromptStream
from klrl.language.data.tasks import make_task, text
from tests.language.test_refusals import text_job
from tests.runs.commands import exits, manifest_of, said
from tests.transforms import llm_toys as toys

RESUME = ("resume=run", "frames=48")
ROWS = [{"prompt": f"user{i}", "answer": str(i), "level": str(i)} for i in range(6)]
REMEDY = "its rows have changed since the run began; restore them, or start a new run"


def write(file: str, rows: list[dict]) -> None:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("\n".join(map(json.dumps, rows)))


def stream(**settings: object) -> PromptStream:
    config = TextConfig(**{"data": "data.jsonl", "reward": "exact", **settings})
    return text(config, seed=0).stream(toys.tokenizer(), None)


@pytest.mark.integration
def test_a_run_is_not_resumed_with_other_rows(capsys, model: str) -> None:
    assert exits(*text_job(model, list(map(json.dumps, ROWS)))) == 0
    before, manifest = Path("run/metrics.jsonl").read_bytes(), manifest_of(Path("run"))
    write("data.jsonl", [*ROWS, {"prompt": "more", "answer": "7"}])
    code, _, err = said(capsys, *RESUME)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert f": env.data=data.jsonl: {REMEDY}" in err
    assert "network" not in err
    assert (Path("run/metrics.jsonl").read_bytes(), manifest_of(Path("run"))) == (before, manifest)
    write("data.jsonl", ROWS)
    assert said(capsys, *RESUME)[::2] == (0, "")


@pytest.mark.parametrize(
    "rows",
    [
        [*ROWS, ROWS[0]],
        ROWS[:-1],
        ROWS[::-1],
        [{**ROWS[0], "answer": "9"}, *ROWS[1:]],
        [{**ROWS[0], "level": 0}, *ROWS[1:]],
    ],
    ids=["more", "fewer", "order", "answer", "type"],
)
def test_rows_that_are_not_the_same_are_told(rows: list[dict]) -> None:
    write("data.jsonl", ROWS)
    state = stream().state_dict()
    write("data.jsonl", rows)
    with pytest.raises(ConfigError) as caught:
        stream().load_state_dict(state)
    assert str(caught.value) == f"env.data=data.jsonl: {REMEDY}"


@pytest.mark.parametrize(
    ("settings", "file", "named"),
    [
        ({"eval_data": "other.jsonl"}, "other.jsonl", "env.eval_data=other.jsonl"),
        ({"eval_share": 0.5}, "data.jsonl", "env.data=data.jsonl"),
    ],
    ids=str,
)
def test_rows_of_evaluation_count_too(settings: dict, file: str, named: str) -> None:
    for each in ("data.jsonl", "other.jsonl"):
        write(each, ROWS)
    state = stream(**settings).state_dict()
    stream(**settings).load_state_dict(state)
    write(file, ROWS[1:])
    with pytest.raises(ConfigError) as caught:
        stream(**settings).load_state_dict(state)
    assert str(caught.value) == f"{named}: {REMEDY}"


def test_the_same_rows_written_otherwise_are_the_same() -> None:
    write("data.jsonl", ROWS)
    state = {**stream().state_dict(), "served": 5}
    Path("data.jsonl").write_text(
        "\n\n".join(json.dumps(dict(reversed(row.items())), indent=None) for row in ROWS) + "\n"
    )
    again = stream()
    again.load_state_dict(state)
    assert again.served == 5


def test_a_run_that_noted_no_rows_goes_on() -> None:
    write("data.jsonl", ROWS)
    older = stream()
    older.load_state_dict({"served": 3})
    assert older.served == 3
    digits = SortDigitsConfig("exact", shortest=1, longest=2, shots=0, name="sort_digits")
    task = make_task(digits, seed=0)
    assert task.stream(toys.tokenizer(), None).state_dict() == {"served": 0}
