"""``klrl doctor``: checks klrl's numbers on this machine, or the gradient of a user's loss."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import asdict

from klrl.base.errors import ConfigError
from klrl.base.screen import show, show_table
from klrl.cli.wrapper import DONE, FAILED, Parser

_OF_LOSS = ("placement", "divergence", "scope", "stale", "seeds")
#: A report as JSON and as text or a table's rows, and whether it contains no error.
_Report = tuple[object, str | list[tuple[str, str, str]], bool]


def doctor_command(argv: list[str]) -> int:
    """Print a report; return 1 if it contains an error, else 0."""
    args = parser().parse_args(argv)
    if args.loss is None:
        given = {name: getattr(args, name) for name in _OF_LOSS}
        changed = (each for each in given if given[each] != parser().get_default(each))
        for word in (*(f"--{each} {given[each]}" for each in changed), *args.settings):
            raise ConfigError(f"{word}: only --loss reads it; add --loss mine.py:NAME")
    elif args.audit is not None:
        raise ConfigError(f"--audit {args.audit}: not with --loss; give one of them")
    with redirect_stdout(sys.stderr):  # what the user's code prints
        if args.loss is not None:
            told, text, ok = _loss(args)
        elif args.audit is not None:
            told, text, ok = _audit(args.audit)
        else:
            told, text, ok = _installed() if args.install else _numbers()
    if args.json:
        print(json.dumps(told, indent=1))
    elif isinstance(text, str):
        show(text)
    else:
        show_table(text)
    return DONE if ok else FAILED


def _numbers() -> _Report:
    from klrl.doctor.numbers import examine, table

    lines = examine()
    wrong = sum(not line.ok for line in lines)
    told = f"{wrong} are off" if wrong else "all within tolerance"
    text = f"{table(lines)}\n\n{len(lines)} numbers, {told}"
    return [{**asdict(line), "ok": line.ok} for line in lines], text, not wrong


def _audit(folder: str) -> _Report:
    from klrl.doctor.audit import audit, audit_text

    rows = list(audit(folder))
    return [asdict(row) for row in rows], audit_text(rows), True  # faulty losses are no error


def _installed() -> _Report:
    """Report what each use of klrl lacks; a lack is an error only for the core."""
    from klrl.doctor.install import uses

    found = uses()
    rows = []
    for use in found:
        few = ", ".join(use.missing[:3])
        more = f" and {len(use.missing) - 3} more" * (len(use.missing) > 3)
        rows.append((use.purpose, f"no: {few}{more}" if few else "yes", use.remedy * bool(few)))
    table = [("for", "installed", "install it with"), *rows]
    return [use._asdict() for use in found], table, not found[0].missing


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
        description="Are this machine's KL numbers true? Estimators and their gradients against "
        "sums over all actions, and kl=legacy against kl=retrieve. With --loss: does my own loss "
        "have the gradient of E[return] - coef KL(pi||ref)?",
    )
    parser.add_flag("--install", "what each use of klrl has installed, and how to install the rest")
    losses = "a table of the losses in a folder of adapters"
    parser.add_argument("--audit", metavar="FOLDER", help=losses)
    parser.add_flag("--json", "print JSON instead of tables")
    loss = parser.add_argument_group("a loss of your own (docs/doctor.md)")
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
