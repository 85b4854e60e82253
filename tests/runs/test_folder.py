"""A run folder is read back by every command; what is broken in it is told in a line."""

import json
from pathlib import Path

import pytest

import klrl
from klrl.base.errors import ConfigError
from klrl.config.given import Given
from klrl.report.listing import entries
from klrl.report.runs import find_runs
from klrl.runs.folder import RunFolder
from klrl.runs.resume import stored_config
from klrl.train.start import OutputFolder

BROKEN = {
    "domain": ({"domain": "chess"}, "names the domain 'chess', unknown to this version of klrl"),
    "pid": ({"pid": "seven"}, "is broken (pid 'seven' is not a number)"),
    "numerics": ({"numerics": "first"}, "is broken (numerics 'first' is not a number)"),
    "started": ({"started": [1]}, "is broken (started [1] is not a string)"),
    "argv": ({"argv": 3}, "is broken (argv 3 is not a list)"),
    "resumed": ({"resumed": 4}, "is broken (resumed 4 is not a list)"),
    "side_failures": ({"side_failures": "x"}, "is broken (side_failures 'x' is not a list)"),
    "domains": ({"domain": ["control"]}, "is broken (domain ['control'] is not a string)"),
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
    assert stored_config(run.path, [Given(word)]).frames == 600


@pytest.mark.timeout(20)
def test_settings_with_aliases_in_aliases_are_not_expanded(run: RunFolder) -> None:
    lines = [
        "a0: &a0 [x]",
        *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)),
    ]
    (run.path / ".hydra" / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"config.yaml is broken \(it has an alias"):
        stored_config(run.path)
    (skipped,) = find_runs(["outputs"]).skipped
    assert "config.yaml is broken (it has an alias, which klrl never writes)" in skipped


def test_a_manifest_that_is_garbled_while_the_run_goes_on_is_written_again(run: RunFolder) -> None:
    before = run.manifest
    (run.path / "manifest.json").write_text("{")
    run.close("interrupted", frames=3)
    assert run.manifest | {"ended": 0} == before | {
        **{"status": "interrupted", "frames": 3, "pid": None, "ended": 0}
    }


def test_a_folder_below_home_is_not_made_in_one_named_tilde(monkeypatch, tmp_path: Path) -> None:
    """No shell expands the ~ in hydra.run.dir=~/run or in folder="~/run"."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    OutputFolder("~/run", "folder=~/run").make()
    assert (tmp_path / "home" / "run").is_dir()
    assert not Path("~").exists()
