"""Checkpoints: what is saved is loaded bit for bit; the last two are kept, and the best."""

import hashlib
import json
import os
import shutil
from collections import OrderedDict
from typing import Any

import pytest
import torch
from safetensors import safe_open

from klrl.runs.checkpoint import Checkpoints, digests
from tests.conftest import name_of
from tests.runs.saves import (
    BEST,
    CPU,
    RUN,
    Held,
    assert_same,
    entry,
    load,
    loaded_agent,
    save,
    small,
    steps,
)


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
        expanded_one=base[0, 0].expand(1, 1),
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
    assert (manifest["format"], manifest["format_version"]) == ("klrl.checkpoint", 4)
    assert (manifest["frames"], manifest["metadata"]) == (64, {"iteration": 1})
    on_disk = {path.name: path.read_bytes() for path in entry(64).iterdir()}
    del on_disk["manifest.json"]
    assert manifest["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in on_disk.items()
    }
    with safe_open(entry(64) / "state.safetensors", framework="pt") as file:
        stored = {name: file.get_tensor(f"agent/{name}") for name in ("weight", "bias")}
    assert_same(stored, small(64)["agent"].state)
    assert set(on_disk) == {"state.json", "state.safetensors"}


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
    assert set(digests(RUN, "last", ("agent", "optimizer"))[1]) == {"agent", "optimizer"}
    assert set(digests(RUN, "best", ("agent", "optimizer"))[1]) == {"agent"}
    assert "optimizer" not in json.loads((entry(192, BEST) / "state.json").read_text())
    assert (load(), loaded_agent("best")) == (192, 192)


def test_an_entry_is_on_the_disk_before_it_has_its_name(monkeypatch) -> None:
    told: list[str] = []
    save(0)
    sync, rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        told.append(name_of(descriptor))
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
    left = RUN / "checkpoints/.staging-0123"
    shutil.copytree(entry(0), left)
    assert load() == 0
    save(64)
    assert not left.exists()
    assert steps() == [0, 64]
