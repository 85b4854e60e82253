"""What the pages claim of the tree and of the command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from klrl.__main__ import compose
from klrl.checks import check_all_read, to_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
#: Flags that leave a job to compose; --help and others have tests of their own.
FLAGS = {"-m", "--cfg", "job"}


def commands() -> list[str]:
    """Every ``python -m klrl ...`` of the pages that starts or prints a job."""
    lines = [line.strip() for page in PAGES for line in page.read_text("utf-8").splitlines()]
    found = [line.partition("  #")[0] for line in lines if line.startswith("python -m klrl ")]
    away = ("--help", "--config-dir", "resume=")
    return sorted({line.rstrip() for line in found if not any(word in line for word in away)})


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_pages_composes(command: str) -> None:
    words = [word for word in shlex.split(command)[3:] if word not in FLAGS]
    if "-m" in shlex.split(command)[3:]:  # a sweep: its first job
        words = [re.sub(r"=([^,\[]+),.*", r"=\1", word) for word in words]
    # env.kwargs is open: the command line adds the plus.
    given = [f"+{word}" if word.startswith("env.kwargs.") else word for word in words]
    check_all_read(to_config(compose(given)), [word.partition("=")[0] for word in words])


def files_named() -> set[Path]:
    """The files and folders of the table "Where things live"; a bare name goes with its row."""
    page = ARCHITECTURE.read_text("utf-8")
    table = page.partition("## Where things live")[2].partition("\n##")[0]
    found = set()
    for row in table.splitlines():
        folder = Path("klrl")
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", row.split("|")[1] if "|" in row else ""):
            folder = Path(name).parent if "/" in name else folder
            found.add(folder / Path(name).name)
    return found


def test_the_table_of_files_is_that_of_the_tree() -> None:
    named = files_named()
    assert sorted(str(path) for path in named if not (ROOT / path).exists()) == []
    modules = [path.relative_to(ROOT) for path in (ROOT / "klrl").rglob("*.py")]
    public = [path for path in modules if not path.name.startswith("_")]
    missing = [path for path in public if path not in named and path.parent not in named]
    assert sorted(map(str, missing)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []
