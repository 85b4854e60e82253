"""On a CUDA device: the update and the actions are the CPU's. ``make gpu`` measures more."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_an_update_agrees_with_the_cpus(mode: str) -> None:
    from benchmarks import gpu

    assert gpu.disagreement(mode, *gpu.SMALL) < gpu.TOLERANCE


def test_captured_actions_agree_with_numpys() -> None:
    from benchmarks import gpu

    assert gpu.acting_disagreement() < 1e-4
