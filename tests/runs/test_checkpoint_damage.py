"""Nothing damaged, hostile or half is loaded: it is refused by name, and the entry before taken."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from klrl.base.errors import ConfigError
from klrl.runs.checkpoint import Checkpoints, load_component
from tests.runs.saves import (
    BEST,
    CPU,
    DAMAGES,
    FILES,
    RUN,
    Held,
    Payload,
    assert_same,
    entry,
    load,
    loaded_agent,
    save,
    small,
    snapshot,
    steps,
)


def test_these_are_the_files_of_an_entry() -> None:
    save(64)
    assert {path.name for path in entry(64).rglob("*")} == set(FILES)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("read", [load, loaded_agent])
def test_a_damaged_entry_is_refused_and_the_one_before_taken(file, damage, read, capsys) -> None:
    save(64)
    save(128)
    path = entry(128) / file
    path.write_bytes(damage(path.read_bytes()))
    before = snapshot(RUN)
    assert read() == 64
    assert snapshot(RUN) == before, "reading writes nothing"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"checkpoint {entry(128)} is refused ({file}: ")
    assert line.endswith(", so frames-000000000064 is used")


@pytest.mark.integration
def test_every_bit_of_a_manifest_counts(capsys) -> None:
    save(64)
    path = entry(64) / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(ConfigError, match=r"no complete checkpoint \(.*manifest\.json"):
            load()
    path.write_bytes(whole)
    assert load() == 64


@pytest.mark.parametrize("damage", DAMAGES)
def test_with_no_whole_entry_left_all_are_named_in_one_line(damage, capsys) -> None:
    for step in (64, 128):
        save(step)
        path = entry(step) / "state.safetensors"
        path.write_bytes(damage(path.read_bytes()))
    for read in (load, loaded_agent):
        with pytest.raises(ConfigError) as refused:
            read()
        line = str(refused.value)
        assert "\n" not in line
        assert all(f"{entry(step).name}/state.safetensors: " in line for step in (64, 128))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_missing(file, capsys) -> None:
    save(64)
    save(128)
    (entry(128) / file).unlink()
    assert load() == loaded_agent() == 64
    assert capsys.readouterr().err.count(file) == 2


@pytest.mark.parametrize("kind", ["fifo", "folder", "dangling link"])
def test_what_is_no_plain_file_is_not_opened(kind) -> None:
    save(64)
    save(128)
    path = entry(128) / "extra"
    {
        "fifo": lambda: os.mkfifo(path),
        "folder": lambda: (path.mkdir(), (path / "x").write_text("")),
        "dangling link": lambda: path.symlink_to("/nowhere"),
    }[kind]()
    assert load() == 64
    path = entry(64) / "manifest.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        load()


@pytest.mark.parametrize("version", [3, 5])
def test_another_format_is_refused_by_its_version(version, capsys) -> None:
    save(64)
    save(128)
    path = entry(128) / "manifest.json"
    path.write_text(path.read_text().replace('_version": 4', f'_version": {version}'))
    assert load() == 64
    assert (
        f"has the format klrl.checkpoint {version}, and this klrl reads 4"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("step", [100, 128])
def test_a_refused_entry_gives_way_to_the_next_and_never_counts_as_kept(step) -> None:
    for each in (0, 64, 128):
        save(each)
    (entry(128) / "state.json").write_bytes(b"")
    parts = small(64)
    checkpoints = Checkpoints(RUN / "checkpoints", parts)
    checkpoints.load_last(CPU)
    assert parts["counters"].state["frames"] == 64
    for name, part in small(step).items():
        parts[name].state = part.state
    checkpoints.save("last", step, {})
    assert steps() == [64, step], "the refused entry of frame 128 is none of the two"
    assert load() == step


@pytest.mark.parametrize("step", [100, 128])
def test_a_killed_runs_newer_best_gives_way_to_that_of_the_resumed_run(step) -> None:
    save(64)
    save(128, "best")
    parts = small(64)
    checkpoints = Checkpoints(RUN / "checkpoints", parts)
    checkpoints.load_last(CPU)
    parts["agent"].state = {"weight": torch.tensor(0.25)}
    checkpoints.save("best", step, {})
    assert steps(BEST) == [step]
    part = Held()
    load_component(RUN, "best", "agent", part, CPU)
    assert_same(part.state, {"weight": torch.tensor(0.25)})


def test_an_entry_that_the_run_drops_while_it_is_read_is_no_fault(monkeypatch, capsys) -> None:
    """An evaluation beside a run that trains: of the two entries listed both may go."""
    from klrl.runs.entry import CheckpointEntry

    save(64)
    check, trained = CheckpointEntry.check, iter([128, 192])

    def check_while_training(self: CheckpointEntry) -> None:
        for step in trained:
            save_quietly(step)
        check(self)

    def save_quietly(step: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckpointEntry, "check", check)
            save(step)

    monkeypatch.setattr(CheckpointEntry, "check", check_while_training)
    assert loaded_agent() == 192
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "listed"), [("agent.pt", False), ("sub/x.pkl", True), ("state.safetensors", True)]
)
def test_a_pickle_in_an_entry_is_refused_by_name_and_never_run(name, listed, capsys) -> None:
    save(64)
    save(128)
    path = entry(128) / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(Payload()))
    if listed:
        sign(entry(128), name)
    assert load() == loaded_agent() == 64
    assert capsys.readouterr().err.count(f"({Path(name).parts[0]}: ") == 2
    assert not Path("pwned").exists()


def sign(folder: Path, name: str) -> None:
    """List a file in a manifest as whoever writes the whole folder can."""
    path, content = folder / "manifest.json", (folder / name).read_bytes()
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    blank = json.dumps({**manifest, "sha256": "0" * 64}, indent=2) + "\n"
    digest = hashlib.sha256(blank.encode()).hexdigest()
    path.write_text(blank.replace("0" * 64, digest))


def test_signing_is_what_makes_a_manifest_whole() -> None:
    save(64)
    sign(entry(64), "state.json")
    assert load() == 64
