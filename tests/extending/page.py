"""What extending.md, simulators.md and README show: files of one's own, and their commands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
PAGES = (PAGE, ROOT / "README.md", ROOT / "docs" / "simulators.md")
TEXT = "".join(page.read_text("utf-8") for page in PAGES)
#: What makes a run of the page one of a second.
SHORT = (
    *("frames=128", "env.num_envs=2", "collector.steps=32"),
    *("learner.minibatches=2", "learner.epochs=2", "eval.every=0"),
)


def blocks(start: str = "") -> list[str]:
    """The indented blocks of the pages, without their indent; those behind ``start``."""
    found = re.findall(rf"{start}((?:^    .*\n|^\n(?=    |\n    ))+)", TEXT, re.MULTILINE)
    return ["\n".join(line[4:] for line in block.split("\n")).strip() + "\n" for block in found]


def files() -> dict[str, str]:
    """Their files, by their names."""
    found = {}
    for block in blocks():
        if match := re.search(r"\A(?:# .*\n)*?# ([\w/]+\.(?:py|yaml))\n", block):
            found[match[1]] = block  # pasted whole
    return found


def commands() -> list[str]:
    """The commands that run those files."""
    return [line for block in blocks("^Run it:\n") for line in block.splitlines()]
