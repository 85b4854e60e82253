"""A run folder from elsewhere: does it run anything? Changed code: is it seen?

    python -m benchmarks.reliability.trust

The stored settings of a run name a command, a module in the run folder, and a registered
environment; each is given to each command (see ``hostile``). Then the reward of an environment
behind ``env.id`` is multiplied by 5 in a finished sweep. Exit code 1 where something ran, or where
the change was not seen.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.reliability import hostile
from benchmarks.results import ROOT, environment

SMALL = ["frames=64", "env.num_envs=2", "collector.steps=32", "learner.minibatches=2"]
SMALL += ["actor.hidden=[8]", "eval.every=0", "logger=none"]
MINE = """import gymnasium
from gymnasium.envs.classic_control import PendulumEnv
class Mine(PendulumEnv):
    def step(self, action):
        state, reward, *rest = super().step(action)
        return state, 1 * reward, *rest
gymnasium.register("Mine-v0", entry_point=Mine, max_episode_steps=200)
"""


def klrl(work: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command line in a process and with a state folder of its own."""
    own = {"XDG_STATE_HOME": str(work / "state"), "PYTHONPATH": f"{work / 'lib'}:{ROOT}"}
    command = [sys.executable, "-m", "klrl", *words]
    return subprocess.run(
        command, cwd=work, env={**environment(), **own}, capture_output=True, text=True, check=False
    )


def changed(work: Path) -> list[str]:
    """Multiply the reward behind ``env.id`` by 5; what is wrong with what is said."""
    module = work / "lib" / "mine.py"
    module.parent.mkdir()
    module.write_text(MINE, encoding="utf-8")
    sweep = ["-m", "sweep=s", "env=gym", "env.id=mine:Mine-v0", *SMALL]
    run = "outputs/s/job"
    klrl(work, *sweep)
    module.write_text(MINE.replace("1 * reward", "5 * reward"), encoding="utf-8")
    told = {
        "evaluate says nothing": "has changed"
        in klrl(work, "evaluate", run, "--episodes", "1").stderr,
        "the sweep takes it for finished": "1 to start" in klrl(work, *sweep).stdout,
        "the resume goes on": klrl(work, f"resume={run}", "frames=128").returncode == 2,
    }
    return [wrong for wrong, right in told.items() if not right]


def main() -> None:
    """Try all; print what is wrong."""
    ran = hostile.main(["--case", r"^env\.(path=RUN|target=subprocess:Popen|id=evil)"])
    with tempfile.TemporaryDirectory(prefix="klrl-trust-") as folder:
        wrong = changed(Path(folder))
    print("\n".join(wrong) or "a changed reward is seen by evaluate, sweep and resume")
    sys.exit(bool(ran or wrong))


if __name__ == "__main__":
    main()
