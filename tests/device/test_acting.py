"""Acting on a CUDA device, held by the stand-in: small MLPs in numpy, other networks captured."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STANDIN = Path(os.environ.get("KLRL_STANDIN", "/nowhere"))

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not (STANDIN / "libstandin.so").exists(), reason="no stand-in of CUDA here"),
]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What ``acting.py`` prints, in a process of its own: torch is patched there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.acting"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{STANDIN}"},
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", ["normal", "tanh_normal", "categorical"])
def test_a_small_mlp_acts_on_the_cpu_as_on_a_cpu(found, family: str) -> None:
    """First rollout and evaluations to the bit; a rollout reads the parameters in one copy."""
    here = found[family]
    assert here["in_numpy"]
    assert len(here["equal"]) >= 3
    assert all(here["equal"])
    for cpu, cuda in here["evaluations"]:
        assert cpu == cuda
    assert here["a rollout"] == {"copy:d2h": 1, "copy:h2d": 0, "launch": 1}
    assert here["its steps"] == {"copy:d2h": 0, "copy:h2d": 0, "launch": 0}


@pytest.mark.parametrize("network", ["cnn", "large"])
def test_other_networks_act_on_the_device(found, network: str) -> None:
    """A copy in and one out per step; a graph for the rollout and one for all evaluations."""
    here = found[network]
    assert here["in_torch"]
    assert here["captured"] == [True, True]
    assert here["captured_once"]
    assert here["a step"]["copy:d2h"] == here["a step"]["copy:h2d"] == 1
    assert here["said"] == ""


def test_a_network_that_cannot_be_captured_acts_eagerly(found) -> None:
    here = found["own"]
    assert here["captured"] == [False, False]
    assert here["captured_once"]
    assert here["said"].count("acting: eager, since the CUDA graph failed: RuntimeError") == 2
