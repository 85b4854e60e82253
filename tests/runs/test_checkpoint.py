"""Checkpoints: what is saved is loaded bit for bit; nothing damaged, hostile or half is."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.reliability.operations import Operations
from klrl.base.errors import ConfigError
from klrl.runs.checkpoint import Checkpoints, load_component

CPU = torch.device("cpu")
RUN = Path("run")
LAST, BEST = RUN / "checkpoints/last", RUN / "checkpoints/best"


class Held:
    """A component that keeps what it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def small(step: int) -> dict[str, Any]:
    """What a small run has at a step."""
    torch.manual_seed(step)
    return {
        "agent": Held({"weight": torch.randn(3, 5), "bias": torch.randn(3)}),
        "optimizer": Held({"exp_avg": torch.randn(18), "count": torch.tensor(float(step))}),
        "counters": Held({"frames": step, "best_return": -0.1}),
    }


def save(step: int, which: str = "last") -> None:
    Checkpoints(RUN / "checkpoints", small(step)).save(which, step, {"iteration": step // 64})


def load() -> int:
    """Restore ``last``; the step that it was of, by every component."""
    parts = {name: Held() for name in small(0)}
    Checkpoints(RUN / "checkpoints", parts).load_last(CPU)
    step = parts["counters"].state["frames"]
    for name, expected in small(step).items():
        assert_same(parts[name].state, expected.state)
    return step


def loaded_agent(which: str = "last") -> int:
    """The step of the weights that an evaluation takes."""
    part = Held()
    step = load_component(RUN, which, "agent", part, CPU)
    assert_same(part.state, small(step)["agent"].state)
    return step


def steps(folder: Path = LAST) -> list[int]:
    """Of the entries that are there."""
    return sorted(int(path.name.removeprefix("frames-")) for path in folder.iterdir())


def entry(step: int, folder: Path = LAST) -> Path:
    return folder / f"frames-{step:012d}"


def assert_same(mine: Any, theirs: Any) -> None:
    """Equal in type, order, shape, dtype and every bit."""
    assert type(mine) is type(theirs)
    if isinstance(mine, torch.Tensor):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (mine, theirs)]
        assert torch.equal(*bits)
    elif isinstance(mine, dict):
        assert list(mine) == list(theirs)
        assert getattr(mine, "_metadata", None) == getattr(theirs, "_metadata", None)
        for key in mine:
            assert_same(mine[key], theirs[key])
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs)
        for pair in zip(mine, theirs, strict=True):
            assert_same(*pair)
    else:
        assert repr(mine) == repr(theirs)  # NaN too


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Name -> content and time of every file."""
    return {
        str(path): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in sorted([folder, *folder.rglob("*")])
    }


# ----------------------------------------------------------------------------------- what is kept


def every_kind_of_state() -> OrderedDict[str, Any]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tied = torch.randn(5, 3)
    bits = torch.tensor([0x7FC1, 0xFFFF, 0x8000, 0x0001, 0x7F80], dtype=torch.int32)
    state: OrderedDict[str, Any] = OrderedDict(
        bfloat16=bits.to(torch.int16).view(torch.bfloat16),  # NaNs with payloads, -0, a subnormal
        half=torch.tensor([65504.0, -0.0], dtype=torch.float16),
        double=torch.tensor([1 / 3, float("nan"), float("-inf")], dtype=torch.float64),
        int64=torch.tensor([2**63 - 1, -(2**63)]),
        int32=torch.tensor([-5], dtype=torch.int32),
        bytes=torch.arange(7, dtype=torch.uint8),
        flags=torch.tensor([True, False, True]),
        scalar=torch.tensor(3.5),
        count=torch.tensor(7),
        empty=torch.empty(0, 3),
        transposed=base.T,
        strided=base[:, ::2],
        expanded=torch.ones(1, 3).expand(4, 3),
        view=base[1:3],
        tied=tied,
        also_tied=tied,
        parameter=torch.nn.Parameter(torch.randn(2, 2)).detach(),
        nested={"a/b": {"c": torch.ones(1)}, "a": [torch.zeros(2), (1, 2.5, None, "é", True)]},
        numbers=[2**70, 0.1, float("inf"), float("nan"), -0.0, "", "\u2028\ud83e\uddea"[:1]],
        nothing={},
    )
    state["by number"] = {0: torch.ones(1), 1: "x"}
    state._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    return state


def test_every_kind_of_state_comes_back_bit_for_bit() -> None:
    state, loaded = every_kind_of_state(), Held()
    Checkpoints(RUN / "checkpoints", {"part": Held(state)}).save("last", 1, {})
    Checkpoints(RUN / "checkpoints", {"part": loaded}).load_last(CPU)
    assert_same(loaded.state, state)


def test_other_programs_can_read_it() -> None:
    save(64)
    manifest = json.loads((entry(64) / "manifest.json").read_text())
    assert (manifest["format"], manifest["format_version"]) == ("klrl.checkpoint", 2)
    assert (manifest["frames"], manifest["metadata"]) == (64, {"iteration": 1})
    on_disk = {path.name: path.read_bytes() for path in entry(64).iterdir()}
    del on_disk["manifest.json"]
    assert manifest["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in on_disk.items()
    }
    with safe_open(entry(64) / "agent.safetensors", framework="pt") as file:
        assert_same({k: file.get_tensor(k) for k in ("weight", "bias")}, small(64)["agent"].state)
    assert {Path(name).suffix for name in on_disk} == {".json", ".safetensors"}


@pytest.mark.parametrize("value", [{1, 2}, b"x", torch.zeros(1, dtype=torch.complex128), object()])
def test_what_no_file_holds_is_refused_before_it_has_a_name(value) -> None:
    with pytest.raises(TypeError, match=r"part|set|bytes|complex|object"):
        Checkpoints(RUN / "checkpoints", {"part": Held({"x": value})}).save("last", 1, {})
    assert not list(RUN.rglob("frames-*"))
    assert not list(RUN.rglob(".staging-*"))


def test_the_last_two_entries_are_kept_and_one_best_without_moments() -> None:
    for step in (0, 64, 128, 192):
        save(step)
        save(step, "best")
    assert steps() == [128, 192]
    assert steps(BEST) == [192]
    assert (entry(192) / "optimizer.safetensors").is_file()
    assert not (entry(192, BEST) / "optimizer.safetensors").exists()
    assert "optimizer" not in json.loads((entry(192, BEST) / "state.json").read_text())
    assert (load(), loaded_agent("best")) == (192, 192)


def test_an_entry_is_on_the_disk_before_it_has_its_name(monkeypatch) -> None:
    told: list[str] = []
    save(0)
    sync, rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        told.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", lambda *a, **k: (told.append("rename"), rename(*a, **k)))
    save(64)
    files = sorted(path.name for path in entry(64).iterdir())
    before, after = told[: told.index("rename")], told[told.index("rename") + 1 :]
    assert sorted(before[:-1]) == files
    assert before[-2] == "manifest.json"
    assert before[-1].startswith(".staging-"), "the folder that lists them"
    assert after == ["last", "checkpoints"]


def test_what_kills_left_is_removed_by_the_next_save() -> None:
    save(0)
    left = (
        RUN / "checkpoints/.staging-0123",
        LAST / ".frames-000000000064.stage-0123",  # of format 1
        BEST / ".frames-000000000064.delete-0123",
    )
    for folder in left:
        shutil.copytree(entry(0), folder)
    assert load() == 0
    save(64)
    assert not any(folder.exists() for folder in left)
    assert steps() == [0, 64]


# ------------------------------------------------------------------------------ what is refused


def emptied(content: bytes) -> bytes:
    return b""


def cut(content: bytes) -> bytes:
    return content[:-1]


def flipped(content: bytes) -> bytes:
    place = random.Random(len(content)).randrange(8 * len(content))
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def zeroed(content: bytes) -> bytes:
    return bytes(len(content))


def randomised(content: bytes) -> bytes:
    return random.Random(0).randbytes(len(content))


DAMAGES = (emptied, cut, flipped, zeroed, randomised)
FILES = (
    "agent.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
    "state.json",
    "manifest.json",
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
    assert line.endswith("; frames-000000000064 is taken")


def test_every_bit_of_a_manifest_counts(capsys) -> None:
    save(64)
    path = entry(64) / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(ConfigError, match=r"no whole checkpoint \(.*manifest\.json"):
            load()
    path.write_bytes(whole)
    assert load() == 64


@pytest.mark.parametrize("damage", DAMAGES)
def test_with_no_whole_entry_left_all_are_named_in_one_line(damage, capsys) -> None:
    for step in (64, 128):
        save(step)
        path = entry(step) / "agent.safetensors"
        path.write_bytes(damage(path.read_bytes()))
    for read in (load, loaded_agent):
        with pytest.raises(ConfigError) as refused:
            read()
        line = str(refused.value)
        assert "\n" not in line
        assert all(f"{entry(step).name}/agent.safetensors: " in line for step in (64, 128))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_missing(file, capsys) -> None:
    save(64)
    save(128)
    (entry(128) / file).unlink()
    assert load() == loaded_agent() == 64
    assert capsys.readouterr().err.count(file) == 2


def test_a_file_that_the_manifest_does_not_list(capsys) -> None:
    save(64)
    save(128)
    (entry(128) / "notes.txt").write_text("mine")
    assert load() == loaded_agent() == 64
    assert capsys.readouterr().err.count("notes.txt: is not in its manifest") == 2


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
    with pytest.raises(ConfigError, match="no plain file"):
        load()


def test_a_newer_format_is_refused_by_name(capsys) -> None:
    save(64)
    save(128)
    path = entry(128) / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 3'))
    assert load() == 64
    assert "format is unknown to this version of klrl" in capsys.readouterr().err


def test_a_refused_entry_is_written_again_and_never_counts_as_kept() -> None:
    for step in (0, 64, 128):
        save(step)
    (entry(128) / "state.json").write_bytes(b"")
    parts = small(64)
    checkpoints = Checkpoints(RUN / "checkpoints", parts)
    checkpoints.load_last(CPU)
    assert parts["counters"].state["frames"] == 64
    checkpoints.save("last", 100, {})
    assert steps() == [64, 100], "the refused entry of frame 128 is none of the two"


def test_a_run_that_comes_to_a_refused_entry_again_writes_it() -> None:
    for step in (64, 128):
        save(step)
    (entry(128) / "state.json").write_bytes(b"")
    parts = small(64)
    checkpoints = Checkpoints(RUN / "checkpoints", parts)
    checkpoints.load_last(CPU)
    for name, part in small(128).items():
        parts[name].state = part.state
    checkpoints.save("last", 128, {})
    assert steps() == [64, 128]
    assert load() == 128


@pytest.mark.parametrize("step", [100, 128])
def test_a_killed_runs_newer_best_gives_way_to_that_of_the_resumed_run(step) -> None:
    """It was killed after a ``best`` newer than ``last``, and resumed with more frames, say."""
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
    from klrl.runs.entry import Entry

    save(64)
    check, trained = Entry.check, iter([128, 192])

    def check_while_training(self: Entry) -> None:
        for step in trained:
            save_quietly(step)
        check(self)

    def save_quietly(step: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Entry, "check", check)
            save(step)

    monkeypatch.setattr(Entry, "check", check_while_training)
    assert loaded_agent() == 192
    assert not capsys.readouterr().err


# ------------------------------------------------------------------------------------- pickles


class Payload:
    """Leaves a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("name", ["agent.pt", "other.pickle", "pickle.pkl", "sub/x.pkl", "agent"])
def test_a_pickle_in_an_entry_is_refused_by_name_and_never_run(name, listed, capsys) -> None:
    save(64)
    save(128)
    path = entry(128) / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(Payload()))
    if listed:
        sign(entry(128), name)
    assert load() == loaded_agent() == 64
    assert capsys.readouterr().err.count(name) == 2
    assert not Path("pwned").exists()


def test_a_pickle_in_the_place_of_weights_is_refused(capsys) -> None:
    save(64)
    save(128)
    (entry(128) / "agent.safetensors").write_bytes(pickle.dumps(Payload()))
    sign(entry(128), "agent.safetensors")
    assert load() == 64
    assert "agent.safetensors: " in capsys.readouterr().err
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


# ------------------------------------------------------------------------- kills and full disks


def operations_of_a_save() -> int:
    """How many there are, of the third save of a run."""
    save(0)
    save(64)
    shutil.copytree(RUN, "as_started")
    counted = Operations(-1, lambda name: None)
    with pytest.MonkeyPatch.context() as patch:
        counted.install(patch.setattr)
        save(128)
    return counted.done


def started() -> None:
    """A run with two entries and nothing else."""
    shutil.rmtree(RUN)
    shutil.copytree("as_started", RUN)


def kill(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_at_any_file_operation_leaves_a_whole_entry() -> None:
    total = operations_of_a_save()
    assert total > 30
    after = []
    for at in range(total):
        started()
        pid = os.fork()
        if not pid:
            Operations(at, kill).install()
            save(128)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, at
        after.append(load())
        assert loaded_agent() == after[-1]
        save(192)  # the run that goes on
        assert load() == 192
        assert not list(RUN.rglob(".staging-*")), at
        assert len(steps()) == 2
    assert after == sorted(after), "64 until the new entry has its name, 128 from then on"
    assert set(after) == {64, 128}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_write_is_an_error_and_loses_nothing(number) -> None:
    total, seen = operations_of_a_save(), set()

    def fail(name: str) -> None:
        seen.add(name)
        raise OSError(number, os.strerror(number))

    for at in range(total):
        started()
        told = ""
        with pytest.MonkeyPatch.context() as patch:
            Operations(at, fail).install(patch.setattr)
            try:
                save(128)
            except OSError as error:
                told = str(error)
        step = load()
        if step == 64:
            assert os.strerror(number) in told
        assert not told or "checkpoints/" in told, "which file"
        save(192)
        assert load() == 192
        assert not list(RUN.rglob(".staging-*")), at
    assert {"open", "write", "half a write", "fsync", "rename", "mkdir"} <= seen
