"""Custom parts: how they are found, and their args; what is refused: tests/messages/parts.yaml."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

import pytest

from klrl.base.errors import ConfigError
from klrl.base.sources import source_of
from klrl.config.compose import job_config
from klrl.config.identity import canonical, settings_hash
from klrl.config.own import changed_sources, check_sources, complete, make_own
from tests.runs.commands import exits

MODULE = """
from __future__ import annotations
import math
from pathlib import Path
from typing import Annotated, Literal
from pydantic import Field
import helper

class Ruled:
    def __init__(
        self,
        coef,
        target: Annotated[float, Field(gt=0)],
        factor: Annotated[float, Field(gt=0, le=1)] = 0.5,
        shape: Literal["line", "cosine"] = "line",
        steps: list[int] = (1, 2),
        most: float | None = None,
        place: Path | None = None,
    ):
        self.got = (coef, target, factor, shape, steps, most, place)

class Plain:
    def __init__(self, coef, frames, rate: float, power: int = 2, name="a", **given):
        self.got = (coef, frames, rate, power, name, given)

class All:
    def __init__(self, rate: float = 1.0, **given): self.got = (rate, given)

class Base:
    def __init__(self, coef, depth: int = 1): self.depth = depth

class Derived(Base):
    def __init__(self, coef, frames, width: int = 8, **more):
        super().__init__(coef, **more)
        self.width = width

def function(coef, rate: float = 1.0): return (coef, rate)
def unread(coef, a: Nowhere = 1.5, b: int = 2): return (coef, a, b)
def nothing_there(coef, a: math.nothing = 1.5): return (coef, a)
def no_type(coef, a: "3 +" = 1.5): return (coef, a)
def no_union(coef, a: 1 | "b" = 1.5): return (coef, a)
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    """``parts.py`` and the ``helper.py`` that it imports, in the current folder."""
    (tmp_path / "parts.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "helper.py").write_text("A = 1\n", encoding="utf-8")
    importlib.invalidate_caches()
    return "parts"


def job(*words: str):
    own = ["env=pendulum", "logger=none", "controller=custom", *words]
    return job_config(own)


def test_args_are_typed_by_the_annotations(module: str) -> None:
    words = ["controller.target=parts:Ruled", "controller.args.target=1", "controller.args.most=3"]
    part = job(*words, "controller.args.steps=['3']", "controller.args.place=x/y").controller
    expected = {"target": 1.0, "factor": 0.5, "shape": "line", "steps": [3], "most": 3.0}
    assert part.args == {**expected, "place": "x/y"}, "what a YAML holds"
    assert type(part.args["target"]) is float
    made = make_own("controller", part, {"coef": 7, "frames": 100})
    assert made.got == (7, 1.0, 0.5, "line", [3], 3.0, "x/y")
    part = job(*words, "controller.args.most=null").controller
    assert part.args == {"target": 1.0, "factor": 0.5, "shape": "line", "most": None, "place": None}


def test_defaults_and_what_klrl_gives(module: str) -> None:
    part = job("controller.target=parts:Plain", "controller.args.rate=2").controller
    assert part.args == {"rate": 2.0, "power": 2, "name": "a"}
    made = make_own("controller", part, {"coef": 7, "frames": 100})
    assert made.got == (7, 100, 2.0, 2, "a", {})
    part = job("controller.target=parts:All", "controller.args.rate=2").controller
    made = make_own("controller", part, {"coef": 7, "frames": 100})
    assert made.got == (2.0, {"coef": 7, "frames": 100}), "**given of a plain class takes all"
    part = job("controller.target=parts:Derived", "controller.args.depth=3").controller
    assert part.args == {"width": 8, "depth": 3}, "all that klrl gives is named: **more is free"
    assert make_own("controller", part, {"coef": 7, "frames": 9}).depth == 3
    part = job("controller.target=parts:function").controller
    assert make_own("controller", part, {"coef": 7, "frames": 9}) == (7, 1.0)


@pytest.mark.parametrize("name", ["unread", "nothing_there", "no_type", "no_union"])
def test_types_that_cannot_be_read_are_not_checked(module: str, name: str) -> None:
    """A name that only a type checker imports, another's attribute, no type."""
    part = job(f"controller.target=parts:{name}", "controller.args.a=x").controller
    assert make_own("controller", part, {"coef": 7})[:2] == (7, "x")


# ---------------------------------------------------------------------------------- its source


def forget() -> None:
    """As a new process would begin."""
    for name in ("parts", "helper"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def test_a_changed_source_is_another_job(module: str, tmp_path: Path) -> None:
    words = ["controller.target=parts:function"]
    first = job(*words)
    assert first.controller.path == str(tmp_path)
    assert settings_hash(first) == settings_hash(job(*words))
    assert "path" not in canonical(first)["controller"], "where it was found changes no result"
    assert canonical(first)["controller"]["source"] == first.controller.source
    (tmp_path / "unrelated.py").write_text("B = 2\n", encoding="utf-8")
    assert settings_hash(first) == settings_hash(job(*words))
    (tmp_path / "helper.py").write_text("A = 2\n", encoding="utf-8")  # which parts.py imports
    with pytest.raises(ConfigError, match=r"the files of parts have changed since this process"):
        job(*words)
    forget()
    second = job(*words)
    assert settings_hash(second) != settings_hash(first)
    (line,) = changed_sources(first)
    assert line.startswith("controller.target=parts:function: has changed since this run began")
    with pytest.raises(ConfigError, match="restore it, or start a new run"):
        check_sources(first)
    check_sources(second)
    (tmp_path / "helper.py").write_text("A = 1\n", encoding="utf-8")
    forget()
    assert settings_hash(job(*words)) == settings_hash(first)


def test_the_digest_is_over_names_and_bytes(tmp_path: Path, monkeypatch) -> None:
    """Computed here by hand: a package's files, sorted, with those that they import."""
    package = tmp_path / "pack" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("", encoding="utf-8")
    (package / "__init__.py").write_text("import math, torch\n", encoding="utf-8")
    (package / "part.py").write_text("def f():\n    from beside import A\n", encoding="utf-8")
    (tmp_path / "pack" / "data.txt").write_text("no source", encoding="utf-8")
    (tmp_path / "beside.py").write_text("A = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    whole = hashlib.sha256()
    for name, file in (
        ("beside/beside.py", tmp_path / "beside.py"),
        ("pack/__init__.py", tmp_path / "pack/__init__.py"),
        ("pack/inner/__init__.py", package / "__init__.py"),
        ("pack/inner/part.py", package / "part.py"),
    ):
        whole.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    found = source_of("pack.inner.part")
    assert found.digest == whole.hexdigest()[:12]
    assert (found.folder, found.version) == (str(tmp_path), None)


def test_completing_twice_changes_nothing(module: str) -> None:
    config = job("controller.target=parts:Ruled", "controller.args.target=1")
    before = settings_hash(config)
    complete(config)
    assert settings_hash(config) == before


def test_cfg_job_shows_args_and_source(module: str, capsys) -> None:
    words = ("controller=custom", "controller.target=parts:Ruled", "controller.args.target=2")
    assert exits(*words, "--cfg", "job") == 0
    text = capsys.readouterr().out
    assert "    target: 2.0\n    factor: 0.5\n    shape: line\n" in text
    assert "  source: " in text
