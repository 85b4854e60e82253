"""Hopper from 20 demonstrations: cloned, then reinforcement learning with and without the anchor.

    python -m benchmarks.imitation                    # five seeds; goes on where it stopped
    python -m benchmarks.imitation --peer OTHER/bin/python   # with `imitation` (PyPI) there
    python -m benchmarks.imitation --table

Of each seed: an expert, 20 sampled episodes of it, their clone (the best checkpoint), and
reinforcement learning from the clone on a changed task, a torso twice as heavy, at several
``kl.coef`` to the clone. Each policy is played on the old and on the new task, and its KL to the
clone is measured on the new one. The peer is ``imitation.algorithms.bc`` on the same data, with a
network of the same size. A policy is a line of docs/results/imitation/cells.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.predictors.models import HEAVY, heavier_torso
from benchmarks.results import ROOT

CELLS = ROOT / "docs" / "results" / "imitation" / "cells.jsonl"
OUTPUTS = Path("outputs/results/imitation")
TASK = ("env=hopper", "env.reward_scale=0.1", "env.normalize_reward=false")
COMMON = ("logger=none", "eval.every=0")
LOSS = "loss=klpen"  # the preset's when the committed lines ran
NEW, OLD = f"env.kwargs.xml_file={HEAVY}", "env.kwargs.xml_file=hopper.xml"
COEFS = ("0", "0.3", "1")
SEEDS = range(5)
EPISODES = 20
#: Run by the interpreter of --peer: argv is the data, the weights to write, the seed.
PEER = """
import sys, numpy as np, torch
from gymnasium.spaces import Box
from imitation.algorithms import bc
from imitation.data.types import Transitions
from stable_baselines3.common.policies import ActorCriticPolicy
data, into, seed = np.load(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.manual_seed(seed); torch.set_num_threads(1)
seen, acts = data["observation"], data["action"]
spaces = Box(-np.inf, np.inf, seen.shape[1:]), Box(-1, 1, acts.shape[1:])
policy = ActorCriticPolicy(*spaces, lr_schedule=lambda _: 1e-3, net_arch=[64, 64])
infos, no = np.array([{}] * len(seen)), np.zeros(len(seen), bool)
frames = Transitions(obs=seen, acts=acts, infos=infos, next_obs=seen, dones=no)
trainer = bc.BC(observation_space=spaces[0], action_space=spaces[1], demonstrations=frames,
                policy=policy, rng=np.random.default_rng(seed))
trainer.train(n_epochs=50, log_interval=10**9, progress_bar=False)
layers = [*policy.mlp_extractor.policy_net[::2], policy.action_net]
np.savez(into, *[x.detach().numpy() for layer in layers for x in (layer.weight, layer.bias)])
"""


def klrl(*words: str) -> str:
    """Run a command of klrl; returns what it printed."""
    command = [sys.executable, "-m", "klrl", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()[-500:]}")
    return done.stdout


def trained(name: str, *words: str) -> str:
    """The folder of a finished run: started, resumed or found."""
    folder = OUTPUTS / name
    manifest = ROOT / folder / "manifest.json"
    if not manifest.exists():
        klrl(*TASK, *COMMON, *words, f"hydra.run.dir={folder}")
    elif json.loads(manifest.read_text())["status"] != "finished":
        klrl(f"resume={folder}")
    return str(folder)


def played(run: str, which: str) -> dict[str, float]:
    """Returns over 100 deterministic episodes on the old and on the new task."""
    how = ("--checkpoint", which, "--json")
    tasks = {"old": OLD, "new": NEW}
    found = {name: json.loads(klrl("evaluate", run, word, *how)) for name, word in tasks.items()}
    return {name: float(each["eval/return"]) for name, each in found.items()}


def peer(python: str, data: Path, seed: int) -> dict[str, float]:
    """The return of ``imitation``'s clone on the old task, over 100 deterministic episodes."""
    import gymnasium
    import numpy as np
    from tensordict import TensorDict

    frames, weights = TensorDict.load_memmap(data), data.parent / "peer.npz"
    table = {key: frames[key].numpy() for key in ("observation", "action")}
    np.savez(data.parent / "frames.npz", **table)
    words = [python, "-c", PEER, str(data.parent / "frames.npz"), str(weights), str(seed)]
    subprocess.run(words, check=True, capture_output=True)
    *hidden, last = zip(*[iter(np.load(weights).values())] * 2, strict=True)
    env, returns = gymnasium.make("Hopper-v5"), []
    for episode in range(100):
        seen, total, over = env.reset(seed=episode)[0], 0.0, False
        while not over:
            x = seen
            for weight, bias in hidden:
                x = np.tanh(weight @ x + bias)
            seen, reward, ended, cut, _ = env.step(np.clip(last[0] @ x + last[1], -1, 1))
            total, over = total + float(reward), ended or cut
        returns.append(total)
    return {"old": statistics.fmean(returns)}


def cells() -> list[dict[str, Any]]:
    """The lines that are there."""
    text = CELLS.read_text("utf-8") if CELLS.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def seed_of(seed: int, python: str | None) -> None:
    """Add the lines of a seed that are missing."""
    there = {cell["policy"] for cell in cells() if cell["seed"] == seed}

    def add(policy: str, **numbers: float) -> None:
        with CELLS.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"seed": seed, "policy": policy, **numbers}) + "\n")
        print(seed, policy, numbers, flush=True)

    wanted = {"expert", "clone", *(f"kl.coef={coef}" for coef in COEFS)}
    if not wanted - there and (python is None or "imitation" in there):
        return
    expert = trained(f"expert_{seed}", LOSS, "kl=none", "frames=500000", f"seed={seed}")
    data = ROOT / OUTPUTS / f"data_{seed}" / "frames"
    if not data.exists():
        klrl("record", expert, "--episodes", str(EPISODES), "--sampled", "-o", str(data))
    words = ("experiment=clone", f"data={data.relative_to(ROOT)}", f"seed={seed}")
    clone = trained(f"clone_{seed}", *words)
    if "expert" not in there:
        add("expert", **played(expert, "last"))
    if "clone" not in there:
        add("clone", **played(clone, "best"))
    near = ("reference=checkpoint", f"reference.path={clone}", "reference.which=best")
    begin = (LOSS, f"actor.init={clone}", "actor.init_which=best", NEW, "frames=100000")
    for coef in COEFS:
        if f"kl.coef={coef}" not in there:
            run = trained(f"rl_{coef}_{seed}", *near, *begin, f"kl.coef={coef}", f"seed={seed}")
            found = json.loads(klrl("kl", run, NEW, "--episodes", "10", "--json"))
            kl = found["KL(policy||reference) on policy"]["mean"]
            add(f"kl.coef={coef}", **played(run, "last"), kl=kl)
    if python is not None and "imitation" not in there:
        add("imitation", **peer(python, data, seed))


def table() -> str:
    """Means over the seeds, with their range, as a table of Markdown."""
    lines = ["| policy | seeds | old task | new task | KL to the clone |", "|---|---|---|---|---|"]
    for policy in dict.fromkeys(cell["policy"] for cell in cells()):
        of = [cell for cell in cells() if cell["policy"] == policy]
        columns = []
        for key, digits in (("old", 0), ("new", 0), ("kl", 3)):
            values = [cell[key] for cell in of if key in cell]
            mean = f"{statistics.fmean(values):,.{digits}f}" if values else ""
            span = f" ({min(values):,.{digits}f} to {max(values):,.{digits}f})" if values else ""
            columns.append(mean + span)
        lines.append(f"| {policy} | {len(of)} | {' | '.join(columns)} |")
    return "\n".join(lines)


def draw(path: Path) -> None:
    """Draw the policies' returns on both tasks: the mean with its interval, a dot per seed."""
    from benchmarks.shipped.draw import BLUE, ORANGE, dots, panels
    from benchmarks.shipped.tables import Row

    names = [*dict.fromkeys(cell["policy"] for cell in cells())]
    names.insert(2, names.pop(names.index("imitation")))  # next to the other clone
    with panels(path, 1, 2, height=4.0) as axes:
        for each, key, colour, title in (
            (axes[0][0], "old", BLUE, "Hopper, on which the expert was trained"),
            (axes[0][1], "new", ORANGE, "with a torso twice as heavy"),
        ):
            shown = [name for name in names if key == "old" or name != "imitation"]
            for place, name in enumerate(shown):
                values = [c[key] for c in cells() if c["policy"] == name]
                dots(each, place, Row({"policy": name}, {key: values}), key, colour)
            each.set_xticks(range(len(shown)), shown, rotation=20)
            each.set(title=title, ylabel="return per episode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", metavar="PYTHON", help="of an environment with imitation in it")
    parser.add_argument("--table", action="store_true", help="print and draw the finished cells")
    args = parser.parse_args()
    if not args.table:
        import gymnasium

        path = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "hopper.xml"
        (ROOT / HEAVY).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / HEAVY).write_text(heavier_torso(path.read_text("utf-8")), encoding="utf-8")
        CELLS.parent.mkdir(parents=True, exist_ok=True)
        for seed in SEEDS:
            seed_of(seed, args.peer)
    print(table())
    draw(CELLS.with_name("imitation.png"))


if __name__ == "__main__":
    main()
