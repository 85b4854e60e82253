"""How a control policy is played: deterministic episodes in copies of the environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from klrl.base.errors import ConfigError
from klrl.config import Config, EnvConfig
from klrl.control.acting import make_acting
from klrl.control.actor import Agent
from klrl.control.env import VectorGymEnv
from klrl.control.load import trained_agent
from klrl.domains import CONTROL
from klrl.train.evaluate import Evaluation, Scores, evaluation

#: A longer episode counts with its return so far: some environments never end one.
MAX_STEPS = 10_000
MAX_COPIES = 25


def evaluate_policy(
    agent: Agent, config: EnvConfig, *, episodes: int, seed: int, device: torch.device
) -> Evaluation:
    """Play ``episodes`` deterministic episodes in fresh copies of the environment.

    Raises:
        NonFiniteError: a step returned NaN or infinity.
    """
    return evaluation(_scores(agent, config, episodes, seed, device), CONTROL, "deterministic")


def _scores(
    agent: Agent, config: EnvConfig, episodes: int, seed: int, device: torch.device
) -> Iterator[Scores]:
    """Returns of episodes as they end.

    Each copy plays a number of episodes that is fixed beforehand: taking the first that finish
    would favour short ones.
    """
    copies = min(episodes, MAX_COPIES)
    quota = np.array([episodes // copies + (i < episodes % copies) for i in range(copies)])
    env = VectorGymEnv(
        config.id, copies, kwargs=dict(config.kwargs), seed=seed, step_timeout=config.step_timeout
    )
    acting = make_acting(agent, device)  # which draws no noise, and so takes the mode
    played, length = np.zeros(copies, int), np.zeros(copies, int)
    total = np.zeros(copies)
    try:
        observation = env.reset_native()
        while (played < quota).any():
            seen = env.finite("observation", observation, "in an evaluation").numpy()
            action = acting.action(acting.sample(0, seen))
            observation, reward, terminated, truncated = env.step_native(action)
            total += env.finite("reward", reward, "in an evaluation").numpy()
            length += 1
            done = terminated | truncated
            counted = (done | (length >= MAX_STEPS)) & (played < quota)
            yield Scores(total[counted].tolist())
            # A copy that never ends plays no second episode.
            played += np.where(done, counted, counted * quota)
            if done.any():
                total[done] = length[done] = 0
                observation = env.reset_native(done)
    finally:
        env.close()


def evaluate_trained(
    folder: Path,
    config: Config,
    *,
    episodes: int,
    sampled: bool,
    which: str,
    seed: int,
    device: torch.device,
) -> Evaluation:
    """:func:`klrl.train.evaluate.evaluate_run` of a control run; ``config`` names the task."""
    if sampled:
        raise ConfigError("--sampled: for language runs; a control policy plays its mode")
    agent = trained_agent(folder, which, str(device))
    return evaluate_policy(agent, config.env, episodes=episodes, seed=seed, device=device)
