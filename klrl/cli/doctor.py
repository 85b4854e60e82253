"""``klrl doctor``: this install's numbers against known ones."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial

from klrl.cli.wrapper import DONE, FAILED, Parser, execute


def doctor_command(argv: list[str]) -> int:
    """Run every check and print the tables; returns 1 if one of klrl's own numbers is off."""
    args = parser().parse_args(argv)

    from klrl.doctor import examine
    from klrl.doctor.lines import off, table

    lines = examine(parity_only=args.parity)
    if args.json:
        rows = [{**asdict(line), "ok": line.ok, "verdict": line.verdict} for line in lines]
        print(json.dumps(rows, indent=1))
    else:
        print(table(lines))
    wrong = off(lines)
    if wrong:
        print(f"\n{len(wrong)} of klrl's own lines are off", file=sys.stderr)
        return FAILED
    if not args.json:
        print(f"\n{sum(line.own for line in lines)} lines of klrl's own, all within tolerance")
    return DONE


def parser() -> Parser:
    """The argument list."""
    parser = Parser(
        prog="klrl doctor",
        description="Are this machine's KL numbers true? Estimators, gradients, placements, "
        "controllers and beta rules against enumeration and closed forms.",
    )
    parser.add_argument(
        "--parity",
        action="store_true",
        help="only kl=legacy against kl=retrieve, on one trajectory",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list of lines")
    return parser


#: ``python -m klrl.doctor``, which is ``klrl doctor``.
main = partial(execute, "doctor")

if __name__ == "__main__":
    main()
