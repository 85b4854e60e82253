"""What the pages claim of the tree and of the command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from klrl.config.compose import job_config, parse_args
from klrl.config.overrides import expand, split_words
from klrl.sweep.check import sweep_settings
from klrl.sweep.search import space_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
#: Flags that only print the job.
PRINTS = {"--cfg", "job"}


def commands() -> list[str]:
    """Every ``python -m klrl ...`` of the pages that starts or prints a job."""
    lines = [line.strip() for page in PAGES for line in page.read_text("utf-8").splitlines()]
    found = [line.partition("  #")[0] for line in lines if line.startswith("python -m klrl ")]
    away = ("--help", "--config-dir", "resume=")
    return sorted({line.rstrip() for line in found if not any(word in line for word in away)})


@pytest.mark.integration
@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_pages_composes(command: str) -> None:
    """Its settings are checked; the runs, models and data that it names need not be here."""
    args = parse_args([word for word in shlex.split(command)[3:] if word not in PRINTS])
    words = split_words(args.overrides) if args.multirun else None
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
