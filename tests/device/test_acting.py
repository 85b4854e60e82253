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
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (STANDIN / "libstandin.so").exists(), reason="no stand-in of CUDA here"),
]


def found(kind: str) -> dict[str, dict[str, Any]]:
    """What ``acting.py`` prints, in a process of its own: torch is patched there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.acting", kind],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{STANDIN}"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_small_mlp_acts_as_on_a_cpu() -> None:
    """First rollout and evaluations to the bit; a rollout reads the parameters in one copy."""
    for family, here in found("mirrored").items():
        assert here["in_numpy"], family
        assert len(here["equal"]) >= 3
        assert all(here["equal"]), family
        for cpu, cuda in here["evaluations"]:
            assert cpu == cuda, family
        nothing = dict.fromkeys(here["its steps"], 0)
        assert here["a rollout"] == {**nothing, "copy:d2h": 1, "launch": 1}
        assert here["its steps"] == nothing


def test_other_networks_act_on_the_device_captured_where_they_can_be() -> None:
    """A copy in and one out per step; a graph for the rollout and one for all evaluations."""
    networks = found("on_the_device")
    for name, here in networks.items():
        assert here["in_torch"], name
        assert here["forwards"] == 2
        assert here["forwards_kept"]
        assert here["a step"]["copy:h2d"] == here["a step"]["copy:d2h"] == 1
        assert here["a step"]["graph:replay"] == (name != "own")
    assert networks["cnn"]["said"] == networks["large"]["said"] == ""
    said = networks["own"]["said"]
    assert said.count("acting: eager, since the CUDA graph failed: RuntimeError") == 2
