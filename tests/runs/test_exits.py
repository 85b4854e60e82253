"""User code that ends the process, or changes the current folder, in both domains."""

from pathlib import Path

import pytest

import klrl
from klrl.base.errors import ExitError
from tests.conftest import QUICK
from tests.runs.commands import manifest_of, said

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LEAVES = """
import asyncio, sys, gymnasium, numpy as np
ERRORS = {"exit": SystemExit(0), "none": SystemExit(None), "cancel": asyncio.CancelledError()}
class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, where, after=40, error="exit"):
        self.where, self.left, self.error, self.steps = where, after, ERRORS[error], 0
        self.leave("constructor")
    def leave(self, name):
        self.left -= name == self.where
        if name == self.where and self.left < 0:
            raise self.error
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.leave("reset")
        self.steps = 0
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.leave("step")
        self.steps += 1
        return np.zeros(1, np.float32), float(action), self.steps == 8, False, {}
"""
OWN = (*QUICK, "env=custom", "env.target=leaves:Env", "frames=512", "checkpoint.every=1")


@pytest.mark.parametrize(
    ("where", "after", "error"),
    [
        *(("constructor", 0, "exit"), ("reset", 6, "exit")),
        *(("step", 50, "none"), ("step", 50, "cancel")),
    ],
)
def test_an_environment_that_exits_is_no_success(where, after, error, capsys) -> None:
    Path("leaves.py").write_text(LEAVES)
    args = (f"env.args.where={where}", f"env.args.after={after}", f"env.args.error={error}")
    code, _, err = said(capsys, *OWN, *args, "hydra.run.dir=run")
    (line,) = err.splitlines()
    named = "CancelledError" if error == "cancel" else "SystemExit"
    assert named in line
    assert code == (1 if after else 2)
    assert Path("run").exists() == bool(after)
    if after:
        assert manifest_of(Path("run"))["status"] == "failed"
        assert named in manifest_of(Path("run"))["error"]
        code, _, err = said(capsys, "-m", *OWN, *args, "seed=0,1", "sweep=s")
        assert code == 1
        jobs = Path("outputs/s").glob("*/manifest.json")
        assert [manifest_of(path.parent)["status"] for path in jobs] == ["failed"] * 2


class Leaving(klrl.Callback):
    def iterated(self, training, row, batch) -> None:
        raise SystemExit(0)


def test_other_code_that_exits_is_no_success_either(settings) -> None:
    with pytest.raises(ExitError, match="SystemExit: 0"):
        klrl.run(settings(), folder="run", callbacks=[Leaving()])
    assert manifest_of(Path("run"))["status"] == "failed"
