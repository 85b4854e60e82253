"""Play a policy: ``python -m klrl.evaluate RUN``, and what training uses to evaluate.

python -m klrl.evaluate outputs/RUN --episodes 100 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klrl.config import LanguageConfig
from klrl.errors import ConfigError, RewardError

if TYPE_CHECKING:
    import torch

    from klrl.config import Config, EnvConfig
    from klrl.models import Agent

#: A longer episode counts with its return so far: some environments never end one.
MAX_STEPS = 10_000
MAX_COPIES = 25
#: Played by default, of a control run and of a language run.
EPISODES, RESPONSES = 20, 512


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
    """The command line; exits with 0, 1 or 2."""
    try:
        _main(_parse(argv))
    except ConfigError as error:
        print(f"klrl.evaluate: {error}", file=sys.stderr)
        sys.exit(2)
    except RewardError as error:
        print(f"klrl.evaluate: failed: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m klrl.evaluate",
        description="Play a run's policy; a language policy answers its evaluation split.",
    )
    parser.add_argument("run", help="the run folder, as outputs/NAME")
    many = f"how many (default {EPISODES} episodes, {RESPONSES} responses)"
    parser.add_argument("--episodes", type=_positive, default=None, help=many)
    parser.add_argument(
        "--sampled", action="store_true", help="language: sample as in training, else greedy"
    )
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

    from klrl.resume import stored_config

    torch.set_num_threads(1)
    config = stored_config(folder)
    if isinstance(config, LanguageConfig):
        answer, told = _language(folder, config, args)
    else:
        answer, told = _control(folder, config, args)
    if args.json:
        print(json.dumps(answer))
    else:
        print(f"{told} ({args.checkpoint} checkpoint of {args.run})")


def _control(folder: Path, config: Config, args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Deterministic episodes: (what --json prints, what a person reads)."""
    from klrl.load import trained_agent
    from klrl.models.actor import device_of
    from klrl.seeds import derived_seed

    if args.sampled:
        raise ConfigError("--sampled: for language runs; a control policy plays its mode")
    device = device_of(args.device)
    result = evaluate_policy(
        trained_agent(folder, args.checkpoint, str(device)),
        config.env,
        episodes=args.episodes or EPISODES,
        seed=derived_seed(args.seed, "evaluate"),
        device=device,
    )
    count = len(result.returns)
    answer = {"eval/return": result.mean, "eval/return_std": result.std, "episodes": count}
    told = f"return {result.mean:.1f} +- {result.std:.1f} over {count} deterministic episodes"
    return answer, told


def _language(
    folder: Path, config: LanguageConfig, args: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """Greedy or sampled responses to the evaluation split; the same two."""
    from klrl.language.evaluate import evaluate_language
    from klrl.language.load import prompt_limit
    from klrl.language.policy import trained_policy
    from klrl.language.tasks import make_task
    from klrl.models.actor import device_of
    from klrl.seeds import derived_seed

    task = make_task(config.env, config.seed)
    policy = trained_policy(folder, args.checkpoint, str(device_of(args.device)))
    longest, setting = config.collector.max_new_tokens, "collector.max_new_tokens"
    result = evaluate_language(
        config,
        policy,
        task,
        episodes=args.episodes or RESPONSES,
        limit=prompt_limit(policy.causal.context, longest, setting),
        sampled=args.sampled,
        seed=derived_seed(args.seed, "evaluate"),
    )
    row, count = result.row, len(result.returns)
    gold = f", gold {row['eval/gold']:.3f}" if "eval/gold" in row else ""
    how = f"sampled at {config.collector.temperature:g}" if args.sampled else "greedy"
    told = f"reward {row['eval/return']:.3f}{gold} over {count} {how} responses"
    return {**row, "episodes": count}, told


if __name__ == "__main__":
    main()
