"""``klrl evaluate RUN``: plays a run's policy, and prints its mean return."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from klrl.base.text import escaped_lines
from klrl.cli.wrapper import Parser
from klrl.domains import CONTROL, LANGUAGE, Domain


def evaluate_command(argv: list[str]) -> int:
    """Play a run's policy and print its mean return; return the exit code."""
    args = parser().parse_intermixed_args(argv)

    from klrl.runs.video import draw_without_display

    folder = checked_run(args)
    if args.video:
        draw_without_display()

    import torch

    from klrl.runs.returns import kl_lines
    from klrl.train.evaluate import evaluate_run
    from klrl.train.film import check_film, film_run

    torch.set_num_threads(1)
    if args.video:
        check_film(folder)
    how = {name: getattr(args, name) for name in ("sampled", "which", "seed", "device")}
    result = evaluate_run(folder, args.overrides, episodes=args.episodes, **how)
    task = " ".join(word for word in args.overrides if not word.startswith("actor.model="))
    task = f" on {task}" if task else ""
    lines = [f"{result.line}{task} ({args.which} checkpoint of {args.run})"]
    lines += kl_lines(result.row, result.domain)
    row: dict[str, float | str] = {**result.row, "episodes": len(result.returns)}
    if args.video:
        filmed = film_run(folder, args.overrides, **how)
        lines.append(filmed.line)
        row["video"] = str(filmed.video.mp4)
    print(json.dumps(row) if args.json else escaped_lines("\n".join(lines)))
    return 0


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(
        prog="klrl evaluate",
        description=(
            "Evaluate a run's policy from start states that its own evaluations never used; a "
            "language policy answers its evaluation split."
        ),
    )
    parser.add_flag("--sampled", "sample actions (tokens) as in training")
    parser.add_flag("--video", "film the first episode, for RUN/videos and the loggers")
    add_playing(parser)
    return parser


def checked_run(args: argparse.Namespace) -> Path:
    """Return the run folder; raise a ConfigError if the run or the device does not exist."""
    from klrl.config.checks import check_device_name
    from klrl.runs.find import find_run
    from klrl.runs.machine import check_device

    check_device_name(args.device)
    check_device(args.device)
    return find_run(args.run, "RUN")


def add_playing(parser: Parser, domains: Sequence[Domain] = (CONTROL, LANGUAGE)) -> None:
    """Add the arguments RUN and KEY=VALUE, and the options from ``--episodes`` to ``--json``."""
    parser.add_argument("run", metavar="RUN", help="the run folder, such as outputs/NAME")
    other = "another task, such as env.kwargs.g=14 or env.id=..."
    if LANGUAGE in domains:
        other += "; for language env.eval_data=..., env.reward=... or, if the run's base model was "
        other += "moved, actor.model=FOLDER"
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=other)
    many = f"how many (default {', '.join(f'{d.plays} {d.episode}s' for d in domains)})"
    parser.add_argument("--episodes", type=partial(_at_least, 1), default=None, help=many)
    parser.add_argument("--checkpoint", dest="which", choices=("last", "best"), default="last")
    seed = "seed of the start states (default 0)"
    parser.add_argument("--seed", type=partial(_at_least, 0), default=0, help=seed)
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or auto")
    parser.add_flag("--json", "print one JSON object")


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number >= {least}")
    return value
