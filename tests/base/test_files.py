"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from klrl.base.files import replace_file, replacing


def test_a_reader_sees_the_old_text_until_the_new_one_is_whole(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "manifest.json"
    replace_file(path, "before")
    seen = []
    rename = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (seen.append(to.read_text()), rename(self, to))[1]
    )
    replace_file(path, "naïve")
    assert (seen, path.read_bytes()) == (["before"], "naïve".encode())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("folder", [False, True])
def test_what_is_half_written_leaves_nothing(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "model"

    def write(text: str, error: type[BaseException] | None = None) -> None:
        with replacing(path) as partial:
            if folder:
                partial.mkdir()
            (partial / "weights" if folder else partial).write_text(text)
            assert not path.exists()
            if error:
                raise error

    with pytest.raises(KeyboardInterrupt):
        write("half", KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []
    write("whole")
    assert (path / "weights" if folder else path).read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]
