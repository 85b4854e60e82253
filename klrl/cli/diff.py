"""``klrl diff RUN RUN``: compares two runs' settings, versions and metrics."""

from __future__ import annotations

from klrl.base.text import escaped_lines
from klrl.cli.wrapper import Parser


def diff_command(argv: list[str]) -> int:
    """Print the differences between two runs; return 0, even if there are some."""
    args = parser().parse_args(argv)

    from klrl.report.diff import as_text, compare, compare_bits
    from klrl.report.runs import read_run
    from klrl.runs.find import find_manifest

    first, second = (find_manifest(run, "RUN") for run in args.runs)
    if args.bits:
        text = compare_bits(first, second)[1]
    else:
        text = as_text(compare(read_run(first), read_run(second)))
    print(escaped_lines(text))
    return 0


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(prog="klrl diff", description="Settings, versions and metrics of two runs.")
    parser.add_argument("runs", nargs=2, metavar="RUN", help="a run folder, such as outputs/NAME")
    parser.add_flag(
        "--bits",
        "the first iteration and metric that differ in any bit (except times), and whether the "
        "last checkpoints have the same parameters to the bit",
    )
    return parser
