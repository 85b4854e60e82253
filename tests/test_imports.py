"""The house: each room imports rooms below it, no module imports in a circle.

Read from the sources: every ``import`` counts, inside functions and under ``TYPE_CHECKING`` too.
What is looked up by name (``"module:name"`` in the registry, the lazy faces) is no arrow: nothing
there is imported until it is asked for.
"""

from __future__ import annotations

import ast
import importlib
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import klrl
from klrl.base.moved import COMMANDS, PUBLIC
from tests.conftest import QUICK

PACKAGE = Path(klrl.__file__).parent

#: Rooms by floor, from the ground up; a room imports rooms of lower floors and itself.
FLOORS = (
    {"base"},
    {"config", ""},  # "" is klrl/__init__.py
    {"domains", "kl"},
    {"runs", "transforms"},
    {"losses"},
    {"train"},
    {"control", "language"},
    {"doctor", "sweep"},
    {"report"},
    {"api"},
    {"cli"},
    {"__main__"},
)


def modules(package: Path) -> dict[str, Path]:
    """Every module of a package, by name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The package's modules that a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: klrl imports by full names"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from {inner if inner in known else node.module} & known.keys()
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & known.keys()


def arrows(package: Path) -> dict[str, set[str]]:
    """module -> modules that it imports."""
    known = modules(package)
    return {name: set(imports(path, known)) - {name} for name, path in known.items()}


def upward(package: Path) -> list[str]:
    """Imports that do not go down, as ``importer -> imported``."""
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

    def room(module: str) -> str:
        return [*module.split("."), ""][1]

    return [
        f"{name} -> {other}"
        for name, others in arrows(package).items()
        for other in sorted(others)
        if room(name) != room(other) and floor[room(name)] <= floor[room(other)]
    ]


def circles(package: Path) -> list[list[str]]:
    """Modules that reach themselves over imports, a list each."""
    graph = arrows(package)
    left = {name: set(others) for name, others in graph.items()}
    # Take away what imports nothing that is left, until nothing more can go.
    while done := [name for name, others in left.items() if not others & left.keys()]:
        for name in done:
            del left[name]
    # What imports a circle without being part of it goes in the same way, from above.
    while done := [name for name in left if not any(name in left[other] for other in left)]:
        for name in done:
            del left[name]
    return [sorted(left)] if left else []


def test_every_room_has_a_floor() -> None:
    rooms = {[*name.split("."), ""][1] for name in modules(PACKAGE)}
    assert rooms == {room for rooms in FLOORS for room in rooms}


def test_imports_go_down() -> None:
    assert upward(PACKAGE) == []


def test_no_circle() -> None:
    assert circles(PACKAGE) == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PACKAGE, tmp_path / "klrl"))


def append(file: Path, line: str) -> None:
    file.write_text(f"{file.read_text(encoding='utf-8')}\n\n{line}\n", encoding="utf-8")


@pytest.mark.parametrize(
    "line",
    [
        "from klrl.train.loop import Training",
        "import klrl.train.loop",
        "def late():\n    from klrl.train import loop as later",
        "if TYPE_CHECKING:\n    from klrl.train.loop import Training",
    ],
)
def test_an_upward_arrow_is_seen(copy: Path, line: str) -> None:
    append(copy / "kl" / "charge.py", line)
    assert upward(copy) == ["klrl.kl.charge -> klrl.train.loop"]


def test_a_circle_within_a_room_is_seen(copy: Path) -> None:
    append(copy / "kl" / "estimators.py", "from klrl.kl.measure import measure")
    assert upward(copy) == []
    assert circles(copy) == [["klrl.kl.estimators", "klrl.kl.measure"]]


def test_same_names_in_both_domains() -> None:
    """Who knows ``control/record.py`` knows ``language/record.py``."""
    control, language = (
        {path.stem for path in (PACKAGE / domain).glob("*.py")}
        for domain in ("control", "language")
    )
    both = {"advantage", "evaluate", "kl", "load", "parts", "preflight", "record"}
    both |= {"checks", "rollout", "update"}
    assert both <= control & language


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_its_module(name: str) -> None:
    assert importlib.import_module(name) is importlib.import_module(PUBLIC[name])


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # runpy's own
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_as_a_module_imported_or_not(name: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["klrl", "--help"])
    for _ in range(2):
        with suppress(SystemExit):
            runpy.run_module(name.removesuffix(".__main__"), run_name="__main__")
        assert "klrl " in capsys.readouterr().out
        importlib.import_module(name)


def test_a_single_run_imports_no_sweep_no_other_domain_and_no_report() -> None:
    """A job of control, checked and trained, in a process of its own."""
    code = (
        "import sys; from klrl.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('klrl.')}\n"
        "print(*sorted(rooms & {'sweep', 'report', 'language', 'doctor'}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *QUICK, "frames=64", "hydra.run.dir=run"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stdout.splitlines()[-1] == ""
