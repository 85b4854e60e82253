"""``klrl doctor``: checks this install's numbers, or the gradient of a user's loss."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import asdict

from klrl.base.errors import ConfigError
from klrl.base.text import text_table
from klrl.cli.wrapper import DONE, FAILED, Parser

_OF_LOSS = ("placement", "divergence", "scope", "stale", "seeds")


def doctor_command(argv: list[str]) -> int:
    """Print the tables, or the verdict on ``--loss``; return 1 if something is off."""
    args = parser().parse_args(argv)
    if args.loss is not None:
        return _examine_loss(args)
    given = {name: getattr(args, name) for name in _OF_LOSS}
    changed = (each for each in given if given[each] != parser().get_default(each))
    for word in (*(f"--{each} {given[each]}" for each in changed), *args.settings):
        raise ConfigError(f"{word}: only --loss reads it; add --loss mine.py:NAME")
    if args.audit is not None:
        return _audit(args.audit, args.json)
    if args.install:
        return _print_installed(args.json)

    from klrl.doctor.numbers import examine, table

    lines = examine()
    wrong = [line for line in lines if not line.ok]
    if args.json:
        print(json.dumps([{**asdict(line), "ok": line.ok} for line in lines], indent=1))
    else:
        told = "" if wrong else f"\n\n{len(lines)} lines of klrl's own, all within tolerance"
        print(f"{table(lines)}{told}")
    if wrong:
        print(f"\n{len(wrong)} of klrl's own lines are off", file=sys.stderr)
    return FAILED if wrong else DONE


def _audit(folder: str, as_json: bool) -> int:
    """Print the table of a folder of adapters; return 0 even if it shows faults."""
    with redirect_stdout(sys.stderr):
        from klrl.doctor.audit import audit, audit_text

        rows = list(audit(folder))
    print(json.dumps([asdict(row) for row in rows], indent=1) if as_json else audit_text(rows))
    return DONE


def _print_installed(as_json: bool) -> int:
    """Print what each use of klrl lacks; return 1 if klrl itself is incomplete."""
    from klrl.doctor.install import uses

    found = uses()
    if as_json:
        print(json.dumps([use._asdict() for use in found], indent=1))
    else:
        rows = [
            (use.purpose, f"no: {_few(use.missing)}", use.remedy)
            if use.missing
            else (use.purpose, "yes")
            for use in found
        ]
        print(text_table([("for", "installed", "install it with"), *rows]))
    return FAILED if found[0].missing else DONE


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _examine_loss(args: Namespace) -> int:
    """Print the verdict on a loss; output of the loss's code goes to stderr."""
    if args.audit is not None:
        raise ConfigError(f"--audit {args.audit}: not with --loss; give one of them")
    with redirect_stdout(sys.stderr):
        from klrl.doctor.loss import examine_loss, report_text
        from klrl.doctor.user_loss import settings_of

        given = {name: getattr(args, name) for name in _OF_LOSS}
        report = examine_loss(args.loss, settings=settings_of(args.settings), **given)
    if args.json:
        print(json.dumps({**asdict(report), "ok": report.ok}, indent=1))
    else:
        print(report_text(report))
    return DONE if report.ok else FAILED


def parser() -> Parser:
    """The argument list."""
    parser = Parser(
        prog="klrl doctor",
        description="Are this machine's KL numbers true? Estimators and their gradients against "
        "sums over all actions, and kl=legacy against kl=retrieve. With --loss: does my own loss "
        "have the gradient of E[return] - coef KL(pi||ref)?",
    )
    parser.add_flag("--install", "what each use of klrl has installed, and how to install the rest")
    parser.add_argument(
        "--audit", metavar="FOLDER", help="a table of the losses in a folder of adapters"
    )
    parser.add_flag("--json", "print JSON instead of tables")
    loss = parser.add_argument_group("a loss of your own (docs/doctor.md)")
    loss.add_argument(
        "--loss", metavar="FILE.py:NAME", help="compare its gradient with the true one"
    )
    loss.add_argument(
        "--placement",
        choices=("loss", "split", "reward"),
        default="loss",
        help="where the KL is charged: in the loss (default), in loss and rewards (exact KL), or "
        "in the rewards alone (k1)",
    )
    loss.add_argument(
        "--divergence",
        choices=("reverse", "forward", "js", "tv", "none"),
        help="the intended penalty: KL(pi||ref) (default), KL(ref||pi), ...",
    )
    loss.add_argument(
        "--scope",
        choices=("sequence", "token"),
        help="penalty of whole episodes (default of reverse, none) or of each step (of the others)",
    )
    loss.add_argument("--stale", type=int, default=0, help="random updates from pi_old to pi (0)")
    loss.add_argument("--seeds", type=int, default=100, help="problems of each kind (100)")
    loss.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="keywords of the loss")
    return parser
