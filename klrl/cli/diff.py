"""``klrl diff RUN RUN``: settings, versions and metrics of two runs."""

from __future__ import annotations

from functools import partial

from klrl.cli.wrapper import Parser, execute


def diff_command(argv: list[str]) -> int:
    """Print what differs between two runs; returns the exit code.

    Raises:
        ConfigError: a folder holds no readable run.
    """
    args = parser().parse_args(argv)

    from klrl.report.diff import as_text, compare, read

    first, second = map(read, args.runs)
    print(as_text(compare(first, second)))
    return 0


def parser() -> Parser:
    """The argument list."""
    parser = Parser(prog="klrl diff", description="Settings, versions and metrics of two runs.")
    parser.add_argument("runs", nargs=2, metavar="RUN", help="a run folder, as outputs/NAME")
    return parser


#: ``python -m klrl.diff``, which is ``klrl diff``.
main = partial(execute, "diff")

if __name__ == "__main__":
    main()
