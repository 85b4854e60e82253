"""klrl through its public runner: normalisation, KL to the reference and metrics.jsonl on.

Evaluation is off, and checkpoints (one before, one at the end) are not counted: the others have
neither. ``--compile`` chooses among what this klrl has; without the setting only ``false`` runs.
Words for the command line may follow, as in ``klrl_loop --compile false kl=legacy``.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks.peers.common import Clock, make_parser, report
from benchmarks.peers.klrl_timed import make_config, run_quietly, time_training

MODES = ("false", "jit", "aot")


def make_words(args: argparse.Namespace) -> list[str]:
    """The job; settings that this klrl does not have are left out."""
    words = [
        f"env={args.env}",
        f"frames={args.n * args.t * args.iterations}",
        f"seed={args.seed}",
        f"device={args.device}",
        "logger=none",
        "eval.every=0",
        "checkpoint.every=1000000000",
    ]
    if has_collector("vector"):
        words.append(f"collector={args.collector}")
    if has_compile():
        words.append(f"learner.compile={args.compile}")
    if not args.preset:
        words += [
            f"env.num_envs={args.n}",
            "env.normalize_observation=true",
            f"env.reward_scale={args.reward_scale}",
            f"collector.steps={args.t}",
            f"learner.epochs={args.epochs}",
            f"learner.minibatches={args.minibatches}",
            f"advantage.gamma={args.gamma}",
            f"advantage.lmbda={args.lmbda}",
            f"optim.lr={args.lr}",
            f"optim.lr_floor={args.lr}",
            "actor.init_std=1",
        ]
    given = {word.split("=")[0] for word in args.words}
    return [*(word for word in words if word.split("=")[0] not in given), *args.words]


def has_collector(name: str) -> bool:
    from klrl.config import conf_dir

    return (conf_dir() / "collector" / f"{name}.yaml").exists()


def has_compile() -> bool:
    from klrl.config import LearnerConfig

    return "compile" in LearnerConfig.__dataclass_fields__


def time_simulator(clock: Clock) -> None:
    """Book ``env`` where the simulators step, for whichever collector."""
    from klrl.control.copies import VectorGymEnv

    step = VectorGymEnv.step_native
    now, phases = clock.now, clock.phases

    def timed_step(self: Any, action: Any) -> Any:
        before = now()
        result = step(self, action)
        phases["env"] += now() - before
        return result

    VectorGymEnv.step_native = timed_step


def train(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Run; returns what of the job is to be reported."""
    config = make_config(make_words(args), clock)
    args.n, args.t = config.env.num_envs, config.collector.steps

    def see(experiment: Any, batch: Any) -> None:
        if args.curve:
            ended = batch["next", "done"].transpose(0, 1)
            returns = batch["next", "episode_reward"].transpose(0, 1)[ended]
            clock.ended(experiment.counters.frames, returns.tolist())

    time_simulator(clock)
    time_training(clock, see)
    run_quietly(config)
    return {
        "collector": config.collector.name,
        "compile": getattr(config.learner, "compile", "false"),
        "kl": config.kl.name,
        "loss": config.loss.name,
    }


def main() -> None:
    clock = Clock()
    parser = make_parser(__doc__)
    parser.add_argument("--compile", choices=MODES, default="false")
    parser.add_argument("--collector", choices=("vector", "torchrl"), default="vector")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--preset", action="store_true", help="the env's own settings")
    parser.add_argument("words", nargs="*", help="further words for klrl's command line")
    args = parser.parse_args()
    name = "klrl eager" if args.compile == "false" else f"klrl {args.compile}"
    if args.compile != "false" and not has_compile():
        raise SystemExit(f"{name}: this klrl has no learner.compile")
    about = train(args, clock)
    report(name, args, clock, compiled=args.compile != "false", **about)


if __name__ == "__main__":
    main()
