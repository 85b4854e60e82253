"""klrl through its public runner: normalisation, KL to the reference and metrics.jsonl on.

Evaluation is off, and checkpoints (one before, one at the end) are not counted: the others have
neither. Words for the command line may follow, as in ``klrl_loop --compile false kl=legacy``.
"""

from __future__ import annotations

import argparse
import itertools
import os
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks.peers.common import Clock, make_parser, report
from benchmarks.peers.klrl_timed import make_config, run_quietly, time_training


def make_words(args: argparse.Namespace) -> list[str]:
    """The job; what was given after the settings comes last."""
    return [
        f"env={args.env}",
        f"frames={args.n * args.t * args.iterations}",
        f"seed={args.seed}",
        "device=cpu",
        "logger=none",
        "eval.every=0",
        "checkpoint.every=1000000000",
        f"learner.compile={args.compile}",
        f"env.num_envs={args.n}",
        "env.normalize_observation=true",
        "env.reward_scale=1.0",
        f"collector.steps={args.t}",
        f"learner.epochs={args.epochs}",
        f"learner.minibatches={args.minibatches}",
        f"advantage.gamma={args.gamma}",
        f"advantage.lmbda={args.lmbda}",
        f"optim.lr={args.lr}",
        f"optim.lr_floor={args.lr}",
        f"actor.hidden=[{args.width},{args.width}]",
        *("loss=klpen", *(() if args.env == "cartpole" else ("actor.init_std=1",))),
        *args.words,
    ]


def time_simulator(clock: Clock) -> None:
    """Book ``env`` where the simulators step: by each 17th step, since a clock costs 0.6 us."""
    from klrl.control.env.copies import VectorGymEnv

    step, number = VectorGymEnv.step_native, itertools.count()
    now, phases = clock.now, clock.phases

    def timed_step(self: Any, action: Any) -> Any:
        if next(number) % 17:
            return step(self, action)
        before = now()
        result = step(self, action)
        phases["env"] += 17 * (now() - before)
        return result

    VectorGymEnv.step_native = timed_step


def bytes_of(batch: Any) -> dict[str, int]:
    """Bytes per frame of a rollout's arrays, by name."""
    frames = batch.numel()
    leaves = batch.items(include_nested=True, leaves_only=True)
    names = ((key if isinstance(key, str) else " ".join(key), value) for key, value in leaves)
    return {name: value.numel() * value.element_size() // frames for name, value in names}


def main() -> None:
    clock = Clock()
    parser = make_parser(__doc__)
    parser.add_argument("--compile", choices=("false", "jit", "aot", "kernel"), default="false")
    parser.add_argument("words", nargs="*", help="further words for klrl's command line")
    args = parser.parse_args()
    config = make_config(make_words(args), clock)
    time_simulator(clock)
    arrays: dict[str, int] = {}
    time_training(clock, lambda _, batch: arrays.update(bytes_of(batch)))
    run_quietly(config)
    report("klrl", args, clock, bytes_per_frame=arrays)


if __name__ == "__main__":
    main()
