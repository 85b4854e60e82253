"""The site: its generated pages have every name, its tables the names that are there."""

import ast
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from klrl.cli.main import COMMANDS
from klrl.config.choices import ALL_CHOICES, ALL_GROUPS
from klrl.config.explain import described, settings
from klrl.runs.metrics import METRICS
from tests.test_tutorials import tool

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = ROOT / ".ci" / "site"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    made: dict[str, str] = tool("reference").pages()
    return made


def rows(page: str) -> set[str]:
    """The code in the first column of a page's tables."""
    return set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))


def test_the_page_of_settings_has_every_setting_and_choice(pages) -> None:
    page = pages["reference/settings.md"]
    assert rows(page) >= set(settings())
    for group, choices in ALL_CHOICES.items():
        for name in {*choices, *described(group)}:
            assert f"`{group}={name}`" in page
    assert "object at 0x" not in page
    assert "typing." not in page
    # By hand, from klrl/config/schemas/penalty.py.
    assert "| `kl.coef` | number ≥ 0 or null | `0.1` | penalty per nat of KL(" in page


def test_the_page_of_metrics_has_every_metric(pages) -> None:
    page = pages["reference/metrics.md"]
    assert rows(page) == set(METRICS)
    assert "{" not in page


def test_the_page_of_the_command_line_has_every_command(pages) -> None:
    page = pages["reference/command_line.md"]
    for command in COMMANDS:
        title = "## klrl" if command == "run" else f"## klrl {command}"
        assert f"{title}\n" in page
        shown = page.split(f"{title}\n")[1].split("```")[1]
        assert len(shown.splitlines()) > 5, command


def test_every_public_name_has_a_page_and_a_docstring(pages) -> None:
    python = "".join(pages.values())
    reference = tool("reference")
    listed = re.findall(r"^::: ([\w.]+)$", python, re.MULTILINE)
    assert len(listed) == len(set(listed)) > 30
    for package in reference.PACKAGES:
        for name in importlib.import_module(package).__all__:
            home = reference.home_of(package, name)
            if name != "__version__" and home not in reference.PACKAGES:
                assert home in listed, name
    bare = [name for each in listed for name in undocumented(each)]
    assert bare == []


def undocumented(path: str) -> Iterator[str]:
    """A class or function at a dotted path, or a public method of it, without a docstring."""
    module, _, name = path.rpartition(".")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"))
    defined = {
        node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    found = defined[name]
    inner = [x for x in found.body if isinstance(x, ast.FunctionDef)]
    methods = [x for x in inner if x.name[0] != "_" and isinstance(found, ast.ClassDef)]
    for node in (found, *methods):
        setter = any(ast.unparse(each).endswith(".setter") for each in node.decorator_list)
        if not ast.get_docstring(node) and not setter:
            yield f"{path}.{node.name}"


def klrl_name_is_there(name: str) -> bool:
    """A choice, setting, metric, command or Python name of klrl."""
    key, _, value = name.partition("=")
    if value and key in ALL_GROUPS:
        return value in described(key)
    if name.startswith("klrl "):
        return name.split()[1] in COMMANDS
    if name.startswith("klrl["):
        return name[5:-1] in importlib.metadata.metadata("klrl").get_all("Provides-Extra", [])
    if name.startswith("klrl."):
        module, _, last = name.rpartition(".")
        return hasattr(importlib.import_module(module), last)
    return key in settings() or name in METRICS


def sb3_has(name: str) -> bool:
    from stable_baselines3 import PPO
    from stable_baselines3.common import callbacks, env_util, evaluation, vec_env

    known = {
        "PPO": PPO,
        "VecNormalize": vec_env.VecNormalize,
        "make_vec_env": env_util.make_vec_env,
        "evaluate_policy": evaluation.evaluate_policy,
        "BaseCallback": callbacks.BaseCallback,
    }
    path, _, argument = name.rstrip(")").partition("(")
    first, *more = path.split(".")
    found = known[first]
    for each in more:
        found = getattr(found, each)
    return argument in ("", "...") or argument in inspect.signature(found).parameters


def torchrl_has(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return hasattr(importlib.import_module(module), last)


def folder_of(package: str) -> Path:
    """Where a package is installed; nothing of it is imported, as it may need what is missing."""
    spec = find_spec(package)
    return Path(str(spec.submodule_search_locations[0])) if spec else pytest.skip(f"no {package}")  # type: ignore[index]


def trl_has(name: str) -> bool:
    folder = folder_of("trl") / "trainer"
    config = (folder / "grpo_config.py").read_text("utf-8")
    argument = re.fullmatch(r"GRPOTrainer\((\w+)\)", name)
    if argument or name == "GRPOTrainer":
        return (argument[1] if argument else "class GRPOTrainer") in (
            folder / "grpo_trainer.py"
        ).read_text("utf-8")
    return f"    {name}: " in config


def verl_has(name: str) -> bool:
    folder = folder_of("verl") / "trainer" / "config"
    value = yaml.safe_load((folder / "_generated_ppo_trainer.yaml").read_text("utf-8"))
    for each in name.split("."):
        if each not in value:
            return False
        value = value[each]
    return True


#: Page -> (whether its library has a name, the library's distribution); CleanRL is files to copy.
FOREIGN: dict[str, tuple[Callable[[str], bool], str] | None] = {
    "sb3": (sb3_has, "stable-baselines3"),
    "torchrl": (torchrl_has, "torchrl"),
    "trl": (trl_has, "trl"),
    "verl": (verl_has, "verl"),
    "cleanrl": None,
}


def table(page: str) -> list[tuple[list[str], list[str]]]:
    """The code in the two first columns of each row: foreign names, klrl's."""
    text = (DOCS / "coming_from" / f"{page}.md").read_text("utf-8")
    lines = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("| ")]
    return [tuple(re.findall(r"`([^`]+)`", cell) for cell in line[1:3]) for line in lines[1:]]  # type: ignore[misc]


def test_every_page_of_names_is_tested() -> None:
    assert {path.stem for path in (DOCS / "coming_from").glob("*.md")} == set(FOREIGN)


@pytest.mark.parametrize("page", FOREIGN)
def test_klrls_names_in_a_table_are_there(page: str) -> None:
    found = [name for _, ours in table(page) for name in ours]
    assert len(found) > 10
    assert [name for name in found if not klrl_name_is_there(name)] == []


@pytest.mark.parametrize("page", FOREIGN)
def test_foreign_names_in_a_table_are_there(page: str) -> None:
    library = FOREIGN[page]
    names = [name for theirs, _ in table(page) for name in theirs]
    if library is None:
        pytest.skip(f"{page}: no distribution has these files")
    has, distribution = library
    assert [name for name in names if not has(name)] == []
    said = (DOCS / "coming_from" / f"{page}.md").read_text("utf-8")
    assert importlib.metadata.version(distribution) in said


def test_every_page_is_in_the_navigation_once(pages) -> None:
    text = (SITE / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    named = re.findall(r"([\w./]+\.md)$", text, re.MULTILINE)
    assert len(named) == len(set(named))
    here = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(named) == here | set(pages) | {"contributing.md", "changelog.md"}


def test_the_site_loads_nothing_from_a_network() -> None:
    text = (SITE / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[0]
    assert "font: false" in text
    assert "- offline\n" in text
    assert re.findall(r"https?://(?!www\.w3\.org)", text) == []
