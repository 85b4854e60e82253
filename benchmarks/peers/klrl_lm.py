"""klrl's language experiments through its public runner: metrics.jsonl and samples.jsonl on.

The KL is charged in the loss, as ratio * k3. Evaluation is off, and checkpoints (one before,
one at the end) are not counted: the other contender has neither.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.common import Clock
from benchmarks.peers.klrl_timed import make_config, run_quietly, time_training
from benchmarks.peers.lm import checksum, finish, make_parser

#: The choices of a task; all else is given to both contenders.
EXPERIMENTS = {
    "sort_digits": ("experiment=sort_digits",),
    "instructions": (
        *("experiment=smollm", "actor.dtype=float32", "loss=clip", "controller=fixed"),
        "loss.normalize_advantage=false",
    ),
}


def make_words(args: argparse.Namespace) -> list[str]:
    """The job; what was given after the settings comes last."""
    return [
        *EXPERIMENTS[args.task],
        *([f"env.shots={args.shots}"] if args.task == "sort_digits" else []),
        f"actor.model={args.model}",
        f"frames={args.prompts * args.group * args.iterations}",
        f"seed={args.seed}",
        f"collector.prompts={args.prompts}",
        f"collector.group_size={args.group}",
        f"collector.max_new_tokens={args.new_tokens}",
        f"collector.temperature={args.temperature}",
        f"learner.epochs={args.epochs}",
        f"learner.minibatches={args.minibatches}",
        f"optim.lr={args.lr}",
        f"optim.lr_floor={args.lr}",
        "kl=retrieve",
        "kl.estimator=k3",
        "kl.placement=loss",
        f"kl.coef={args.coef}",
        "device=cpu",
        "threads=1",
        "logger=none",
        "eval.every=0",
        "checkpoint.every=1000000000",
        *args.words,
    ]


def train(task: str, words: Sequence[str], clock: Clock) -> tuple[list[float], list[float], int]:
    """Run; reward and response length of each iteration, and what was asked in the first."""
    from klrl.language.data.batch import response_mask

    config = make_config(words, clock)
    rewards: list[float] = []
    tokens: list[float] = []
    asked: list[int] = []

    def see(experiment: Any, batch: Any) -> None:
        rewards.append(float(batch["next", "reward_raw"].mean()))
        tokens.append(float(response_mask(batch).sum(1).double().mean()))
        if not asked:
            prompts = experiment.parts.collector.scored_prompts
            asked.append(checksum(task, [prompt.row for prompt in prompts]))

    time_training(clock, see)
    run_quietly(config)
    return rewards, tokens, asked[0]


def main() -> None:
    clock = Clock()
    parser = make_parser(__doc__)
    parser.add_argument("words", nargs="*", help="further words for klrl's command line")
    args = parser.parse_args()
    finish("klrl", args, clock, *train(args.task, make_words(args), clock))


if __name__ == "__main__":
    main()
