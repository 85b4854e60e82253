"""Pong from pixels: klrl and Stable-Baselines3 in turn, frames per CPU-second, one thread each.

    python -m benchmarks.pong                        # 3 rounds of 4,096 frames each

The same environment (Gymnasium's own wrappers: 4 frames of the game a step, 84 x 84 grey pixels, 4
of them stacked), Mnih et al.'s network of 512 units shared by policy and critic, 8 copies of 128
steps, 4 epochs of 4 minibatches, Adam at 2.5e-4, entropy .01, clipped. klrl measures its KL beside.
The first iteration is not counted. Needs klrl[atari] and stable-baselines3.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.peers.common import Clock, report
from benchmarks.results import table
from benchmarks.rounds import Line, error_in, rounds, run_line

if TYPE_CHECKING:
    import gymnasium as gym

COPIES, STEPS, EPOCHS, MINIBATCHES, RATE, ENTROPY = 8, 128, 4, 4, 2.5e-4, 0.01


def train_klrl(args: argparse.Namespace, clock: Clock) -> None:
    """``env=atari``, its copies and steps said once more."""
    from benchmarks.peers.klrl_timed import make_config, run_quietly, time_training

    words = [
        *("env=atari", f"env.num_envs={COPIES}", "env.normalize_reward=false", "kl=legacy"),
        *("loss=clip", f"loss.entropy_coeff={ENTROPY}", f"collector.steps={STEPS}"),
        *(f"learner.epochs={EPOCHS}", f"learner.minibatches={MINIBATCHES}", f"optim.lr={RATE}"),
        *(f"frames={args.frames}", f"seed={args.seed}", "device=cpu", "threads=1"),
        *("logger=none", "eval.every=0", "eval.final=0", "checkpoint.every=1000000000"),
    ]
    config = make_config(words, clock)
    time_training(clock, lambda training, batch: None)
    run_quietly(config)


def make_pong() -> gym.Env:
    """What conf/env/atari.yaml says."""
    import ale_py
    import gymnasium as gym
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", frameskip=1)
    env = AtariPreprocessing(env, frame_skip=4, screen_size=84)
    return FrameStackObservation(env, stack_size=4)


def train_sb3(args: argparse.Namespace, clock: Clock) -> None:
    """``CnnPolicy``, whose network is the same; its other settings are its defaults."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.logger import configure

    from benchmarks.peers.sb3 import Watch

    with tempfile.TemporaryDirectory() as folder:
        model = PPO(
            "CnnPolicy",
            make_vec_env(make_pong, COPIES, seed=args.seed),
            n_steps=STEPS,
            batch_size=COPIES * STEPS // MINIBATCHES,
            n_epochs=EPOCHS,
            learning_rate=RATE,
            ent_coef=ENTROPY,
            seed=args.seed,
            device="cpu",
        )
        model.set_logger(configure(folder, ["csv"]))
        model.learn(args.frames, callback=Watch(clock, curve=False), log_interval=1)


CONTENDERS: dict[str, Callable[[argparse.Namespace, Clock], None]] = {
    "klrl": train_klrl,
    "Stable-Baselines3": train_sb3,
}


def measure(name: str, args: argparse.Namespace) -> None:
    """One contender in this process; prints its line."""
    os.environ["OMP_NUM_THREADS"] = "1"
    clock = Clock()
    import torch

    torch.set_num_threads(1)
    CONTENDERS[name](args, clock)
    args.env, args.n, args.t, args.curve = "pong", COPIES, STEPS, False
    report(name, args, clock)


def compare(args: argparse.Namespace) -> None:
    """All contenders in turn, then the table."""

    def task(name: str) -> Callable[[int], Line]:
        words = ["--one", name, "--frames", str(args.frames)]
        return lambda number: run_line(
            [sys.executable, "-m", "benchmarks.pong", *words, "--seed", str(number)]
        )

    names = [name for name in CONTENDERS if args.only in (None, name)]
    found = rounds({name: task(name) for name in names}, args.rounds)
    rows: list[list[Any]] = []
    for name, lines in found.items():
        if error_in(lines):
            rows.append([name, error_in(lines), "", ""])
            continue
        each = [line["frames_per_cpu_second"] for line in lines]
        peak = max(line["peak_mb"] for line in lines)
        spread = f"{min(each):.1f} to {max(each):.1f}"
        rows.append([name, f"{statistics.median(each):.1f}", spread, f"{peak:,}"])
    print(table(["", "frames per CPU-second, median", "range", "peak MB"], rows))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CONTENDERS)
    parser.add_argument("--one", choices=CONTENDERS, help="in this process, one line of JSON")
    parser.add_argument("--frames", type=int, default=4 * COPIES * STEPS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.one:
        measure(args.one, args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
