"""Play a policy: ``python -m klrl.evaluate RUN``, and what training uses to evaluate.

python -m klrl.evaluate outputs/RUN --episodes 100 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from klrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from klrl.config import EnvConfig
    from klrl.models import Agent

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

    from klrl.envs import VectorGymEnv
    from klrl.rollout.acting import make_acting

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


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; exits with 0 or 2."""
    try:
        _main(_parse(argv))
    except ConfigError as error:
        print(f"klrl.evaluate: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m klrl.evaluate", description="Play deterministic episodes of a run's policy."
    )
    parser.add_argument("run", help="the run folder, as outputs/NAME")
    parser.add_argument("--episodes", type=_positive, default=20, help="how many (default 20)")
    parser.add_argument("--checkpoint", choices=("last", "best"), default="last")
    parser.add_argument("--seed", type=_natural, default=0, help="seed of the episodes (default 0)")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1 or auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{value}: give a number >= {least}")
    return value


def _main(args: argparse.Namespace) -> None:
    from klrl.checks import check_device_name
    from klrl.preflight import check_device, find_run

    folder = find_run(args.run, "RUN")
    check_device_name(args.device)
    check_device(args.device)

    import torch

    from klrl.load import trained_agent
    from klrl.models.actor import device_of
    from klrl.resume import stored_config
    from klrl.seeds import derived_seed

    torch.set_num_threads(1)
    device = device_of(args.device)
    agent = trained_agent(folder, args.checkpoint, str(device))
    result = evaluate_policy(
        agent,
        stored_config(folder).env,
        episodes=args.episodes,
        seed=derived_seed(args.seed, "evaluate"),
        device=device,
    )
    answer = {
        "eval/return": result.mean,
        "eval/return_std": result.std,
        "episodes": len(result.returns),
    }
    if args.json:
        print(json.dumps(answer))
    else:
        print(
            f"return {result.mean:.1f} +- {result.std:.1f} over {len(result.returns)} "
            f"deterministic episodes ({args.checkpoint} checkpoint of {args.run})"
        )


if __name__ == "__main__":
    main()
