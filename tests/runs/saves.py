"""Checkpoints of a small run: to save, load and damage them."""

import os
import random
from pathlib import Path
from typing import Any

import torch

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
        bits = [torch.cat([x.reshape(-1)]).view(torch.uint8) for x in (mine, theirs)]
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
FILES = ("state.safetensors", "state.json", "manifest.json")


class Payload:
    """Leaves a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)
