"""Stable-Baselines3's PPO with CleanRL's or its zoo's settings: a run, a thread, a line of JSON.

``python -m benchmarks.mujoco.sb3 --task half_cheetah --seed 0 [--frames N] [--zoo]``; the line has
the keys of ``cells.Line``, and is evaluated from the start states that close klrl's runs.

CleanRL's settings are those of ppo_continuous_action.py. Two things remain Stable-Baselines3's
own: its clipped value loss is not the larger one of clipped and unclipped, and where the time limit
ends an episode the value of its last state is added.
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
#: rl-baselines3-zoo's, "tuned": hyperparams/ppo.yml at 208b6fdf, HalfCheetah-v4 and Hopper-v4.
ZOO: dict[str, dict[str, Any]] = {
    "half_cheetah": {
        "n_steps": 512,
        "batch_size": 64,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
    },
    "hopper": {
        "n_steps": 512,
        "batch_size": 32,
        "gamma": 0.999,
        "learning_rate": 9.80828e-05,
        "ent_coef": 0.00229519,
        "clip_range": 0.2,
        "n_epochs": 5,
        "gae_lambda": 0.99,
        "max_grad_norm": 0.7,
        "vf_coef": 0.835671,
    },
}
#: Of both tasks.
ZOO_POLICY: dict[str, Any] = {
    "log_std_init": -2,
    "ortho_init": False,
    "activation_fn": "ReLU",
    "net_arch": {"pi": [256, 256], "vf": [256, 256]},
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


def parts(task: str, zoo: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What goes to PPO, to its policy and to VecNormalize; the zoo passes its gamma to the last."""
    if not zoo:
        return {"learning_rate": f"{RATE} to 0", **SETTINGS}, POLICY, NORMALIZE
    # VecNormalize's bounds of 10 are its defaults.
    return ZOO[task], ZOO_POLICY, {**NORMALIZE, "gamma": ZOO[task]["gamma"]}


def settings(task: str, seed: int, frames: int, zoo: bool) -> dict[str, Any]:
    """All that a run depends on, but for the versions."""
    ppo, policy, normalize = parts(task, zoo)
    return {
        "env": env_id(task),
        "num_envs": 1,
        "frames": frames,
        "seed": seed,
        **ppo,
        **{f"policy.{key}": value for key, value in policy.items()},
        **{f"normalize.{key}": value for key, value in normalize.items()},
    }


def identity(of: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    """A hash, as in ``0f3a...``: 12 digits."""
    text = json.dumps([of, versions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def known_identity(task: str, seed: int, frames: int = FRAMES, zoo: bool = False) -> str:
    """That of a run with the packages that are installed."""
    of = settings(task, seed, frames if zoo else whole_frames(frames), zoo)
    return identity(of, {name: metadata.version(name) for name in PACKAGES})


def run(task: str, seed: int, frames: int, zoo: bool) -> dict[str, Any]:
    """Train, evaluate and tell.

    ``cpu`` is that of the whole process, as klrl's in ``cells.Line``: imports and evaluation are in
    it; ``evaluation_seconds`` tells the latter apart.
    """
    frames = frames if zoo else whole_frames(frames)  # of the zoo: rounded up to a rollout by PPO
    model = make_model(task, seed, frames, zoo)
    rows = train(model, frames)
    began = time.perf_counter()
    returns = evaluate(model, task)
    evaluation_seconds = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_SELF)
    from benchmarks.results import cpu_name

    of = settings(task, seed, frames, zoo)
    return {
        "name": f"{task} {'sb3_zoo' if zoo else 'sb3'} {seed}",
        "identity": known_identity(task, seed, frames, zoo),
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


def make_model(task: str, seed: int, frames: int, zoo: bool) -> PPO:
    """With one copy of the environment; Monitor sees its rewards before they are normalised."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    ppo, policy, normalize = parts(task, zoo)
    if zoo:
        policy = {**policy, "activation_fn": getattr(torch.nn, policy["activation_fn"])}
    else:
        ppo = {**ppo, "learning_rate": lambda left: learning_rate(left, frames)}
    return PPO(
        "MlpPolicy",
        VecNormalize(make_vec_env(env_id(task), 1, seed=seed), **normalize),
        policy_kwargs=policy,
        stats_window_size=STEPS,  # no episode of an iteration is dropped
        seed=seed,
        device="cpu",
        **ppo,
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
    parser.add_argument("--zoo", action="store_true", help="the zoo's settings, not CleanRL's")
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    print(json.dumps(run(args.task, args.seed, args.frames, args.zoo)), flush=True)


if __name__ == "__main__":
    main()
