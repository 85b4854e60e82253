"""A run folder is read back by every command; what is broken in it is told in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import klrl
from klrl.base.errors import ConfigError
from klrl.report.listing import entries
from klrl.report.runs import find_runs
from klrl.runs.folder import RunFolder
from klrl.runs.resume import stored_config

BROKEN = {
    "domain": ({"domain": "chess"}, "names the domain 'chess', which this klrl does not know"),
    "pid": ({"pid": "seven"}, "is broken (pid 'seven' is no number)"),
    "numerics": ({"numerics": "first"}, "is broken (numerics 'first' is no number)"),
}


@pytest.fixture
def run(settings) -> RunFolder:
    """A run that another process would be making now."""
    run = RunFolder(Path("outputs/run"))
    run.open(settings("kl.coef=0.3"))
    return run


@pytest.mark.parametrize("case", BROKEN)
def test_a_manifest_that_cannot_be_read_is_told_by_every_command(run: RunFolder, case: str) -> None:
    entry, told = BROKEN[case]
    manifest = {**run.manifest, **entry}
    (run.path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    told = f"its manifest.json {told}"
    with pytest.raises(ConfigError) as refused:
        klrl.load_run(run.path)
    assert str(refused.value) == f"folder=outputs/run: {told}; give another run"
    assert find_runs(["outputs"]).skipped == [f"outputs/run: {told}"]
    (listed,) = entries(Path("outputs"))
    assert (listed.path, listed.state, listed.note) == (run.path, "broken", told)


@pytest.mark.parametrize("word", ["frames=600", "+frames=600", "++frames=600"])
def test_a_resumed_run_takes_what_may_change_with_any_sign(run: RunFolder, word: str) -> None:
    assert stored_config(run.path, [word]).frames == 600


@pytest.mark.parametrize("word", ["kl.coef=1", "+kl.coef=1", "~frames"])
def test_a_resumed_run_keeps_all_else(run: RunFolder, word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        stored_config(run.path, [word])
    assert str(refused.value).startswith(f"{word}: a resumed run keeps it; only frames, device")


def test_a_manifest_nested_without_end_is_a_broken_one() -> None:
    from klrl.runs.folder import BrokenRun, read_manifest

    Path("run").mkdir()
    Path("run/manifest.json").write_text("[" * 100_000)
    with pytest.raises(BrokenRun, match=r"manifest.json is broken .*recursion"):
        read_manifest(Path("run"))
