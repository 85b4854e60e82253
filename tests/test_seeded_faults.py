"""Faults that others made, seeded into a copy of the package: the ordinary tests must fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: The ordinary tests of the KL's value, gradient and control; quick, and no runs.
ORDINARY = (
    "tests/transforms/test_transforms.py",
    "tests/control/test_networks.py",
    "tests/losses/test_placement.py",
    "tests/losses/test_modules.py",
    "tests/kl/test_properties.py",
)
SKIP_RUNS = ("-m", "not integration and not slow", "-k", "not torchrls_trainer")

#: fault -> (file, what it says, what it says with the fault)
FAULTS: dict[str, tuple[str, str, str]] = {
    "sign flipped": (
        "klrl/kl/charge.py",
        "return reward - coef * kl",
        "return reward + coef * kl",
    ),
    "coefficient dropped": (
        "klrl/kl/charge.py",
        "return reward - coef * kl",
        "return reward - kl",
    ),
    "live instead of frozen reference": (
        "klrl/kl/reference.py",
        "return deepcopy(actor).requires_grad_(requires_grad).eval()",
        "return actor",
    ),
    "normaliser shared": (
        "klrl/kl/reference.py",
        "return deepcopy(actor).requires_grad_(requires_grad).eval()",
        "shared = {id(m): m for m in actor.modules() if hasattr(m, 'squares')}\n"
        "    return deepcopy(actor, shared).requires_grad_(requires_grad).eval()",
    ),
    "mask ignored": (
        "klrl/kl/estimators.py",
        "    if mask is None:\n",
        "    if True:\n",
    ),
    "detach dropped": (
        "klrl/losses/functional.py",
        "ratio = ratio.detach()",
        "pass",
    ),
    "ratio dropped": (
        "klrl/losses/functional.py",
        "return ratio * ESTIMATORS[estimator](log_prob - ref_log_prob)",
        "return ESTIMATORS[estimator](log_prob - ref_log_prob)",
    ),
    "beta moved in eval": (
        "klrl/losses/modules.py",
        'self.beta_update == "forward" and self.training',
        'self.beta_update == "forward"',
    ),
}


def ordinary_tests(copy: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *SKIP_RUNS, *ORDINARY],
        cwd=copy,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(copy)},
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("klrl", "conf", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("fault", FAULTS)
def test_there_is_a_place_for_the_fault(fault: str) -> None:
    name, right, _ = FAULTS[fault]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert right in text, f"{name} changed: seed the fault anew"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_control_passes(package: Path) -> None:
    done = ordinary_tests(package)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_ordinary_tests_fail_for(fault: str, package: Path) -> None:
    name, right, wrong = FAULTS[fault]
    path = package / name
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    done = ordinary_tests(package)
    assert done.returncode == 1, f"{fault}: not noticed\n{done.stdout[-1500:]}"
    assert " failed" in done.stdout or "FAILED" in done.stdout
