"""What the pages claim of the tree and of the command line."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.sort_digits_base import build
from klrl.config.compose import job_config
from klrl.config.overrides import expand, parse_args, separate
from klrl.sweep.run import sweep_settings
from klrl.sweep.search import space_of
from tests.conftest import QUICK, marked
from tests.language.conftest import QUICK as LANGUAGE_QUICK
from tests.language.conftest import QUICK_MODEL
from tests.runs.commands import exits, rows_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
#: A command of a page that starts, prints or plans a job: its words.
STARTS = re.compile(
    r"^    (?:python -m )?klrl (?:plan )?((?:-m |[\w.]+=).*?)(?: +#.*)?$", re.MULTILINE
)


def commands() -> list[str]:
    """Of all pages; tests/extending runs those that need a file of one's own."""
    pages = [page for page in PAGES if page.name != "extending.md"]
    found = {line.rstrip() for page in pages for line in STARTS.findall(page.read_text("utf-8"))}
    return sorted(line for line in found if not line.startswith(("resume=", "env=custom")))


@pytest.mark.integration
@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_pages_composes(command: str) -> None:
    for name in ("mine", "sb3_policy"):  # tests/control/test_your_policy.py has the page's own
        Path(f"{name}.py").write_text("def policy(): ...\ndef critic(): ...\n")
    args = parse_args([word for word in shlex.split(command) if word not in ("--cfg", "job")])
    words = separate(args.overrides, multirun=True) if args.multirun else None
    if words is None:
        jobs = [args.overrides]
    else:
        _, search = sweep_settings(words.own, args)
        found = search.name == "optuna"
        jobs = space_of(words.job).ends() if found else expand(words.job)
    for job in jobs:
        config = job_config(job)
        if seed := [word for word in job if word.startswith("seed=")]:
            assert config.seed == int(seed[-1][5:])
        assert config.iterations * config.frames_per_iteration >= config.frames > 0


def test_readme_is_a_screen_and_a_half_of_short_sentences() -> None:
    """Without its commands, pictures and targets of links; a line of a list is a sentence."""
    page = PAGES[0].read_text("utf-8")
    assert page.count("\n") <= 90
    assert max(map(len, page.splitlines())) <= 120
    text = re.sub(r"^(?:    |#|!).*$|\]\([^)]*\)", "", page, flags=re.MULTILINE)
    sentences = re.split(r"[.?!](?=\W*\s)|\n\n|\n- ", text)
    assert [line for line in sentences if len(line.split()) > 25] == []


RUN = "outputs/RUN"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and a base model for the page that calls them outputs/RUN and none."""
    folder = tmp_path_factory.mktemp("which")
    build(QUICK_MODEL, folder / "model")
    assert exits(*QUICK, f"hydra.run.dir={folder / RUN}") == 0
    return folder


#: The commands of which_kl.md.
RUNS = STARTS.findall((ROOT / "docs" / "which_kl.md").read_text("utf-8"))


@pytest.mark.integration
@pytest.mark.parametrize("line", marked("slow", RUNS, *RUNS[::3]))
def test_every_command_of_which_kl_runs(line: str, trained: Path, capsys) -> None:
    line = line.replace(RUN, str(trained / RUN)).replace("FOLDER", str(trained / "model"))
    words = shlex.split(line)
    language = any(word.startswith("experiment=") for word in words)
    small = (*LANGUAGE_QUICK, f"actor.model={trained / 'model'}") if language else QUICK
    assert exits(*small, *words, "hydra.run.dir=run") == 0, capsys.readouterr().err
    rows = rows_of(Path("run"))
    assert len(rows) == 2
    assert ("kl/ref/exact" in rows[-1]) is ("kl=none" not in words)


#: The heading of each room in the map, from the top down: what a maintainer asks.
ROOMS = {
    "cli": "which words does a command take?",
    "api.py": "how do I run klrl from Python?",
    "api_sweep.py": "how do I run and compare many?",
    "report": "what do many runs come to?",
    "doctor": "are this machine's KL numbers, and a loss of yours, right?",
    "sweep": "which jobs run, where, and what do they cost?",
    "control/run": "what is control's alone: the run",
    "control/policy": "control: actor, critic and their distributions",
    "control/env": "control: simulators, spaces, copies, episodes",
    "language/run": "what is language's alone: the run",
    "language/model": "language: the model",
    "language/data": "language: prompts, tasks, rewards, the batch",
    "train": "what is the algorithm?",
    "objectives": "which TorchRL losses are there?",
    "envs/llm/transforms/kl": "which TorchRL transforms are there, for tokens and actions alike?",
    "envs/transforms": "... and for actions?",
    "losses": "what is minimised, and how does beta move?",
    "runs": "what does a run leave, and who reads it?",
    "kl": "how is the KL estimated, measured, charged, controlled?",
    "domains.py": "what tells control from language?",
    "config": "where is a setting checked?",
    "config/schemas": "where is a setting declared, with its type and range?",
    "config/own": "how does a custom part get in ([extending.md](extending.md))?",
    "config/rules": "which settings go together, and which are never read?",
    "base": "what may every part use?",
}


def first_line(path: Path) -> str:
    """Of a module's docstring."""
    return str(ast.get_docstring(ast.parse(path.read_text("utf-8")))).partition("\n")[0]


def map_of_the_tree() -> str:
    """A line per file; ``python -m tests.test_docs`` writes it into the page."""
    lines = []
    for room, question in ROOMS.items():
        home = ROOT / "klrl" / room
        paths = sorted(home.glob("*.py")) if home.is_dir() else [home]
        lines += [f"### `klrl/{room}`: {question}", ""]
        lines += [f"- `{path.name}` {first_line(path)}" for path in paths if path.name[0] != "_"]
        lines.append("")
    return "\n".join(lines)


MAP = re.compile(r"(?<=<!-- map -->\n).*(?=<!-- end of the map -->)", re.DOTALL)


def test_the_map_is_that_of_the_tree() -> None:
    assert MAP.findall(ARCHITECTURE.read_text("utf-8")) == [map_of_the_tree()]
    rooms = {path.relative_to(ROOT / "klrl") for path in (ROOT / "klrl").rglob("[!_]*.py")}
    assert {str(path.parent) for path in rooms if path.name != path.as_posix()} == {
        room for room in ROOMS if "." not in room
    }


def defined_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names |= {node.name}
        if isinstance(node, ast.ClassDef):
            inner = (x.name for x in node.body if isinstance(x, ast.FunctionDef))
            names |= {f"{node.name}.{name}" for name in inner}
    return names


def test_one_iteration_walks_through_functions_that_are_there() -> None:
    page = (ROOT / "docs" / "one_iteration.md").read_text("utf-8")
    walked = re.findall(r"`(?:klrl/)?([\w/]+\.py)(?:: ([\w.]+))?`", page)
    assert len(walked) > 30
    for name, function in walked:
        if name.startswith("tests/"):
            assert (ROOT / name).exists(), name
            continue
        paths = [ROOT / "klrl" / name]
        if "/" not in name and (ROOT / "klrl/control/run" / name).exists():  # of both domains
            paths = [ROOT / "klrl" / where / name for where in ("control/run", "language/run")]
        for path in paths:
            assert path.exists(), name
            assert not function or function in defined_in(path) or name == "parts.py", function


def test_the_loop_of_the_page_is_the_loops() -> None:
    page = (ROOT / "docs" / "one_iteration.md").read_text("utf-8")
    block = [line[4:] for line in page.partition("## 1.")[0].splitlines() if line[:4] == " " * 4]
    loop = ast.parse((ROOT / "klrl/train/loop.py").read_text("utf-8"))
    train = next(x for x in ast.walk(loop) if isinstance(x, ast.FunctionDef) and x.name == "train")
    inner = next(x for x in ast.walk(train) if isinstance(x, ast.While))
    calls = iter(called(inner))
    assert len(block) > 8
    for name in called(ast.parse("\n".join(block))):
        assert name in calls, f"{name} is not called there, or not in this order"


def called(tree: ast.AST) -> list[str]:
    """The names of what is called, in the order of the lines."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda func: (func.lineno, func.col_offset))
    return [func.attr if isinstance(func, ast.Attribute) else ast.unparse(func) for func in calls]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_row_of_reliability_names_tests_that_are_there() -> None:
    """Each word behind ``-k`` is a part of a test's name in the file before it."""
    page = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py)(?: -m slow)?(?: -k ([^`]+))?`", page)
    assert len(named) > 40
    folder, lost = Path(), []
    for file, words in named:
        folder = Path(file).parent if "/" in file else folder
        path = ROOT / "tests" / (file if (ROOT / "tests" / file).exists() else folder / file)
        if path.name == "test_messages.py":  # its tests are named by the lines of messages/
            continue
        names = " ".join(re.findall(r"def (test_\w+)", path.read_text("utf-8")))
        lost += [(file, word) for word in words.strip('"').split(" or ") if word not in names]
    assert lost == []


if __name__ == "__main__":
    page = ARCHITECTURE.read_text("utf-8")
    ARCHITECTURE.write_text(MAP.sub(lambda _: map_of_the_tree(), page), encoding="utf-8")
