"""The house: each room imports rooms below it, no module imports in a circle.

Read from the sources: every ``import`` counts, inside functions and under ``TYPE_CHECKING`` too.
What is looked up by name (``"module:name"`` in the registry, the lazy faces) is no arrow: nothing
there is imported until it is asked for.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import klrl
from tests.conftest import QUICK

PACKAGE = Path(klrl.__file__).parent

#: Rooms by floor, from the ground up; a room imports rooms of lower floors and itself.
FLOORS = (
    {"base"},
    {"config", ""},  # "" is klrl/__init__.py
    {"domains", "kl"},
    {"runs"},
    {"losses"},
    {"envs", "objectives"},
    {"train"},
    {"control", "language"},
    {"doctor", "sweep"},
    {"report"},
    {"api"},
    {"api_sweep"},
    {"cli"},
    {"__main__"},
)


def _modules() -> dict[str, str]:
    """The source of every module, by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["klrl", *path.relative_to(PACKAGE).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


MODULES = _modules()


@cache
def imports(source: str) -> set[str]:
    """The package's modules that a source imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "klrl imports by full names"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES.keys()
            found |= {node.module} & MODULES.keys() if inner - MODULES.keys() else set()
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES.keys()
    return found


def arrows(**added: str) -> dict[str, set[str]]:
    """module -> modules that it imports; ``added`` are lines at the end of a module."""
    sources = {name: [MODULES[name]] for name in MODULES}
    for name, line in added.items():
        sources[name.replace("__", ".")].append(line)
    return {name: set().union(*map(imports, each)) - {name} for name, each in sources.items()}


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports that do not go down, as ``importer -> imported``."""
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

    def room(module: str) -> str:
        return [*module.split("."), ""][1]

    return [
        f"{name} -> {other}"
        for name, others in graph.items()
        for other in sorted(others)
        if room(name) != room(other) and floor[room(name)] <= floor[room(other)]
    ]


#: Folders of a domain by floor, from the ground up.
FOLDERS = {"control": ("env", "policy", "run"), "language": ("data", "model", "run")}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that reach themselves over imports, a list each."""
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
    rooms = {[*name.split("."), ""][1] for name in MODULES}
    assert rooms == {room for rooms in FLOORS for room in rooms}


def test_imports_go_down_and_in_no_circle() -> None:
    assert upward(arrows()) == circles(arrows()) == []


@pytest.mark.parametrize(
    "line",
    [
        "from klrl.train.loop import Training",
        "import klrl.train.loop",
        "def late():\n    from klrl.train import loop as later",
        "if TYPE_CHECKING:\n    from klrl.train.loop import Training",
    ],
)
def test_an_upward_arrow_is_seen(line: str) -> None:
    assert upward(arrows(klrl__kl__charge=line)) == ["klrl.kl.charge -> klrl.train.loop"]


def test_a_circle_within_a_room_is_seen() -> None:
    graph = arrows(klrl__kl__estimators="from klrl.kl.measure import measure")
    assert upward(graph) == []
    assert circles(graph) == [["klrl.kl.estimators", "klrl.kl.measure"]]


@pytest.mark.parametrize("domain", FOLDERS)
def test_a_domains_folders_are_floors(domain: str) -> None:
    floors, graph = FOLDERS[domain], arrows()
    folder = {
        name: name.split(".")[2]
        for name in MODULES
        if name.count(".") > 2 and name.startswith(f"klrl.{domain}.")
    }
    assert {*folder.values()} == {*floors}
    for name, others in graph.items():
        for other in others & folder.keys() if name in folder else ():
            assert floors.index(folder[other]) <= floors.index(folder[name]), (name, other)


def test_the_torchrl_face_imports_kl_and_losses_alone() -> None:
    face = {
        name: others
        for name, others in arrows().items()
        if ".envs" in name or ".objectives" in name
    }
    rooms = {other.split(".")[1] for others in face.values() for other in others}
    assert rooms == {"base", "envs", "kl", "losses"}


#: Lines of klrl that a control run without logger and evaluation may load.
LOADS = 18_830


@pytest.mark.integration
def test_a_single_run_imports_no_sweep_no_other_domain_and_no_report() -> None:
    """A job of control, checked and trained, in a process of its own; prints what it loads."""
    code = (
        "import sys; from klrl.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print(*(module.__file__ for name, module in sys.modules.items() if name[:4] == 'klrl'))"
    )
    words = (*QUICK, "frames=64", "eval.final=0", "hydra.run.dir=run")
    ended = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    loaded = [Path(path) for path in ended.stdout.splitlines()[-1].split()]
    rooms = {path.relative_to(PACKAGE).parts[0] for path in loaded}
    assert rooms & {"sweep", "report", "language", "doctor"} == set()
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in loaded)
    print(f"{len(loaded)} modules, {lines} lines of klrl")
    assert lines <= LOADS


def test_a_class_name_is_taken_once() -> None:
    """But for KLRewardTransform, which the documents have for control and for language."""
    nodes = (node for source in MODULES.values() for node in ast.parse(source).body)
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    assert {name for name in names if names.count(name) > 1} == {"KLRewardTransform"}
