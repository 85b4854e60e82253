"""A sweep on a machine with two CUDA devices, which the stand-in has."""

import json
import os
import subprocess
import sys
from pathlib import Path

from klrl.config.compose import job_config
from klrl.config.identity import settings_hash
from tests.conftest import QUICK
from tests.device.library import build
from tests.device.test_device import ROOT, pytestmark

__all__ = ["pytestmark"]


def test_joblib_spreads_jobs_over_the_devices_and_a_job_is_the_same_on_each(tmp_path) -> None:
    """Two at once by default; the device is in the manifest, not in the settings."""
    build()
    (tmp_path / "sitecustomize.py").write_text("import tests.device.standin\n")
    words = [*QUICK, "frames=512", "learner.compile=false"]
    done = subprocess.run(
        [sys.executable, "-m", "klrl", "-m", "sweep=a", *words, "seed=0,1,2", "launcher=joblib"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 to start\njobs at once: 2, on cuda:0, cuda:1\n" in done.stdout
    manifests = [
        json.loads(Path(f"outputs/a/seed={seed}/manifest.json").read_text(encoding="utf-8"))
        for seed in range(3)
    ]
    assert {manifest["device"] for manifest in manifests} == {"cuda:0", "cuda:1"}
    expected = [settings_hash(job_config([*words, f"seed={seed}"])) for seed in range(3)]
    assert [manifest["config_hash"] for manifest in manifests] == expected
