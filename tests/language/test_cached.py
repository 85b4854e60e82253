"""Converted models are cached: built once, whole or not at all."""

import threading
from pathlib import Path

import pytest

from klrl.base.cache import cache_dir
from klrl.base.errors import ConfigError
from klrl.language.model.smollm import cached


def build(folder: Path) -> None:
    (folder / "whole").write_text("")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_ctrl_c_leaves_nothing_and_the_next_build_works_once(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached("model", interrupted, tmp_path)
    assert files(tmp_path) == []
    (tmp_path / ".model-killed").mkdir()  # what SIGKILL leaves
    assert files(cached("model", build, tmp_path)) == ["whole"]
    assert files(tmp_path) == ["model"]
    cached("model", lambda folder: pytest.fail("built again"), tmp_path)


def test_two_at_once_build_once(tmp_path: Path) -> None:
    started, go_on, builds = threading.Event(), threading.Event(), []

    def slow(folder: Path) -> None:
        builds.append(folder)
        started.set()
        assert go_on.wait(10)

    ask = [threading.Thread(target=cached, args=("model", slow, tmp_path)) for _ in range(2)]
    ask[0].start()
    assert started.wait(10)
    ask[1].start()
    ask[1].join(0.3)
    assert ask[1].is_alive()
    go_on.set()
    for thread in ask:
        thread.join(10)
    assert len(builds) == 1


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME: the model cannot be written"):
        cached("model", build, tmp_path / "file" / "klrl")


def test_the_cache_stands_where_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "klrl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_dir() == tmp_path / "elsewhere" / "klrl"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "klrl"
