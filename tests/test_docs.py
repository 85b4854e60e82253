"""What the pages claim of the tree and of the command line."""

import ast
import re
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest

from benchmarks.sort_digits_base import build
from klrl.config.choices import ALL_GROUPS
from klrl.config.compose import job_config
from klrl.config.explain import described, settings
from klrl.config.overrides import expand, parse_args, separate
from klrl.sweep.run import sweep_settings
from klrl.sweep.search import space_of
from tests.conftest import QUICK, marked
from tests.language.conftest import QUICK as LANGUAGE_QUICK
from tests.language.conftest import QUICK_MODEL
from tests.runs.commands import exits, rows_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
DEVELOPERS = DOCS / "developers"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
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


def coded(page: Path) -> list[str]:
    """What a page prints as code within a line."""
    return re.findall(r"`([^`\n]*)`", page.read_text("utf-8"))


def unknown_settings(code: str) -> list[str]:
    """Names of settings that klrl does not have; ``env.args.slip`` is known by ``env.args``."""
    named = re.findall(r"(?<![\w./'\"])(\w+)((?:\.[a-z_]+)+)(?![\w(/])", code)
    keys = [group + rest for group, rest in named if group in (*ALL_GROUPS, "eval", "checkpoint")]
    return [key for key in keys if not any(k == key or key.startswith(k + ".") for k in settings())]


def unknown_choices(code: str) -> list[str]:
    """Choices that klrl does not have, but for those that the pages' own files define."""
    words = re.sub(r"\w\(.*\)", "", code)  # no arguments of Python's
    given = re.findall(r"(?<![\w.])(\w+)=([a-z_0-9]+)(?![\w:/.])", words)
    known = {group: {*described(group), "custom"} for group in ALL_GROUPS}
    known["env"] |= {"maze", "mine"}
    return [f"{group}={name}" for group, name in given if name not in known.get(group, name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_setting_and_choice_that_a_page_names_is_there(page: Path) -> None:
    found = coded(page)
    assert [each for code in found for each in unknown_settings(code)] == []
    assert [each for code in found for each in unknown_choices(code)] == []


def test_a_name_that_is_gone_is_found() -> None:
    assert unknown_settings("klrl kl.coeff=1 kl.coef=1 env.args.x=1") == ["kl.coeff"]
    assert unknown_choices("loss=klpen loss=klpenn env=custom") == ["loss=klpenn"]


RUN = "outputs/RUN"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and a base model for the page that calls them outputs/RUN and none."""
    folder = tmp_path_factory.mktemp("which")
    build(QUICK_MODEL, folder / "model")
    assert exits(*QUICK, f"hydra.run.dir={folder / RUN}") == 0
    return folder


#: The commands of which_kl.md.
RUNS = STARTS.findall((DOCS / "which_kl.md").read_text("utf-8"))


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


#: The commands of README that read a run, or a loss.
READS = re.findall(
    r"^    klrl ((?:resume=|evaluate |kl |report |doctor ).*?)(?: +#.*)?$",
    PAGES[0].read_text("utf-8"),
    re.M,
)


@pytest.mark.integration
@pytest.mark.parametrize("line", READS)
def test_the_commands_of_readme_that_read_something_run(line: str, trained: Path, capsys) -> None:
    page = (DOCS / "doctor.md").read_text("utf-8")
    Path("mine.py").write_text(
        textwrap.dedent(re.search(r"(?m)^    # mine.py\n(?:    .+\n)+", page)[0])
    )
    for name in ("RUN", "OTHER"):
        shutil.copytree(trained / RUN, Path("outputs") / name)
    words = shlex.split(line.replace("300000", "256"))
    assert exits(*words) == 0, capsys.readouterr().err


#: The lines of the pages' code that import klrl.
IMPORTS = sorted(
    {
        line.partition("#")[0].strip()
        for page in PAGES
        for line in re.findall(
            r"^(?:    )?((?:from klrl|import klrl)\b.*)$", page.read_text("utf-8"), re.M
        )
    }
)


def test_what_the_pages_import_is_there() -> None:
    assert len(IMPORTS) > 5
    for line in IMPORTS:
        exec(line, {})


def test_readme_has_eight_things_to_do_and_six_that_others_do_not() -> None:
    page = PAGES[0].read_text("utf-8")
    parts = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    assert len(re.findall("^    klrl ", parts["Eight things to do"], re.M)) == 8
    claims = re.split(r"\n- ", parts["What others do not do"])[1:]
    assert len(claims) == 6
    assert [claim for claim in claims if "](docs/" not in claim] == []


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
    page = (DEVELOPERS / "one_iteration.md").read_text("utf-8")
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
    page = (DEVELOPERS / "one_iteration.md").read_text("utf-8")
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


def anchors(page: Path) -> set[str]:
    """The headings of a page, as a link names them."""
    text = re.sub(r"(?m)^    .*$", "", page.read_text("utf-8"))
    heads = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text("utf-8"))
    lost = []
    for target in targets:
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if DOCS / "reference" in path.parents:  # made when the site is built
            continue
        there = path.exists() and (path.suffix != ".md" or not anchor or anchor in anchors(path))
        lost += [target] * (not there)
    assert lost == []
    if DOCS in page.parents:  # the site has nothing else
        assert [t for t in targets if DOCS not in (page.parent / t).resolve().parents] == []


def test_every_row_of_reliability_names_tests_that_are_there() -> None:
    """Each word behind ``-k`` is a part of a test's name in the file before it."""
    page = (DEVELOPERS / "reliability.md").read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py)(?: -m slow)?(?: -k ([^`]+))?`", page)
    assert len(named) > 20
    folder, lost = Path(), []
    for file, words in named:
        folder = Path(file).parent if "/" in file else folder
        path = ROOT / "tests" / (file if (ROOT / "tests" / file).exists() else folder / file)
        if path.name == "test_messages.py":  # its tests are named by the lines of messages/
            continue
        names = " ".join(re.findall(r"def (test_\w+)", path.read_text("utf-8")))
        lost += [(file, word) for word in words.strip('"').split(" or ") if word not in names]
    assert lost == []
