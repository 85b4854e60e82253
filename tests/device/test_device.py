"""What can be known of CUDA without one: klrl on a stand-in with two devices (``standin.cpp``).

The tests are in ``check_*.py``, each file in a process of its own: the stand-in comes before torch.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.library import build, unusable

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WHY_NOT = unusable()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]


#: With ``python -m tests.device.standin pytest``.
HOW = ("-x", "-p", "no:cacheprovider", "-p", "no:logging", "--basetemp")


@pytest.mark.parametrize(
    "checks",
    ["check_budget.py check_capture.py check_acting.py check_acceptance.py", "check_runs.py"],
)
def test_on_a_stand_in_for_cuda(checks: str) -> None:
    build()
    words = ("-m", "tests.device.standin", "pytest", *HOW, str(Path("inside").resolve()))
    done = subprocess.run(
        [sys.executable, *words, *(str(HERE / each) for each in checks.split())],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
