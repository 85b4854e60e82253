"""``reward - coef * KL`` is written in one module: read from the sources, whatever the spelling."""

import ast
import re
from pathlib import Path

import pytest

import klrl

PACKAGE = Path(klrl.__file__).parent
#: A coefficient's name: not the entropy's, nor the critic's.
COEF = r"(?:\w+\.)*(?!entropy|critic)\w*coef\w*(?:\.\w+)?"
#: In a line as :func:`ast.unparse` writes it.
PENALTY = re.compile(
    rf"-=? {COEF} \* "  # reward - coef * kl
    rf"|-=? [\w.]+ \* {COEF}"  # reward - kl * coef
    rf"|-=? [\w.]+\.mul_?\({COEF}"
    rf"|-\(?{COEF} \* "
    rf"|\b(?:sub|subtract|rsub)_?\(.*{COEF}"
    rf"|alpha=-{COEF}"
    rf"|{COEF}.*value=-1"
)


def penalties(source: str) -> list[str]:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""  # docstrings and messages say the formula too
    return [line.strip() for line in ast.unparse(tree).splitlines() if PENALTY.search(line)]


def test_one_module_subtracts_the_kl() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if lines := penalties(path.read_text(encoding="utf-8")):
            found[path.relative_to(PACKAGE).as_posix()] = lines
    assert found == {
        "kl/charge.py": [
            "return reward - coef * kl",
            "return torch.addcmul(gain, kl, coef, value=-1)",
        ]
    }, "call klrl.kl.charge.shaped instead"


@pytest.mark.parametrize(
    "line",
    [
        "out = [r - coeff * row.unsqueeze(-1) for r, row in zip(rewards, kl, strict=True)]",
        "written = {self.out_key: reward - self.coef * kl}",
        "reward = reward - coef * kl.masked_fill(~mask, 0.0)",
        "advantage = BASELINES[baseline](score, group_size)[:, None] - coef * kl_to_go",
        "gained = torch.addcmul(gained, kl_ref, coefficients.kl_ref, value=-1)",
        "reward -= kl * config.coef",
        "reward = -coef * kl + reward",
        "reward = -(coef * kl) + reward",
        "reward = reward.sub(coef * kl)",
        "reward = torch.sub(reward, kl, alpha=coef)",
        "reward = reward.add_(kl, alpha=-self.coef)",
        "reward = reward - kl.mul(kl_coef)",
    ],
)
def test_the_rule_sees_a_second_place(line: str) -> None:
    assert penalties(line)
