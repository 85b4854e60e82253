"""Faults that others made, seeded into a copy of the package: the tests must fail, and end."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
#: The ordinary tests of the KL's value, gradient and control; quick, and no runs.
ORDINARY = (
    "tests/transforms/test_transforms.py",
    "tests/control/test_networks.py",
    "tests/losses/test_placement.py",
    "tests/losses/test_modules.py",
    "tests/kl/test_properties.py",
)
#: Seconds.
LIMIT = 200
SKIP_RUNS = ("-m", "not integration and not slow", "-k", "not torchrls_trainer")

FAULTS = {
    each["fault"]: each
    for each in yaml.safe_load((ROOT / "tests/seeded_faults.yaml").read_text("utf-8"))
}
OWN = ("-m", "not slow")  # services too
#: The tests of a fault that has its own, else the ordinary ones.
TESTS = {name: (*OWN, each["test"]) for name, each in FAULTS.items() if "test" in each}


def run_tests(copy: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Ends, or the fault hangs the suite: LIMIT says when."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *tests],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=LIMIT,
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
    told = FAULTS[fault]
    text = (ROOT / told["file"]).read_text(encoding="utf-8")
    assert told["right"] in text, f"{told['file']} changed: seed the fault anew"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "tests", [(*SKIP_RUNS, *ORDINARY), *sorted(set(TESTS.values()))], ids=lambda each: each[-1]
)
def test_the_control_passes(tests: tuple[str, ...], package: Path) -> None:
    done = run_tests(package, tests)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_test_fails_for(fault: str, package: Path) -> None:
    told = FAULTS[fault]
    path = package / told["file"]
    text = path.read_text(encoding="utf-8").replace(told["right"], told["wrong"])
    path.write_text(text, encoding="utf-8")
    done = run_tests(package, TESTS.get(fault, (*SKIP_RUNS, *ORDINARY)))
    assert done.returncode == 1, f"{fault}: not noticed\n{done.stdout[-1500:]}"
    assert " failed" in done.stdout or "FAILED" in done.stdout
