"""What docs/extending.md shows: its files, its commands."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
#: What makes a run of the page one of a second.
SHORT = (
    *("frames=128", "env.num_envs=2", "collector.steps=32"),
    *("learner.minibatches=2", "learner.epochs=2", "eval.every=0"),
)


def blocks() -> list[str]:
    """The indented blocks of the page, without their indent."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    |\n    ))+", PAGE.read_text("utf-8"), re.MULTILINE)
    return ["\n".join(line[4:] for line in block.split("\n")).strip() + "\n" for block in found]


def files() -> dict[str, str]:
    """The files of the page, by their names."""
    found = {}
    for block in blocks():
        if match := re.search(r"\A(?:# .*\n)*?# ([\w/]+\.(?:py|yaml))\n", block):
            found[match[1]] = block  # pasted whole
    return found


def commands() -> list[str]:
    """The commands of the page that start a run."""
    lines = [line for block in blocks() for line in block.splitlines()]
    return [line for line in lines if re.match(r"klrl .*=", line)]
