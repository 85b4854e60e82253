"""``klrl kl RUN --to OTHER``: measures divergences between two policies, runs or models."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from klrl.base.digits import mean_and_error, number
from klrl.base.text import counted, escaped, text_table
from klrl.cli.evaluate import add_playing, checked_run
from klrl.cli.wrapper import DONE, Parser
from klrl.config.shorthand import part_of
from klrl.runs.find import is_model

if TYPE_CHECKING:
    from klrl.train.policy_kl import PolicyKL

#: Significant digits of a printed mean without a usable standard error.
_DIGITS = 4


def kl_command(argv: list[str]) -> int:
    """Print the divergences between two policies; return the exit code."""
    args = parser().parse_intermixed_args(argv)

    if _of_klrl(args.run):
        checked_run(args)

    import torch

    from klrl.train.policy_kl import kl_between

    torch.set_num_threads(1)
    how = {name: getattr(args, name) for name in ("on", "episodes", "which", "seed", "device")}
    if args.prompts is not None:
        name = "env.data" if is_model(args.on or args.run) else "env.eval_data"
        args.overrides.append(f"{name}={args.prompts}")
    found = kl_between(args.run, args.to, args.overrides, **how)
    print(json.dumps(found.row) if args.json else _as_text(found, args))
    return DONE


def _of_klrl(path: str) -> bool:
    """Return whether a policy is that of a run, not a model's folder, code or an ONNX file."""
    return not is_model(path) and part_of(path) is None


def _as_text(found: PolicyKL, args: argparse.Namespace) -> str:
    domain = found.domain
    head = [f"nats per {domain.unit}", "mean", "median", "90 %", "99 %", "largest", "where"]
    rows = [
        [
            name,
            mean_and_error(each.mean, each.error, _DIGITS),
            *(number(value, 3) for value in (each.median, each.q90, each.q99, each.worst)),
            f"{domain.episode} {each.episode}, {domain.unit} {each.step}",
        ]
        for name, each in found.distances.items()
    ]
    other = "its reference" if args.to is None else escaped(args.to)
    task = f", {' '.join(args.overrides)}" if args.overrides else ""
    runs = [path for path in (args.run, args.to) if path is not None and _of_klrl(path)]
    which = f", {args.which} checkpoint{'s' * (len(runs) > 1)}" * bool(runs)
    states = f"{counted(found.states, 'state')} of {counted(found.episodes, domain.episode)}"
    lines = [
        f"{escaped(args.run)} against {other}{which}{task}: {states}, sampled",
        text_table([head, *rows], right=range(1, 6)),
    ]
    name, first = next(iter(found.distances.items()))
    total = mean_and_error(first.total, first.total_error, _DIGITS)
    lines.append(f"{name}, summed over each {domain.episode}: {total} nats")
    if found.cut:
        lines.append(f"{counted(found.cut, domain.episode)} did not end and were cut off")
    return "\n".join([*lines, *found.notes])


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(
        prog="klrl kl",
        description=(
            "How far are two policies apart? KL in both directions, Jensen-Shannon and total "
            "variation, in the states of sampled episodes (responses); each name says whose states."
        ),
    )
    other = (
        "another run, for language the folder of a model, or for control module:name of your own "
        "policy (default: the reference of RUN)"
    )
    parser.add_argument("--to", metavar="OTHER", default=None, help=other)
    whose = "the run that acts, in its own task: RUN (default), OTHER or a third run"
    parser.add_argument("--on", metavar="RUN", default=None, help=whose)
    prompts = "language: the prompts to answer; required if RUN is the folder of a model"
    parser.add_argument("--prompts", metavar="FILE", default=None, help=prompts)
    add_playing(parser)
    return parser
