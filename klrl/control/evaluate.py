"""Play a policy: ``klrl evaluate RUN``, and what training uses to evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from klrl.base.errors import ConfigError
from klrl.train.evaluate import EPISODES

if TYPE_CHECKING:
    import torch

    from klrl.config import Config, EnvConfig
    from klrl.control.actor import Agent

#: A longer episode counts with its return so far: some environments never end one.
MAX_STEPS = 10_000
MAX_COPIES = 25


@dataclass(frozen=True)
class Evaluation:
    """Returns of deterministic episodes.

    Attributes:
        returns: unshaped return of each episode, in no order.
    """

    returns: list[float]

    @property
    def mean(self) -> float:
        """Mean return."""
        return sum(self.returns) / len(self.returns)

    @property
    def std(self) -> float:
        """Standard deviation over the episodes (population)."""
        mean = self.mean
        return (sum((r - mean) ** 2 for r in self.returns) / len(self.returns)) ** 0.5

    @property
    def row(self) -> dict[str, float]:
        """``eval/return`` and ``eval/return_std``."""
        return {"eval/return": self.mean, "eval/return_std": self.std}

    @property
    def told(self) -> str:
        """For a person to read."""
        count = len(self.returns)
        return f"return {self.mean:.1f} +- {self.std:.1f} over {count} deterministic episodes"


def evaluate_policy(
    agent: Agent, config: EnvConfig, *, episodes: int, seed: int, device: torch.device
) -> Evaluation:
    """Play ``episodes`` deterministic episodes in fresh copies of the environment.

    Each copy plays a number of episodes that is fixed beforehand: taking the first that finish
    would favour short ones.

    Raises:
        NonFiniteError: a step returned NaN or infinity.
    """
    import numpy as np

    from klrl.control.acting import make_acting
    from klrl.control.gym_vector import VectorGymEnv

    copies = min(episodes, MAX_COPIES)
    quota = np.array([episodes // copies + (i < episodes % copies) for i in range(copies)])
    env = VectorGymEnv(config.id, copies, kwargs=dict(config.kwargs), seed=seed)
    acting = make_acting(agent, device)  # which draws no noise, and so takes the mode
    played, length = np.zeros(copies, int), np.zeros(copies, int)
    total = np.zeros(copies)
    returns: list[float] = []
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
            returns += total[counted].tolist()
            # A copy that never ends plays no second episode.
            played += np.where(done, counted, counted * quota)
            if done.any():
                total[done] = length[done] = 0
                observation = env.reset_native(done)
    finally:
        env.close()
    return Evaluation(returns)


def evaluate_control_run(
    folder: Path,
    config: Config,
    *,
    episodes: int | None,
    sampled: bool,
    which: str,
    seed: int,
    device: str,
) -> Evaluation:
    """:func:`evaluate_run` of a control run; ``config`` names the task."""
    from klrl.control.load import trained_agent
    from klrl.runs.machine import device_of

    if sampled:
        raise ConfigError("--sampled: for language runs; a control policy plays its mode")
    where = device_of(device)
    agent = trained_agent(folder, which, str(where))
    return evaluate_policy(
        agent, config.env, episodes=episodes or EPISODES, seed=seed, device=where
    )
