"""``klrl doctor --loss``: judges the gradient of a loss of the user's, or of a folder of losses."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import asdict

from klrl.base.errors import ConfigError
from klrl.base.screen import show
from klrl.cli.wrapper import DONE, FAILED, Parser

_OF_LOSS = ("placement", "divergence", "scope", "stale", "seeds")
#: A report as JSON and as text, and whether it contains no error.
_Report = tuple[object, str, bool]


def doctor_command(argv: list[str]) -> int:
    """Print a report; return 1 if it contains an error, else 0."""
    args = parser().parse_args(argv)
    if args.loss is None:
        given = {name: getattr(args, name) for name in _OF_LOSS}
        changed = (each for each in given if given[each] != parser().get_default(each))
        for word in (*(f"--{each} {given[each]}" for each in changed), *args.settings):
            raise ConfigError(f"{word}: only --loss reads it; add --loss mine.py:NAME")
        if args.audit is None:
            raise ConfigError("klrl doctor: judges losses; add --loss mine.py:NAME")
    elif args.audit is not None:
        raise ConfigError(f"--audit {args.audit}: not with --loss; give one of them")
    with redirect_stdout(sys.stderr):  # what the user's code prints
        if args.loss is not None:
            told, text, ok = _loss(args)
        else:
            told, text, ok = _audit(str(args.audit))
    if args.json:
        print(json.dumps(told, indent=1))
    else:
        show(text)
    return DONE if ok else FAILED


def _audit(folder: str) -> _Report:
    from klrl.doctor.audit import audit, audit_text

    rows = list(audit(folder))
    return [asdict(row) for row in rows], audit_text(rows), True  # faulty losses are no error


def _loss(args: Namespace) -> _Report:
    from klrl.doctor.loss import examine_loss, report_text
    from klrl.doctor.user_loss import settings_of

    given = {name: getattr(args, name) for name in _OF_LOSS}
    report = examine_loss(args.loss, settings=settings_of(args.settings), **given)
    return {**asdict(report), "ok": report.ok}, report_text(report), report.ok


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(
        prog="klrl doctor",
        description="Does my own loss have the gradient of E[return] - coef KL(pi||ref)?",
    )
    losses = "a table of the losses in a folder of adapters"
    parser.add_argument("--audit", metavar="FOLDER", help=losses)
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
