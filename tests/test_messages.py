"""Every error in one line: the words in ``messages/*.yaml``, and what klrl says to them.

An entry is ``{words: a command line as a shell reads it, says: a part of the error, or several}``;
``files: {path: text}`` are there beforehand. Exit code 2, one line, nothing written.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from klrl.__main__ import main

ENTRIES = [
    pytest.param(entry, id=f"{path.stem}: {entry['words'][:70]}")
    for path in sorted(Path(__file__).with_name("messages").glob("*.yaml"))
    for entry in yaml.safe_load(path.read_text("utf-8"))
]


def tree() -> dict[Path, int]:
    """Every path below the current folder, with the time of its last change.

    An empty ``outputs`` is nothing: a sweep makes it before it knows its own folder's name.
    """
    paths = set(Path().rglob("*")) - {Path("outputs")}
    return {path: path.lstat().st_mtime_ns for path in paths}


@pytest.mark.integration
@pytest.mark.parametrize("entry", ENTRIES)
def test_wrong_words_are_answered_in_one_line(entry: dict[str, Any], capsys) -> None:
    assert entry.keys() <= {"words", "says", "files"}
    for path, text in entry.get("files", {}).items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    before = tree()
    with pytest.raises(SystemExit) as stop:
        main(shlex.split(entry["words"]))
    said = capsys.readouterr()
    assert (stop.value.code, said.out, len(said.err.splitlines())) == (2, "", 1), said
    says = entry["says"]
    for part in [says] if isinstance(says, str) else says:
        assert part in said.err
    assert tree() == before
