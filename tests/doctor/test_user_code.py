"""What cannot be examined is refused in one line: setting, value, remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from klrl.base.errors import ConfigError
from klrl.cli.doctor import main
from klrl.doctor.user_code import settings_of

MINE = """
import torch
number = 3
class NoActor: pass
def right(log_probs, ref_log_probs, mask, coef):
    return coef * (((log_probs - ref_log_probs) * mask).sum(1) ** 2 / 2).mean()
def raises(log_probs, coef):
    return log_probs[5000] * coef
def exits(log_probs, coef):
    raise SystemExit("bye")
def nan(log_probs, coef):
    return log_probs.sum() * coef * float("nan")
def nan_gradient(log_probs, coef):
    return (log_probs - log_probs).sqrt().sum() * coef
def no_gradient(log_probs, coef):
    return log_probs.detach().sum() * coef
def elsewhere(log_probs, coef):
    return torch.zeros((), requires_grad=True) * coef
def shape(log_probs, coef):
    return log_probs * coef
def number_back(log_probs, coef):
    return 3.0
def asks(log_probs, coef, values): ...
def no_coef(log_probs): ...
def no_policy(rewards, coef): ...
class NoCoef:
    def __init__(self, actor, reference): ...
class NoTerms:
    def __init__(self, actor, coef): ...
    def __call__(self, data): return {"objective": 1}
def wide(observations, actions):
    return torch.nn.Linear(observations, actions + 1)
def noisy(observations, actions):
    return torch.nn.Sequential(torch.nn.Linear(observations, actions), torch.nn.Dropout())
def frozen(observations, actions):
    return torch.nn.Linear(observations, actions).requires_grad_(False)
def no_network(observations, actions):
    return 3
"""

REFUSED = [
    (["nope"], "has no nope; fix the name"),
    (["number"], "is of type int; name a function or a class"),
    (["NoActor"], "a class without an argument for the actor"),
    (["nan"], "returned nan; look for log 0 and 0 / 0"),
    (["nan_gradient"], "its gradient is nan; look for"),
    (["no_gradient"], "its value has no gradient in the policy; look for detach()"),
    (["elsewhere"], "its value has no gradient in the policy"),
    (["shape"], "returned a tensor of shape (1312, 1); return one number"),
    (["number_back"], "returned float; return a tensor"),
    (["asks"], "asks for values, which the doctor does not have; it gives log_probs,"),
    (["no_coef"], "takes no coef; take it, or give --placement reward"),
    (["no_policy"], "takes neither log_probs nor logits"),
    (["NoCoef"], "takes no coefficient of the KL; name it ref_kl_coef or coef"),
    (["NoTerms"], "returned no term whose name begins with loss_"),
    (["right", "other=3"], "other=3: --loss"),
    (["right", "coef=3"], "coef=3: the doctor gives it; leave it out"),
    (["right", "other"], "other: write NAME=VALUE"),
    (["right", "--seeds", "1"], "--seeds 1: give 2 or more"),
    (["right", "--seeds", "x"], "argument --seeds: invalid int value: 'x'"),
    (["right", "--placement", "split"], "takes neither rewards nor advantages"),
    (["right", "--placement", "here"], "argument --placement: invalid choice: 'here'"),
    (["right", "--parity"], "--parity: not with --loss"),
    (["right", "--actor", "MINE:wide"], "gave (2, 5) for observations (2, 2); give logits (2, 4)"),
    (["right", "--actor", "MINE:noisy"], "two calls give different logits; leave dropout"),
    (["right", "--actor", "MINE:frozen"], "its logits have no gradient"),
    (["right", "--actor", "MINE:no_network"], "returned int; return a network (nn.Module)"),
]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def refused(capsys, code: int, *words: str) -> str:
    """Run the command; returns the one line that it left with."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    said = capsys.readouterr()
    assert stop.value.code == code, said
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(("words", "told"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_examined_is_refused_in_a_line(capsys, mine: Path, words, told) -> None:
    name, *others = (word.replace("MINE", str(mine)) for word in words)
    assert told in refused(capsys, 2, "--loss", f"{mine}:{name}", *others)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        ("mine.py", "--loss mine.py: write package.module:NAME or path/file.py:NAME"),
        ("mine:", "write package.module:NAME"),
        ("nowhere.py:f", "no such file nowhere.py; fix the path"),
        ("no_such_module:f", "importing no_such_module fails (ModuleNotFoundError"),
        ("broken.py:f", "broken.py fails (ZeroDivisionError: division by zero (line 2 of broken"),
        ("syntax.py:f", "syntax.py fails (SyntaxError: '(' was never closed (syntax.py, line 1)"),
        ("torch:exp", "its arguments cannot be read"),
        ("torchrl.objectives:ClipPPOLoss", "takes no coefficient of the KL"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(capsys, tmp_path, monkeypatch, loss, told) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("import os\n1 / 0\n")
    Path("syntax.py").write_text("def f(\n")
    assert told in refused(capsys, 2, "--loss", loss)


@pytest.mark.parametrize(
    ("name", "told"), [("raises", "IndexError: index 5000"), ("exits", "SystemExit: bye")]
)
def test_what_a_loss_raises_is_told_with_its_line(capsys, mine: Path, name, told) -> None:
    line = 1 + MINE.splitlines().index(f"def {name}(log_probs, coef):") + 1
    said = refused(capsys, 1, "--loss", f"{mine}:{name}")
    assert f"klrl doctor: failed: --loss {mine}:{name}: raised {told}" in said
    assert said.strip().endswith(f"(line {line} of mine.py)")


def test_a_call_that_fails_before_the_users_code_has_no_line(capsys, mine: Path) -> None:
    said = refused(capsys, 1, "--loss", f"{mine}:right", "--actor", f"{mine}:right")
    assert said.strip().endswith("missing 2 required positional arguments: 'mask' and 'coef'")


@pytest.mark.parametrize("words", [["--seeds", "3"], ["--actor", "a:b"], ["clip=2"]], ids=str)
def test_what_only_a_loss_reads_is_refused_without_one(capsys, words) -> None:
    said = refused(capsys, 2, *words)
    assert f"{' '.join(words)}: only --loss reads it; add --loss mine.py:NAME" in said


def test_settings_are_literals_or_texts() -> None:
    words = ["a=1e-3", "b=true", "c=null", "d=text", "e=[1, 2]", "f="]
    expected = {"a": 1e-3, "b": True, "c": None, "d": "text", "e": [1, 2], "f": ""}
    assert settings_of(words) == expected
    unhashable, deep = "{[]: 1}", "-" * 100_000 + "1"  # a TypeError, a MemoryError of literal_eval
    assert settings_of([f"a={unhashable}", f"b={deep}"]) == {"a": unhashable, "b": deep}
    with pytest.raises(ConfigError, match="1a=2: write NAME=VALUE"):
        settings_of(["1a=2"])
