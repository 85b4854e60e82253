"""What is loaded of a run is what was saved, bit for bit; how it goes on is in test_resumption."""

from pathlib import Path
from typing import Any

import pytest
import torch

from klrl.config import JobConfig
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training
from tests.runs.saves import assert_same

pytestmark = pytest.mark.integration


def assert_loaded_as_saved(config: JobConfig) -> None:
    """Every component of a trained run, in a fresh one that loads its checkpoint, bit for bit."""

    def states(run: Training) -> dict[str, Any]:
        parts = {**run.parts.components(), "counters": run.counters}
        parts.pop("rollout", None)  # its environments are closed
        parts |= {"controller": run.controller, "beta": run.parts.learner.beta_rule}
        parts |= {"rate": run.parts.learner.rate} if run.parts.learner.rate else {}
        return {name: part.state_dict() for name, part in parts.items()}

    saved, fresh = Training(config), Training(config)
    saved.train(RunFolder(Path("run")))
    generator = torch.random.get_rng_state()
    torch.manual_seed(99)
    fresh.checkpoints(RunFolder(Path("run"))).load_last(fresh.parts.device)
    assert_same(states(fresh), states(saved))
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert saved.counters.iteration > 1


@pytest.mark.parametrize(
    "words",
    [
        ["kl=none", "loss=clip", "optim=adamw"],
        ["reference=ema", "controller=dual", "loss=klpen_held", "eval.every=1", "eval.episodes=1"],
        ["controller=held", "controller.target=1e-4", "controller.unit=step"],
        ["env=cartpole", "env.normalize_observation=true", "actor.share_trunk=true"],
        ["kl=none", "loss=clip", "optim.rate=kl_adaptive"],
        ["loss=trpo", "kl=none"],
    ],
    ids=lambda words: words[0],
)
def test_what_is_loaded_is_what_was_saved_bit_for_bit(words, settings) -> None:
    assert_loaded_as_saved(settings(*words))
