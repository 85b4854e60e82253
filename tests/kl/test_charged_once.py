"""``reward - coef * KL`` is written in one module: read from the sources, whatever the spelling."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import klrl

PACKAGE = Path(klrl.__file__).parent

_SUBTRACT = re.compile(r"r?sub_?|subtract_?")
_ADD = re.compile(r"add_?|addcmul_?|addcdiv_?|lerp_?")


def is_coef(node: ast.AST) -> bool:
    """A name of a coefficient: not of the entropy's, nor of the critic's."""
    name = getattr(node, "attr", getattr(node, "id", ""))
    return "coef" in name and not re.match(r"entropy|critic", name)


def weighted(node: ast.AST) -> bool:
    """Whether an expression multiplies by a coefficient."""
    products = [
        n for n in ast.walk(node) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)
    ]
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and name_of(n).startswith("mul")]
    return any(is_coef(inner) for found in (*products, *calls) for inner in ast.walk(found))


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def negative(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def subtracts_a_penalty(node: ast.AST) -> bool:
    """``a - coef * b`` and its other spellings: ``-=``, ``-coef * b``, ``sub``, ``alpha=-coef``."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Sub):
        return weighted(node.right if isinstance(node, ast.BinOp) else node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return any(negative(n) and is_coef(n.operand) for n in (node.left, node.right))
    if negative(node):
        return weighted(node.operand)
    if not isinstance(node, ast.Call):
        return False
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    coefs = any(is_coef(inner) for value in given for inner in ast.walk(value))
    scales = [k.value for k in node.keywords if k.arg in ("alpha", "value")]
    less = _SUBTRACT.fullmatch(name_of(node)) or any(negative(value) for value in scales)
    known = _SUBTRACT.fullmatch(name_of(node)) or _ADD.fullmatch(name_of(node))
    return bool(coefs and less and known)


def penalties(source: str) -> list[str]:
    return [ast.unparse(n) for n in ast.walk(ast.parse(source)) if subtracts_a_penalty(n)]


def test_one_module_subtracts_the_kl() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if lines := penalties(path.read_text(encoding="utf-8")):
            found[path.relative_to(PACKAGE).as_posix()] = lines
    assert found == {
        "kl/charge.py": ["reward - coef * kl", "torch.addcmul(gain, kl, coef, value=-1)"]
    }, "call klrl.kl.charge.shaped instead"


@pytest.mark.parametrize(
    "line",
    [
        # the places that there were
        "out = [r - coeff * row.unsqueeze(-1) for r, row in zip(rewards, kl, strict=True)]",
        "written = {self.out_key: reward - self.coef * kl}",
        "next_tensordict.set(self.reward_key, reward - self.coeff * kl)",
        "return_ = next_tensordict.set(self.out_key, reward - self.coef * kl.view_as(reward))",
        "reward = reward - coef * kl.masked_fill(~mask, 0.0)",
        "advantage = BASELINES[baseline](score, group_size)[:, None] - coef * kl_to_go",
        "gained = torch.addcmul(gained, kl_ref, coefficients.kl_ref, value=-1)",
        # and other spellings
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


@pytest.mark.parametrize(
    "line",
    [
        "gain = surrogate - beta * kl_old",
        "bonus = -c.entropy_coeff * entropy",
        "gained = torch.add(gain, distance, alpha=-c.critic_coeff)",
        "kl_ref = kl_coef * penalty",
        "change = after.coef - before.coef",
    ],
)
def test_the_rule_leaves_other_lines_alone(line: str) -> None:
    assert not penalties(line)
