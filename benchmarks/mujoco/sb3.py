"""Stable-Baselines3's PPO with CleanRL's settings: one run, one thread, one line of JSON.

``python -m benchmarks.mujoco.sb3 --task half_cheetah --seed 0 [--frames N]``; the line has the
keys of ``cells.Line``, and is evaluated from the start states that close klrl's runs.

The settings are those of ppo_continuous_action.py. Two things remain Stable-Baselines3's own: its
clipped value loss is not the larger one of clipped and unclipped, and where the time limit ends an
episode the value of its last state is added.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import pairwise
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.mujoco.published import FRAMES, NAMES

if TYPE_CHECKING:
    from stable_baselines3 import PPO

STEPS, MINIBATCHES, RATE = 2048, 32, 3e-4
EPISODES = 100
POINTS = 50
#: For PPO, beside its learning rate.
SETTINGS: dict[str, Any] = {
    "n_steps": STEPS,
    "batch_size": STEPS // MINIBATCHES,
    "n_epochs": 10,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "clip_range_vf": 0.2,
    "normalize_advantage": True,
    "ent_coef": 0.0,
    # CleanRL: .5 times half of the mean square; Stable-Baselines3 takes no half.
    "vf_coef": 0.25,
    "max_grad_norm": 0.5,
}
#: These are its defaults, as are tanh, Adam's eps of 1e-5 and a std that sees no state.
POLICY: dict[str, Any] = {
    "net_arch": {"pi": [64, 64], "vf": [64, 64]},  # two networks
    "ortho_init": True,
    "log_std_init": 0.0,
}
NORMALIZE: dict[str, Any] = {
    "norm_obs": True,
    "norm_reward": True,
    "clip_obs": 10.0,
    "clip_reward": 10.0,
    "gamma": 0.99,
}
PACKAGES = ("stable-baselines3", "gymnasium", "mujoco")


class Row(NamedTuple):
    """An iteration: frames so far, mean return of the episodes that ended, seconds so far."""

    frames: int
    mean: float | None
    seconds: float


def env_id(task: str) -> str:
    """As in ``HalfCheetah-v5``."""
    return f"{NAMES[task]}-v5"


def whole_frames(frames: int) -> int:
    """As many as whole rollouts have; CleanRL leaves out the rest."""
    if frames < STEPS:
        raise ValueError(f"frames={frames}: give at least {STEPS}, one rollout")
    return frames // STEPS * STEPS


def learning_rate(left: float, frames: int) -> float:
    """CleanRL's: iteration i of n has 3e-4 (1 - (i - 1) / n); ``left`` is 1 - i / n."""
    return RATE * (left + STEPS / frames)


def settings(task: str, seed: int, frames: int) -> dict[str, Any]:
    """All that a run depends on, but for the versions."""
    return {
        "env": env_id(task),
        "num_envs": 1,
        "frames": frames,
        "seed": seed,
        "learning_rate": f"{RATE} to 0",
        **SETTINGS,
        **{f"policy.{key}": value for key, value in POLICY.items()},
        **{f"normalize.{key}": value for key, value in NORMALIZE.items()},
    }


def identity(of: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """A hash, as in ``0f3a...``: 12 digits."""
    text = json.dumps([of, versions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def known_identity(task: str, seed: int, frames: int = FRAMES) -> str:
    """That of a run with the packages that are installed."""
    of = settings(task, seed, whole_frames(frames))
    return identity(of, {name: metadata.version(name) for name in PACKAGES})


def run(task: str, seed: int, frames: int) -> dict[str, Any]:
    """Train, evaluate and tell.

    ``cpu`` is that of the whole process, as klrl's in ``cells.Line``: imports and evaluation are in
    it; ``evaluation_seconds`` tells the latter apart.
    """
    frames = whole_frames(frames)
    model = make_model(task, seed, frames)
    rows = train(model, frames)
    began = time.perf_counter()
    returns = evaluate(model, task)
    evaluation_seconds = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_SELF)
    from benchmarks.results import cpu_name

    of = settings(task, seed, frames)
    return {
        "name": f"{task} sb3 {seed}",
        "identity": known_identity(task, seed, frames),
        "words": [f"{key}={value}" for key, value in of.items()],
        "return": statistics.fmean(returns),
        "se": statistics.stdev(returns) / sqrt(len(returns)),
        "training": last_tenth(rows),
        "kl_old": None,
        "band": None,
        "band_end": None,
        "evaluation_seconds": round(evaluation_seconds, 3),
        "seconds": round(rows[-1].seconds, 3),
        "cpu": round(usage.ru_utime + usage.ru_stime, 1),
        "machine": cpu_name(),
        "curve": curve(rows),
    }


def make_model(task: str, seed: int, frames: int) -> PPO:
    """With one copy of the environment; Monitor sees its rewards before they are normalised."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    return PPO(
        "MlpPolicy",
        VecNormalize(make_vec_env(env_id(task), 1, seed=seed), **NORMALIZE),
        learning_rate=lambda left: learning_rate(left, frames),
        policy_kwargs=POLICY,
        stats_window_size=STEPS,  # no episode of an iteration is dropped
        seed=seed,
        device="cpu",
        **SETTINGS,
    )


def train(model: PPO, frames: int) -> list[Row]:
    """A row for each iteration, noted when its update ends."""
    rows: list[Row] = []
    began, update = time.perf_counter(), model.train

    def update_and_note() -> None:
        update()
        ended = model.ep_info_buffer
        mean = statistics.fmean(episode["r"] for episode in ended) if ended else None
        ended.clear()
        rows.append(Row(model.num_timesteps, mean, time.perf_counter() - began))

    model.train = update_and_note
    model.learn(frames)
    return rows


def evaluate(model: PPO, task: str) -> list[float]:
    """Raw returns of deterministic episodes, one from each of klrl's closing start states."""
    import gymnasium as gym

    from klrl.train.evaluate import CLOSING

    env, normalize = gym.make(env_id(task)), model.get_vec_normalize_env()
    returns = []
    for seed in CLOSING.seeds(EPISODES):
        observation, _ = env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            # normalize_obs leaves the statistics as they are.
            action, _ = model.predict(normalize.normalize_obs(observation), deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(action)
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns


def last_tenth(rows: Sequence[Row]) -> float | None:
    """Mean training return of the last tenth of the iterations in which an episode ended."""
    means = [row.mean for row in rows if row.mean is not None]
    return statistics.fmean(means[-max(1, len(means) // 10) :]) if means else None


def curve(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Training return and seconds over frames, in few points."""
    count = min(POINTS, len(rows))
    bounds = [round(index * len(rows) / count) for index in range(count + 1)]
    parts = [rows[first:last] for first, last in pairwise(bounds)]
    return {
        "frames": [part[-1].frames for part in parts],
        "return": [_mean(part) for part in parts],
        "seconds": [float(f"{part[-1].seconds:.5g}") for part in parts],
    }


def _mean(part: Sequence[Row]) -> float | None:
    means = [row.mean for row in part if row.mean is not None]
    return float(f"{statistics.fmean(means):.5g}") if means else None


def main(argv: Sequence[str] | None = None) -> None:
    # Before numpy and torch are imported.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mujoco.sb3", description=__doc__)
    parser.add_argument("--task", choices=NAMES, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--frames", type=int, default=FRAMES)
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    print(json.dumps(run(args.task, args.seed, args.frames)), flush=True)


if __name__ == "__main__":
    main()
