"""Parts of the user's own: how they are found, their args, what is refused in one line."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

import pytest

from klrl.base.errors import ConfigError
from klrl.base.sources import source_of
from klrl.config.compose import allow_env_kwargs, job_config
from klrl.config.identity import canonical, settings_hash
from klrl.config.own import changed_sources, check_sources, complete, make_own

MODULE = """
from __future__ import annotations
from dataclasses import dataclass, field
import math
from klrl import setting
import helper

@dataclass
class RuledConfig:
    target: float = setting(gt=0, help="nats per step")
    factor: float = setting(0.5, gt=0, le=1)
    shape: str = setting("line", allowed=("line", "cosine"))
    steps: list[int] = setting([1, 2])
    most: float | None = None

class Ruled:
    def __init__(self, coef, target, factor, shape, steps, most):
        self.got = (coef, target, factor, shape, steps, most)

class Plain:
    def __init__(self, coef, frames, rate: float, power: int = 2, name="a", **given):
        self.got = (coef, frames, rate, power, name, given)

class All:
    def __init__(self, rate: float = 1.0, **given): self.got = (rate, given)

class Base:
    def __init__(self, coef, depth: int = 1): self.depth = depth

class Derived(Base):
    def __init__(self, width: int = 8, **given):
        super().__init__(**given)
        self.width = width

def function(coef, rate: float = 1.0): return (coef, rate)
def unread(coef, a: Nowhere = 1.5, b: int = 2): return (coef, a, b)
def nothing_there(coef, a: math.nothing = 1.5): return (coef, a)
def no_type(coef, a: "3 +" = 1.5): return (coef, a)
def no_union(coef, a: 1 | "b" = 1.5): return (coef, a)
def by_pairs(coef, a: dict[tuple[int, int], int] = None, b: int = 2): return (coef, a, b)
def raises(coef): raise RuntimeError("no")
number = 3
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
    return job_config(allow_env_kwargs(own))


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        job(*words)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def test_args_are_typed_by_the_dataclass_beside_the_class(module: str) -> None:
    words = ["controller.target=parts:Ruled", "controller.args.target=1", "controller.args.most=3"]
    part = job(*words, "controller.args.steps=[3]").controller
    expected = {"target": 1.0, "factor": 0.5, "shape": "line", "steps": [3], "most": 3.0}
    assert part.args == expected
    assert type(part.args["target"]) is float
    made = make_own("controller", part, {"coef": 7, "frames": 100})
    assert made.got == (7, 1.0, 0.5, "line", [3], 3.0)


def test_without_one_by_the_arguments_of_the_class(module: str) -> None:
    part = job("controller.target=parts:Plain", "controller.args.rate=2").controller
    assert part.args == {"rate": 2.0, "power": 2, "name": "a"}
    made = make_own("controller", part, {"coef": 7, "frames": 100})
    assert made.got == (7, 100, 2.0, 2, "a", {})
    part = job("controller.target=parts:All", "controller.args.rate=2").controller
    made = make_own("controller", part, {"coef": 7, "frames": 100})
    assert made.got == (2.0, {"coef": 7, "frames": 100}), "**given of a plain class takes all"
    part = job("controller.target=parts:Derived", "controller.args.depth=3").controller
    assert part.args == {"width": 8, "depth": 3}, "**given goes on to the class above"
    assert make_own("controller", part, {"coef": 7, "frames": 9}).depth == 3
    part = job("controller.target=parts:Derived").controller
    assert part.args == {"width": 8}, "what the class above has by default is left to it"
    assert make_own("controller", part, {"coef": 7, "frames": 9}).depth == 1
    part = job("controller.target=parts:function").controller
    assert make_own("controller", part, {"coef": 7, "frames": 9}) == (7, 1.0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "controller.target: has no value; give one, as in controller.target=package.module:"),
        (["target=parts"], "controller.target=parts: write package.module:Name"),
        (["target=part:Ruled"], "importing part fails (ModuleNotFoundError: No module named"),
        (["target=parts:Rulde"], "parts has no Rulde; did you mean Ruled?"),
        (["target=parts:number"], "is of type int; name a class or a function"),
        (["target=__main__:X"], "has no file; write it into a module"),
        (["target=parts:Ruled"], "controller.args.target: has no value; give one"),
        (["target=parts:Ruled", "args.target=x"], "controller.args.target=x: give a number"),
        (["target=parts:Ruled", "args.target=0"], "args.target=0.0: out of range; give a finite"),
        (["target=parts:Ruled", "args.target=1", "args.factr=1"], "did you mean factor?"),
        (["target=parts:Ruled", "args.target=1", "args.shape=l"], "choose one of line, cosine"),
        (["target=parts:Ruled", "args.target=1", "args.coef=1"], "args.coef: klrl gives it; drop"),
        (["target=parts:Ruled", "args.target=1", "args.steps=3"], "args.steps=3: give a list"),
        (
            ["target=parts:Plain"],
            "asks for rate, which klrl does not give (it gives coef, frames); add "
            "controller.args.rate=..., or give it a default",
        ),
        (["target=parts:Plain", "args.rate=2", "args.power=1.5"], "power=1.5: give a whole number"),
        (["target=parts:All", "args.rat=2"], "parts:All has no such argument; did you mean rate?"),
        (["target=parts:Derived", "args.widht=2"], "parts:Derived has no such argument; did you"),
        (["target=parts:function", "source=abc"], "controller.source: klrl finds it out; drop it"),
    ],
)
def test_each_way_of_getting_it_wrong_is_one_line(module: str, words: list[str], said: str) -> None:
    told = refused(*(f"controller.{word}" for word in words))
    assert said in told
    assert told.startswith("controller.")


@pytest.mark.parametrize("name", ["unread", "nothing_there", "no_type", "no_union"])
def test_types_that_cannot_be_read_are_not_checked(module: str, name: str) -> None:
    """A name that only a type checker imports, another's attribute, no expression, no union."""
    part = job(f"controller.target=parts:{name}", "controller.args.a=x").controller
    assert make_own("controller", part, {"coef": 7})[:2] == (7, "x")


def test_a_type_that_no_setting_has_is_not_checked_and_others_are(module: str) -> None:
    words = ["controller.target=parts:by_pairs", "controller.args.b=1.5"]
    assert "controller.args.b=1.5: give a whole number" in refused(*words)
    part = job(words[0], "controller.args.a=x").controller
    assert make_own("controller", part, {"coef": 7}) == (7, "x", 2)


def test_a_part_that_raises_is_told_with_its_line(module: str) -> None:
    part = job("controller.target=parts:raises").controller
    line = MODULE.splitlines().index('def raises(coef): raise RuntimeError("no")') + 1
    with pytest.raises(ConfigError, match=rf"raised RuntimeError: no \(line {line} of parts.py\)"):
        make_own("controller", part, {"coef": 1, "frames": 2})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss.args.x=1"], "loss.args: only loss=custom reads it; choose that, or drop it"),
        (["loss.beta_rule=custom"], "which one? add loss.own_beta_rule.target=package.module:Name"),
        (["loss.own_beta_rule.target=a:b"], "only loss.beta_rule=custom reads it"),
        (["kl.estimator=custom"], "which one? add kl.own_estimator.target=package.module:name"),
        (
            ["kl.estimator=custom", "kl.own_estimator.target=parts:function"],
            "in the reward only k1 has the gradient of the KL (docs/kl.md); use kl.placement=loss",
        ),
        (
            ["env.wrappers=[parts:Nothing]"],
            "env.wrappers[0].target=parts:Nothing: parts",
        ),
        (["actor.own_critic=parts:Plain"], "actor.own_critic: no such setting"),
    ],
)
def test_a_part_within_a_group_is_refused_in_one_line(module, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        job_config(allow_env_kwargs(["logger=none", *words]))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


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
    with pytest.raises(ConfigError, match="bring it back, or start another run"):
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


def test_an_installed_package_is_known_by_its_version() -> None:
    import gymnasium

    found = source_of("gymnasium.wrappers")
    assert (found.digest, found.version) == (None, gymnasium.__version__)


def test_completing_twice_changes_nothing(module: str) -> None:
    config = job("controller.target=parts:Ruled", "controller.args.target=1")
    before = settings_hash(config)
    complete(config)
    assert settings_hash(config) == before


def test_cfg_job_tells_what_the_dataclass_says(module: str, capsys) -> None:
    from klrl.__main__ import main

    words = ("controller=custom", "controller.target=parts:Ruled", "controller.args.target=2")
    with pytest.raises(SystemExit) as stop:
        main([*words, "--cfg", "job"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "    target: 2.0  # nats per step\n    factor: 0.5\n    shape: line\n" in text
    assert "  source: " in text
