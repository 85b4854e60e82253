"""docs/extending.md: every example runs from a folder outside the repository, as a user's would."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.runs.commands import exits, manifest_of, rows_of

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
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
        if match := re.match(r"# ([\w/]+\.(?:py|yaml))\n", block):
            found[match[1]] = block[match.end() :]
    return found


def commands() -> list[str]:
    """The commands of the page that start a run."""
    return [block.strip() for block in blocks() if re.match(r"klrl .*=", block)]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The page's files in the current folder."""
    for name, text in files().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_page_has_an_example_of_each_part() -> None:
    text = " ".join(commands())
    for group in ("env", "actor", "loss", "controller", "advantage", "logger"):
        assert f"{group}=custom {group}.target=" in text
    for inner in ("loss.own_beta_rule", "kl.own_estimator", "actor.own_critic"):
        assert f"{inner}.target=" in text
    assert "env.wrappers=[" in text
    assert len(commands()) == len([name for name in files() if name.endswith(".py")]) + 1


@pytest.mark.integration
@pytest.mark.parametrize("command", commands(), ids=lambda c: c.split("=custom ")[-1][:40])
def test_every_example_trains(command: str, mine: Path) -> None:
    words = shlex.split(command)[1:]
    quiet = () if "logger=custom" in words else ("logger=none",)
    assert exits(*words, *SHORT, *quiet, f"hydra.run.dir={mine / 'run'}") == 0
    rows = rows_of(mine / "run")
    assert [row["frames"] for row in rows] == [64, 128]
    assert all(row["kl/ref/exact"] >= 0 for row in rows)
    own = manifest_of(mine / "run")["own"]
    targets = [part["target"] for part in own.values()]
    told = " ".join(words) + (mine / "conf/env/maze.yaml").read_text("utf-8")
    assert all(target in told for target in targets)
    local = [part for part in own.values() if not part["target"].startswith("gymnasium")]
    assert local
    assert all(re.fullmatch(r"[0-9a-f]{12}", str(part["source"])) for part in local)
    if "logger=custom" in words:
        lines = (mine / "run" / "lines.txt").read_text("utf-8").split()
        assert [int(line) for line in lines[::2]] == [64, 128]
