"""klrl's ``experiment=sort_digits`` through its public runner: metrics.jsonl and samples.jsonl on.

The KL is charged in the loss, as ratio * k3. Evaluation is off, and checkpoints (one before,
one at the end) are not counted: the other contender has neither.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.common import Clock
from benchmarks.peers.lm import checksum, finish, make_parser


def make_words(args: argparse.Namespace) -> list[str]:
    """The job; what was given after the settings comes last."""
    return [
        "experiment=sort_digits",
        f"actor.model={args.model}",
        f"env.shots={args.shots}",
        f"frames={args.prompts * args.group * args.iterations}",
        f"seed={args.seed}",
        f"collector.prompts={args.prompts}",
        f"collector.group_size={args.group}",
        f"collector.max_new_tokens={args.new_tokens}",
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


def timed_experiment(clock: Clock, rewards: list[float], asked: list[int]) -> type:
    """klrl's LanguageExperiment, its phases booked; an iteration ends where ``save`` begins."""
    from klrl.language.experiment import LanguageExperiment

    class Timed(LanguageExperiment):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.charge_kl = clock.timed("kl", self.charge_kl)
            self.estimate_advantage = clock.timed("advantage", self.estimate_advantage)
            self.learn = clock.timed("update", self.learn)
            self.begun = False

        def _make_rollout(self, *args: Any) -> Any:
            rollout = super()._make_rollout(*args)
            rollout.collect = clock.timed("rollout", rollout.collect)
            return rollout

        def make_row(self, batch: Any, *rest: Any) -> Any:
            rewards.append(float(batch["next", "reward_raw"].mean()))
            if not asked:
                asked.append(checksum([prompt.row["digits"] for prompt in self.rollout.asked]))
            return super().make_row(batch, *rest)

        def save(self, *args: Any, **kwargs: Any) -> None:
            if self.begun:
                clock.lap()
            super().save(*args, **kwargs)
            clock.resume() if self.begun else clock.start()
            self.begun = True

    return Timed


def train(words: Sequence[str], clock: Clock) -> tuple[list[float], int]:
    """Run; the reward of each iteration and what was asked in the first."""
    import klrl.experiment
    import klrl.language.experiment
    from klrl.__main__ import compose
    from klrl.checks import to_config

    config = to_config(compose(list(words)))
    clock.import_seconds = clock.now()
    rewards: list[float] = []
    asked: list[int] = []
    klrl.language.experiment.LanguageExperiment = timed_experiment(clock, rewards, asked)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        klrl.experiment.run(config, Path(folder) / "run")
    return rewards, asked[0]


def main() -> None:
    clock = Clock()
    parser = make_parser(__doc__)
    parser.add_argument("words", nargs="*", help="further words for klrl's command line")
    args = parser.parse_args()
    rewards, asked = train(make_words(args), clock)
    finish("klrl", args, clock, rewards, asked)


if __name__ == "__main__":
    main()
