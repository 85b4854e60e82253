"""``klrl record RUN``: plays episodes with a run's policy, and writes them as demonstrations."""

from __future__ import annotations

import json

from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.base.text import escaped
from klrl.cli.evaluate import add_playing, checked_run
from klrl.cli.wrapper import DONE, Parser
from klrl.domains import CONTROL


def record_command(argv: list[str]) -> int:
    """Play a run's policy and write the episodes; return the exit code."""
    args = parser().parse_intermixed_args(argv)
    into = checked_run(args) / "demonstrations" if args.output is None else expanded(args.output)
    if into.exists():
        raise ConfigError(f"-o {into}: exists already; give another place")
    above = next(each for each in into.parents if each.exists())
    if not above.is_dir():
        raise ConfigError(f"-o {into}: {above} is a file; give another place")

    import torch

    from klrl.train.evaluate import evaluate_run

    torch.set_num_threads(1)
    how = {name: getattr(args, name) for name in ("episodes", "sampled", "which", "seed", "device")}
    found = evaluate_run(args.run, args.overrides, **how, into=into)
    written = f"written to {escaped(str(into))}" if found.returns else "nothing is written"
    row = {**found.row, "data": str(into)}
    print(json.dumps(row) if args.json else f"{found.line}; {written}")
    return DONE


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(
        prog="klrl record",
        description=(
            "Play a control run's policy and write its episodes as demonstrations, for "
            "experiment=clone, in TorchRL's memory-mapped format."
        ),
    )
    parser.add_flag("--sampled", "sample actions as in training")
    where = "where to write; it must not exist (default RUN/demonstrations)"
    parser.add_argument("-o", "--output", metavar="FOLDER", default=None, help=where)
    add_playing(parser, [CONTROL])
    return parser
