"""A user's loss that raises is told with its line; what is refused: tests/messages/doctor.yaml."""

from pathlib import Path

import pytest

from klrl.base.errors import ConfigError
from klrl.doctor.user_loss import settings_of
from tests.runs.commands import said

MINE = """
def right(log_probs, ref_log_probs, mask, coef):
    return coef * (((log_probs - ref_log_probs) * mask).sum(1) ** 2 / 2).mean()
def raises(log_probs, coef):
    return log_probs[5000] * coef
def exits(log_probs, coef):
    raise SystemExit("bye")
"""


def failed(capsys, *words: str) -> str:
    """Run the command; returns the one line that it left with."""
    Path("mine.py").write_text(MINE)
    code, out, err = said(capsys, "doctor", *words)
    assert (code, out, err.count("\n")) == (1, "", 1), err
    return err


def test_a_setting_that_the_doctor_gives(capsys) -> None:
    told = failed(capsys, "--loss", "mine.py:right", "coef=3")
    assert "multiple values for keyword argument 'coef'" in told


@pytest.mark.parametrize(
    ("name", "told"), [("raises", "IndexError: index 5000"), ("exits", "SystemExit: bye")]
)
def test_what_a_loss_raises_is_told_with_its_line(capsys, name, told) -> None:
    line = 1 + MINE.splitlines().index(f"def {name}(log_probs, coef):") + 1
    said = failed(capsys, "--loss", f"mine.py:{name}")
    assert f"klrl doctor: failed: --loss mine.py:{name}: raised {told}" in said
    assert said.strip().endswith(f"(line {line} of mine.py)")


def test_settings_are_those_of_klrl() -> None:
    words = ["a=1e-3", "b=true", "c=null", "d=text", "e=[1, 2]", "f="]
    expected = {"a": 1e-3, "b": True, "c": None, "d": "text", "e": [1, 2], "f": ""}
    assert settings_of(words) == expected
    with pytest.raises(ConfigError, match="1a=2: Hydra cannot read this"):
        settings_of(["1a=2"])
