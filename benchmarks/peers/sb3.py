"""Stable-Baselines3's PPO, on one thread.

Equal work: VecNormalize for observations (not for rewards), Monitor for episode returns, one row of
CSV per iteration.
"""

from __future__ import annotations

import argparse
import os
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks.peers.common import ENV_IDS, Clock, make_parser, report


class Watch(BaseCallback):
    """Laps."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def _on_training_start(self) -> None:
        self.clock.start()
        self._begun = False

    def _on_rollout_start(self) -> None:
        # A rollout starts where the update before it ended; the last update ends with learn().
        if self._begun:
            self.clock.lap()
        self._begun = True

    def _on_training_end(self) -> None:
        self.clock.lap()

    def _on_step(self) -> bool:
        return True


def make_model(args: argparse.Namespace) -> PPO:
    """Copies in this process (DummyVecEnv); MlpPolicy is two networks of 64 x 64 tanh.

    ``--cleanrl``: as ppo_continuous_action.py has it, rewards are normalised, the value's change is
    clipped, and the learning rate falls.
    """
    env = make_vec_env(ENV_IDS[args.env], args.n, seed=args.seed)
    like = {"clip_range_vf": 0.2} if args.cleanrl else {}
    return PPO(
        "MlpPolicy",
        VecNormalize(env, norm_reward=args.cleanrl),
        n_steps=args.t,
        batch_size=args.n * args.t // args.minibatches,
        n_epochs=args.epochs,
        learning_rate=(lambda left: left * args.lr) if args.cleanrl else args.lr,
        policy_kwargs={"net_arch": [args.width, args.width]},
        **like,
        gamma=args.gamma,
        gae_lambda=args.lmbda,
        seed=args.seed,
        device="cpu",
    )


def watch_phases(model: PPO, clock: Clock) -> None:
    """Book what SB3 does, at the methods where it does it."""
    buffer = model.rollout_buffer
    model.env.step_wait = clock.timed("env", model.env.step_wait)
    buffer.compute_returns_and_advantage = clock.timed(
        "advantage", buffer.compute_returns_and_advantage
    )
    model.collect_rollouts = clock.timed("rollout", model.collect_rollouts)
    model.train = clock.timed("update", model.train)


def main() -> None:
    clock = Clock()
    torch.set_num_threads(1)
    parser = make_parser(__doc__)
    parser.add_argument("--cleanrl", action="store_true", help="CleanRL's settings")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(args)
        model.set_logger(configure(folder, ["csv"]))
        watch_phases(model, clock)
        model.learn(args.n * args.t * args.iterations, callback=Watch(clock), log_interval=1)
    for lap in clock.laps:
        lap["rollout"] -= lap["advantage"]  # SB3 computes it inside its collect_rollouts
    report("Stable-Baselines3", args, clock)


if __name__ == "__main__":
    main()
