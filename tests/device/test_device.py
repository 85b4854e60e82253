"""What can be known of CUDA without one: klrl on a stand-in with two devices (``standin.cpp``).

The tests are in ``check_*.py``, in a process of their own: the stand-in comes before torch.
"""

import importlib.util
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


def in_a_process(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a process of its own, with its output captured."""
    build()
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    print(done.stdout, done.stderr)
    return done


def test_on_a_stand_in_for_cuda() -> None:
    names = ("budget", "capture", "acting", "simulators", "acceptance", "runs")
    files = (str(HERE / f"check_{name}.py") for name in names)
    inside = str(Path("inside").resolve())
    done = in_a_process("tests.device.standin", "pytest", *HOW, inside, *files)
    assert done.returncode == 0


@pytest.mark.services
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_update_is_compiled_for_a_gpu_that_is_not_here(arch: str) -> None:
    """Five families, three losses: kernels of that architecture alone, none on the host."""
    done = in_a_process("tests.device.cross_compile", arch)
    assert (done.returncode, done.stdout.count(arch)) == (0, 15)
