"""A run folder from elsewhere imports nothing unasked: every door, every way to name code."""

import json
import os
import py_compile
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import klrl
from klrl.base.errors import ConfigError
from klrl.base.sources import source_of
from klrl.config.compose import job_config
from klrl.config.own.trust import NAMED, check_known
from tests.conftest import QUICK
from tests.runs.commands import exits

pytestmark = pytest.mark.integration

SHORT = (*QUICK, "frames=64")
#: The attacker's module: whoever imports it leaves a file.
EVIL = """
from pathlib import Path
import gymnasium
Path({marker!r}).touch()
if "Evil-v0" not in gymnasium.registry:
    gymnasium.register("Evil-v0", entry_point="gymnasium.envs.classic_control:PendulumEnv")
def make(**given): return gymnasium.make("Pendulum-v1")
def wrap(env): return env
def score(prompts, responses, rows): return [0.0] * len(responses)
"""
MAZE = """
import gymnasium
def make(g: float = 9.81): return gymnasium.make("Pendulum-v1", g=g)
def make_more(g: float = 9.81): return make(g)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of a second, of klrl's own parts."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    klrl.run(*SHORT, folder=folder)
    return folder


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "was-here"


@pytest.fixture
def foreign(finished: Path, tmp_path: Path, marker: Path, monkeypatch) -> Callable[..., Path]:
    """A run folder from elsewhere with other settings; its module is on Python's path too."""
    run = tmp_path / "theirs" / "run"
    shutil.copytree(finished, run)
    for folder in (run, tmp_path / "path"):
        folder.mkdir(exist_ok=True)
        (folder / "evil.py").write_text(EVIL.format(marker=str(marker)), encoding="utf-8")
    monkeypatch.setattr(sys, "path", sys.path[:])

    def made(**groups: dict[str, Any]) -> Path:
        stored = run / ".hydra" / "config.yaml"
        settings = yaml.safe_load(stored.read_text("utf-8"))
        for group, changes in groups.items():
            settings[group] |= changes
        stored.write_text(yaml.safe_dump(settings), encoding="utf-8")
        _without_hash(run)
        return run

    return made


def _without_hash(run: Path) -> None:
    """As whoever forges a run would write its manifest: nothing says that settings were edited."""
    file = run / "manifest.json"
    manifest = json.loads(file.read_text("utf-8"))
    manifest.pop("config_hash", None)
    file.write_text(json.dumps(manifest), encoding="utf-8")


def touches(marker: Path) -> dict[str, Any]:
    return {"args": f"touch {marker}", "shell": True}


#: What is named -> settings of the run, from the run folder and the marker.
WAYS: dict[str, Callable[[Path, Path], dict[str, dict[str, Any]]]] = {
    "a function of Python": lambda run, marker: {
        "env": {"name": "custom", "target": "subprocess:Popen", "args": touches(marker)}
    },
    "a function in C": lambda run, marker: {
        "env": {"name": "custom", "target": "posix:system", "args": {"command": f">{marker}"}}
    },
    "a file in the folder": lambda run, marker: {
        "env": {"name": "custom", "target": "evil:make", "path": str(run)}
    },
    "an id": lambda run, marker: {"env": {"id": "evil:Evil-v0"}},
    "a wrapper": lambda run, marker: {
        "env": {"wrappers": [{"target": "evil:wrap", "args": {}, "path": str(run)}]}
    },
    "a controller": lambda run, marker: {
        "controller": {"name": "custom", "target": "evil:make", "path": str(run)}
    },
}
DOORS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "evaluate": lambda run: ("evaluate", str(run), "--episodes", "1"),
    "resume": lambda run: (f"resume={run}", "frames=128"),
    "reference.path": lambda run: (*SHORT, "reference=checkpoint", f"reference.path={run}"),
    "actor.init": lambda run: (*SHORT, f"actor.init={run}"),
}


@pytest.mark.parametrize(
    ("named", "door"),
    [(way, "evaluate") for way in WAYS] + [("a controller", door) for door in [*DOORS][1:]],
)
def test_no_door_imports_what_a_foreign_run_names(
    foreign, marker: Path, capsys, monkeypatch, tmp_path: Path, named: str, door: str
) -> None:
    run = foreign()
    foreign(**WAYS[named](run, marker))
    if named == "an id":
        monkeypatch.syspath_prepend(str(tmp_path / "path"))
    before = sys.path[:]
    assert exits(*DOORS[door](run)) == 2
    said = capsys.readouterr()
    assert not marker.exists()
    assert "evil" not in sys.modules
    assert str(run) not in sys.path
    assert set(sys.path) == set(before)
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert f"add trust={run}" in said.err
    assert not any((tmp_path / "outputs").glob("*"))


@pytest.mark.parametrize("spelled", ["evil.py:score", "deep/evil.py:score"])
def test_a_rewards_file_is_code_too(tmp_path: Path, spelled: str) -> None:
    (tmp_path / spelled).parent.mkdir(exist_ok=True)
    (tmp_path / spelled.partition(":")[0]).write_text("def score(p, r, rows): ...\n", "utf-8")
    env = job_config(["experiment=sort_digits", f"env.reward={spelled}"]).env
    NAMED.clear()
    said = f"env.reward would import and call {spelled} from {(tmp_path / spelled).parent}"
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_known(tmp_path / "run", [], env)


def test_python_is_refused_too(foreign, marker: Path) -> None:
    run = foreign(env={"name": "custom", "target": "evil:make"})
    foreign(env={"path": str(run)})
    for load in (lambda: klrl.load_policy(run), klrl.load_run(run).evaluate):
        with pytest.raises(ConfigError, match="env.target would import and call evil:make from"):
            load()
    assert not marker.exists()
    assert klrl.load_run(run).rows, "what was recorded needs no code"
    klrl.load_policy(run, trust=True)
    assert marker.exists()


@pytest.mark.parametrize("door", ["resume", "evaluate"])
def test_a_manifest_describes_a_reference(foreign, marker: Path, capsys, door: str) -> None:
    """A resumed run, and KL in an evaluation, build it from there."""
    run = foreign(reference={"name": "checkpoint", "path": "gone", "which": "last"})
    (run / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n", encoding="utf-8")
    file = run / "manifest.json"
    manifest = yaml.safe_load(file.read_text("utf-8"))
    actor = yaml.safe_load((run / ".hydra/config.yaml").read_text("utf-8"))["actor"]
    network = {"name": "custom", "distribution": "auto", "target": "evil:make", "path": str(run)}
    manifest["reference"] = {"actor": {**actor, **network}, "normalize": True}
    file.write_text(json.dumps(manifest), encoding="utf-8")
    words = (f"resume={run}", "frames=128") if door == "resume" else ("evaluate", str(run))
    assert exits(*words) == 2
    assert "actor.target would import and call evil:make" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            "${oc.env:KLRL_SECRET}",
            "actor: its stored settings: ${oc.env:KLRL_SECRET} is an interpolation",
        ),
        ("tan", "actor.activation=tan: "),
    ],
)
def test_a_described_reference_is_checked_as_settings_are(
    foreign, capsys, monkeypatch, value: str, said: str
) -> None:
    """The variable was read and told, in a traceback."""
    monkeypatch.setenv("KLRL_SECRET", "hunter2")
    run = foreign(reference={"name": "checkpoint", "path": "gone", "which": "last"})
    manifest = json.loads((run / "manifest.json").read_text("utf-8"))
    actor = yaml.safe_load((run / ".hydra/config.yaml").read_text("utf-8"))["actor"]
    manifest["reference"] = {"actor": {**actor, "activation": value}, "normalize": True}
    (run / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert exits(f"resume={run}", "frames=128") == 2
    assert said in capsys.readouterr().err


def test_a_module_that_klrl_asks_for_is_known_only_where_it_is_installed(
    foreign, marker: Path, monkeypatch, capsys
) -> None:
    """``python -m klrl evaluate .`` has the run's folder on the path."""
    run = foreign(env={"id": "evil:Evil-v0"})
    monkeypatch.setattr("klrl.base.sources.requirements", lambda: frozenset({"evil"}))
    monkeypatch.syspath_prepend(str(run))
    assert exits("evaluate", str(run), "--episodes", "1") == 2
    assert f"env.id would import and call evil:Evil-v0 from {run}" in capsys.readouterr().err
    assert not marker.exists()


def test_compiled_code_is_refused_by_its_place(foreign, marker: Path, capsys) -> None:
    """It was told as "from Python itself"."""
    run = foreign(controller={"name": "custom", "target": "evil:make"})
    foreign(controller={"path": str(run), "args": {}, "source": None, "version": None})
    py_compile.compile(str(run / "evil.py"), str(run / "evil.pyc"))
    (run / "evil.py").unlink()
    assert exits("evaluate", str(run), "--episodes", "1") == 2
    assert f"call evil:make from {run / 'evil.pyc'}, and none of" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("door", ["evaluate", "resume", "actor.init"])
def test_the_word_allows_it(foreign, marker: Path, capsys, door: str) -> None:
    run = foreign()
    source = source_of("evil", [str(run)]).digest
    part = {"target": "evil:make", "path": str(run), "source": source}
    foreign(env={"name": "custom", "id": "evil:make", **part})
    words = DOORS[door](run)
    elsewhere = (*words[:-1], f"trust={run.parent}", words[-1])
    assert exits(*elsewhere) == 2, "another run is trusted, not this one"
    assert not marker.exists()
    assert exits(*words, f"trust={run}") == 0, capsys.readouterr().err


def test_code_that_the_command_line_names_is_not_foreign(
    foreign, marker: Path, monkeypatch, tmp_path: Path
) -> None:
    run = foreign()
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    foreign(env={"id": "evil:Evil-v0"})
    assert exits("evaluate", str(run), "--episodes", "1") == 2
    assert exits("evaluate", str(run), "--episodes", "1", "env.id=evil:Evil-v0") == 0
    assert marker.exists()


# ------------------------------------------------------------------------------- what one ran


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A run of this user's with an environment of their own."""
    (tmp_path / "maze.py").write_text(MAZE, encoding="utf-8")
    words = ("env=custom", "env.target=maze:make", "env.args.g=9.5", *SHORT[1:])
    klrl.run(*words, folder=tmp_path / "mine")
    return forget(tmp_path / "mine")


def forget(run: Path) -> Path:
    """As a new process would begin."""
    sys.modules.pop("maze", None)
    NAMED.clear()
    return run


def evaluated(run: Path, *words: str) -> int:
    forget(run)
    return exits("evaluate", str(run), "--episodes", "1", *words)


def test_ones_own_code_is_known(mine: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    assert evaluated(mine) == 0
    assert evaluated(mine, "env.args.g=3") == 0, "args that are given now are no foreign ones"
    moved = tmp_path / "moved"
    shutil.copytree(mine, moved)
    assert evaluated(moved) == 0, "wherever the run is"
    capsys.readouterr()

    (tmp_path / "maze.py").write_text(MAZE + "\nimport math\n", encoding="utf-8")
    assert evaluated(mine) == 0
    assert "env.target=maze:make: has changed since this run began" in capsys.readouterr().err
    forget(mine)
    assert exits(f"resume={mine}", "frames=128") == 2
    assert "has changed since this run began" in capsys.readouterr().err
    assert evaluated(moved) == 2, "a run at another place may be anyone's"
    assert "none of your runs has called it" in capsys.readouterr().err

    (tmp_path / "maze.py").write_text(MAZE, encoding="utf-8")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-user"))
    assert evaluated(mine) == 2


def test_a_student_of_ones_own_teacher_is_evaluated(tmp_path: Path) -> None:
    """Its manifest describes the teacher's network, whose source may have changed since."""
    net = "import torch\ndef net(inputs, outputs): return torch.nn.Linear(inputs, outputs)\n"
    (tmp_path / "maze.py").write_text(net, encoding="utf-8")
    custom = ("actor=custom", "actor.target=maze:net")
    klrl.run(*SHORT, *custom, folder=tmp_path / "teacher")
    taught = ("reference=checkpoint", f"reference.path={tmp_path / 'teacher'}")
    klrl.run(*SHORT, *taught, folder=tmp_path / "student")
    (tmp_path / "maze.py").write_text(net + "import math\n", encoding="utf-8")
    assert evaluated(tmp_path / "student") == 0


@pytest.mark.parametrize(
    "change", [{"target": "maze:make_more"}, {"args": {"g": 3.0}}, {"name": "gym", "id": "maze:X"}]
)
def test_the_same_module_called_otherwise_is_not(mine: Path, change: dict) -> None:
    stored = mine / ".hydra" / "config.yaml"
    settings = yaml.safe_load(stored.read_text("utf-8"))
    settings["env"] |= change
    if "id" in change:
        for name in ("target", "args", "path", "source", "version"):
            del settings["env"][name]
    stored.write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert evaluated(mine) == 2


def test_another_module_of_that_name_and_text_is_not(mine: Path, tmp_path: Path, capsys) -> None:
    """A digest of ``.py`` files says nothing of the ``.pyc`` beside them."""
    there = tmp_path / "there"
    shutil.move(mine, there)
    shutil.move(tmp_path / "maze.py", there / "maze.py")
    stored = there / ".hydra" / "config.yaml"
    text = stored.read_text("utf-8").replace(f"path: {tmp_path}\n", f"path: {there}\n")
    stored.write_text(text, encoding="utf-8")
    assert evaluated(there) == 2
    assert f"maze:make with {{'g': 9.5}} from {there}, and none of" in capsys.readouterr().err


def test_a_stored_path_is_searched_for_nothing_else(mine: Path, tmp_path: Path) -> None:
    stored = mine / ".hydra" / "config.yaml"
    text = stored.read_text("utf-8").replace(f"path: {tmp_path}\n", f"path: {mine}\n")
    stored.write_text(text, encoding="utf-8")
    assert evaluated(mine) == 0
    assert str(mine) not in sys.path


def test_a_state_folder_that_others_write_says_nothing(mine: Path, tmp_path: Path, capsys) -> None:
    (Path(os.environ["XDG_STATE_HOME"]) / "klrl" / "code").chmod(0o770)
    try:
        assert evaluated(mine) == 2
        assert "can be written by others (chmod go-w)" in capsys.readouterr().err
        words = ("env=custom", "env.target=maze:make", *SHORT[1:])
        klrl.run(*words, folder=tmp_path / "second")
        assert "code that you ran: " in capsys.readouterr().err, "the run goes on, and says so"
    finally:
        (Path(os.environ["XDG_STATE_HOME"]) / "klrl" / "code").chmod(0o700)


# ------------------------------------------------------------------------------- plain values


@pytest.mark.parametrize("door", ["evaluate", "reference.path"])
def test_a_variable_in_a_stored_config_is_not_read(
    foreign, capsys, monkeypatch, tmp_path: Path, door: str
) -> None:
    monkeypatch.setenv("KLRL_SECRET", "hunter2")
    run = foreign(env={"kwargs": {"g": "${oc.env:KLRL_SECRET}"}})
    assert exits(*DOORS[door](run)) == 2
    said = capsys.readouterr()
    assert "${oc.env:KLRL_SECRET} is an interpolation" in said.err
    found = [p for p in tmp_path.rglob("*") if p.is_file() and b"hunter2" in p.read_bytes()]
    assert not found
    assert "hunter2" not in said.out + said.err
    with pytest.raises(ConfigError, match="is an interpolation"):
        klrl.run(yaml.safe_load((run / ".hydra/config.yaml").read_text("utf-8")))
