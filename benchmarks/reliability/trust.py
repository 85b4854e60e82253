"""A run folder from elsewhere: does it run anything? Changed code: is it seen?

    python -m benchmarks.reliability.trust

A run is made, and its stored settings are edited as an attacker would: they name a command, a
module in the run folder, and a registered environment. Each door is tried in a process of its own.
Then the reward of an environment behind ``env.id`` is multiplied by 5 in a finished sweep.
Exit code 1 where something ran, or where the change was not seen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

SMALL = ["frames=64", "env.num_envs=2", "collector.steps=32", "learner.minibatches=2"]
SMALL += ["actor.hidden=[8]", "eval.every=0", "logger=none"]
EVIL = "open({marker!r}, 'w').close()\ndef make(): return None\n"
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
    own = {"XDG_STATE_HOME": str(work / "state"), "PYTHONPATH": str(work / "lib")}
    own["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "klrl", *words],
        cwd=work,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )


def foreign(work: Path) -> list[str]:
    """Try each door with each way to name code; returns a line for each."""
    run, marker = work / "theirs", work / "it-ran"
    print(klrl(work, "env=pendulum", *SMALL, f"hydra.run.dir={run}").stderr, end="")
    for folder in (run, work / "lib"):
        folder.mkdir(exist_ok=True)
        (folder / "evil.py").write_text(EVIL.format(marker=str(marker)), encoding="utf-8")
    stored = run / ".hydra" / "config.yaml"
    settings = yaml.safe_load(stored.read_text("utf-8"))
    command = {"args": f"touch {marker}", "shell": True}
    ways = {
        "subprocess:Popen": {"name": "custom", "target": "subprocess:Popen", "args": command},
        "path: RUN": {"name": "custom", "target": "evil:make", "path": str(run)},
        "env.id": {"id": "evil:Evil-v0"},
    }
    doors = {
        "evaluate": ["evaluate", str(run)],
        "resume": [f"resume={run}", "frames=128"],
        "reference.path": ["reference=checkpoint", f"reference.path={run}", "env=pendulum", *SMALL],
        "actor.init": [f"actor.init={run}", "env=pendulum", *SMALL],
    }
    lines = []
    for way, env in ways.items():
        stored.write_text(yaml.safe_dump({**settings, "env": settings["env"] | env}), "utf-8")
        for door, words in doors.items():
            marker.unlink(missing_ok=True)
            done = klrl(work, *words)
            ran = "RAN" if marker.exists() else "nothing ran"
            lines.append(f"{way:17} {door:15} exit {done.returncode}  {ran}")
    return lines


def changed(work: Path) -> list[str]:
    """Multiply the reward behind ``env.id`` by 5; returns what is said, a line for each command."""
    module = work / "lib" / "mine.py"
    module.write_text(MINE, encoding="utf-8")
    sweep = ["-m", "sweep=s", "env=gym", "env.id=mine:Mine-v0", *SMALL]
    run = "outputs/s/job"
    klrl(work, *sweep)
    module.write_text(MINE.replace("1 * reward", "5 * reward"), encoding="utf-8")
    evaluated = klrl(work, "evaluate", run, "--episodes", "1").stderr
    again = klrl(work, *sweep).stdout
    resumed = klrl(work, f"resume={run}", "frames=128")
    return [
        "evaluate: " + ("says so" if "has changed" in evaluated else "SAYS NOTHING"),
        "sweep: " + ("starts it anew" if "1 to start" in again else "TAKES IT FOR FINISHED"),
        "resume: " + ("refuses" if resumed.returncode == 2 else "GOES ON"),
    ]


def main() -> None:
    """Try all, print a line for each."""
    work = Path(tempfile.mkdtemp(prefix="klrl-trust-"))
    try:
        lines = [*foreign(work), *changed(work)]
    finally:
        shutil.rmtree(work)
    print("\n".join(lines))
    wrong = ("RAN", "SAYS NOTHING", "GOES ON", "TAKES IT FOR FINISHED")
    sys.exit(any(line.endswith(wrong) for line in lines))


if __name__ == "__main__":
    main()
