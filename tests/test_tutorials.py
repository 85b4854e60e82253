"""docs/tutorials: each page, its one source, is executed; short here, as printed where slow."""

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

from klrl.cli.main import COMMANDS
from tests.runs.commands import rows_of, said

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def tool(name: str) -> ModuleType:
    """A module of .ci/site, which is no package."""
    path = ROOT / ".ci" / "site" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"site_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[f"site_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOTEBOOKS = tool("notebooks")
QUIET = ("logger=none", "learner.compile=false")
TINY = ("collector.steps=64", "learner.epochs=1", "eval.every=0", *QUIET)
#: What makes a page's command short, by the page and the command's name.
SHORT = {
    "sb3_policy": {
        "run": (*TINY, "frames=1024"),
        "evaluate": ("--episodes", "2"),
        "kl": ("--episodes", "2"),
    },
    "grpo_prompts": {
        "run": ("frames=64", "collector.prompts=8", "eval.every=0", *QUIET),
        "evaluate": ("--episodes", "8"),
        "kl": ("--episodes", "8"),
    },
    "sweep_figure": {"run": (*TINY, "frames=1024"), "plan": (*TINY, "frames=1024")},
    "loss_gradient": {"doctor": ("--seeds", "3")},
}
#: Text of a page -> what takes its place in a short run.
LESS = {
    "120_000": "1_024",
    "range(2000)": "range(100)",
    "kl.coef=0,0.1,1": "kl.coef=0,1",
    "seed=0,1,2": "seed=0,1",
}


def shown(page: str) -> Iterator[str]:
    """The verdicts in a page's shown output."""
    for block in re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        yield from re.findall(r"^(?:RIGHT|WRONG)", block, re.MULTILINE)


def play(page: str, short: dict[str, tuple[str, ...]], capsys: pytest.CaptureFixture) -> str:
    """Run a page's cells in the current folder; return what its commands print."""
    space: dict[str, object] = {}
    printed = ""
    for cell in NOTEBOOKS.cells(page):
        if cell.kind == "file":
            Path(cell.file).write_text(cell.text)
        elif cell.kind == "python":
            exec(compile(cell.text, "cell", "exec"), space)  # a page of klrl's own
        elif cell.kind == "bash":
            for line in NOTEBOOKS.commands(cell.text):
                first, *words = shlex.split(line)
                assert first == "klrl", line
                command = words[0] if words[0] in COMMANDS else "run"
                code, out, err = said(capsys, *words, *short.get(command, ()))
                assert code == 0 or command == "doctor", err
                printed += out
    return printed


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_runs(path: Path, capsys) -> None:
    page = path.read_text("utf-8")
    for text, less in LESS.items():
        page = page.replace(text, less)
    printed = play(page, SHORT[path.stem], capsys)
    assert re.findall(r"^(?:RIGHT|WRONG)", printed, re.MULTILINE)[: len([*shown(page)])] == [
        *shown(page)
    ]
    for run in Path("outputs").glob("[!.]*/metrics.jsonl"):
        assert "kl/ref/exact" in rows_of(run.parent)[-1], run


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_is_a_notebook(path: Path) -> None:
    """Valid for Jupyter, with every cell of the page in its order."""
    page = path.read_text("utf-8")
    made = nbformat.reads(NOTEBOOKS.notebook(page, "language"), as_version=4)
    nbformat.validate(made)
    code = [cell.source for cell in made.cells if cell.cell_type == "code"][1:]
    blocks = re.findall(r"^```(bash|python)[^\n]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(code) == len(blocks) > 2
    for source, (kind, block) in zip(code, blocks, strict=True):
        assert source.endswith(block.split()[-1])
        assert source.startswith("!klrl") is (kind == "bash")
    assert json.loads(NOTEBOOKS.notebook(page, "x"))["nbformat"] == 4
