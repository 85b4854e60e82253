"""Stable-Baselines3's PPO, on one thread.

Equal work: VecNormalize for observations (not for rewards), Monitor for episode returns, one row of
CSV per iteration. ``--zoo`` takes the settings of rl-baselines3-zoo for Pendulum-v1 instead.
"""

from __future__ import annotations

import argparse
import os
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from benchmarks.peers.common import ENV_IDS, Clock, make_parser, report

# hyperparams/ppo.yml of DLR-RM/rl-baselines3-zoo, entry Pendulum-v1 (it has no `normalize`);
# what it leaves out, batch_size=64 among it, is Stable-Baselines3's default.
ZOO_ENVS = 4
ZOO = {
    "n_steps": 1024,
    "gae_lambda": 0.95,
    "gamma": 0.9,
    "n_epochs": 10,
    "ent_coef": 0.0,
    "learning_rate": 1e-3,
    "clip_range": 0.2,
    "use_sde": True,
    "sde_sample_freq": 4,
}


class Watch(BaseCallback):
    """Laps, and the episodes that end."""

    def __init__(self, clock: Clock, curve: bool) -> None:
        super().__init__()
        self.clock, self.with_curve = clock, curve

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
        if self.with_curve:
            infos = self.locals["infos"]
            returns = [i["episode"]["r"] for i in infos if "episode" in i]
            self.clock.ended(self.num_timesteps, returns)
        return True


def make_env(args: argparse.Namespace) -> VecEnv:
    """Copies in this process (DummyVecEnv); Monitor sees the reward before it is scaled."""
    scaled = {}
    if args.reward_scale != 1:
        scaled = {
            "wrapper_class": gym.wrappers.TransformReward,
            "wrapper_kwargs": {"func": lambda reward: reward * args.reward_scale},
        }
    return make_vec_env(ENV_IDS[args.env], args.n, seed=args.seed, **scaled)


def make_model(args: argparse.Namespace) -> PPO:
    env = make_env(args)
    settings = dict(ZOO)
    if not args.zoo:
        env = VecNormalize(env, norm_obs=True, norm_reward=False)
        settings = {
            "n_steps": args.t,
            "batch_size": args.n * args.t // args.minibatches,
            "n_epochs": args.epochs,
            "learning_rate": args.lr,
            "gamma": args.gamma,
            "gae_lambda": args.lmbda,
        }
    # MlpPolicy is two networks of 64 x 64 tanh.
    return PPO("MlpPolicy", env, seed=args.seed, device="cpu", **settings)


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
    parser.add_argument("--zoo", action="store_true", help="rl-baselines3-zoo's for Pendulum-v1")
    args = parser.parse_args()
    if args.zoo:
        args.n, args.t = ZOO_ENVS, ZOO["n_steps"]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(args)
        model.set_logger(configure(folder, ["csv"]))
        watch_phases(model, clock)
        frames = args.n * args.t * args.iterations
        model.learn(frames, callback=Watch(clock, args.curve), log_interval=1)
    for lap in clock.laps:
        lap["rollout"] -= lap["advantage"]  # SB3 computes it inside its collect_rollouts
    report("Stable-Baselines3", args, clock)


if __name__ == "__main__":
    main()
