"""``klrl doctor --loss``: judges the gradient of a loss of the user's."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict

from klrl.base.errors import ConfigError
from klrl.base.screen import show
from klrl.cli.wrapper import DONE, FAILED, Parser

_OF_LOSS = ("placement", "divergence", "scope", "stale", "seeds")


def doctor_command(argv: list[str]) -> int:
    """Print a report; return 1 if it contains an error, else 0."""
    args = parser().parse_args(argv)
    if args.loss is None:
        raise ConfigError("klrl doctor: judges losses; add --loss mine.py:NAME")
    given = {name: getattr(args, name) for name in _OF_LOSS}

    from klrl.doctor.loss import examine_loss, report_text
    from klrl.doctor.user_loss import settings_of

    with redirect_stdout(sys.stderr):  # what the user's code prints
        report = examine_loss(args.loss, settings=settings_of(args.settings), **given)
    if args.json:
        print(json.dumps({**asdict(report), "ok": report.ok}, indent=1))
    else:
        show(report_text(report))
    return DONE if report.ok else FAILED


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(
        prog="klrl doctor",
        description="Does my own loss have the gradient of E[return] - coef KL(pi||ref)?",
    )
    parser.add_flag("--json", "print JSON instead of tables")
    loss = parser.add_argument_group("a custom loss (docs/doctor.md)")
    compared = "compare its gradient with the true one"
    loss.add_argument("--loss", metavar="FILE.py:NAME", help=compared)
    where = (
        "where the KL is charged: in the loss (default), in loss and rewards (exact KL), or in the "
        "rewards alone (k1)"
    )
    places = ("loss", "split", "reward")
    loss.add_argument("--placement", choices=places, default="loss", help=where)
    intended = "the intended penalty: KL(pi||ref) (default), KL(ref||pi), ..."
    divergences = ("reverse", "forward", "js", "tv", "none")
    loss.add_argument("--divergence", choices=divergences, help=intended)
    of = "penalty of whole episodes (default of reverse, none) or each step (default of the others)"
    loss.add_argument("--scope", choices=("sequence", "token"), help=of)
    loss.add_argument("--stale", type=int, default=0, help="random updates from pi_old to pi (0)")
    loss.add_argument("--seeds", type=int, default=100, help="problems of each kind (100)")
    loss.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="keywords of the loss")
    return parser
