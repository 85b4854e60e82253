"""``klrl diff RUN RUN``: compares two runs' settings, versions and metrics."""

from __future__ import annotations

from klrl.cli.wrapper import Parser


def diff_command(argv: list[str]) -> int:
    """Print the differences between two runs; return 0, even if there are some."""
    args = parser().parse_args(argv)

    if args.bits:
        from klrl.report.diff import compare_bits
        from klrl.runs.find import find_manifest

        print(compare_bits(*(find_manifest(run, "RUN") for run in args.runs))[1])
        return 0

    from klrl.report.diff import as_text, compare, read

    first, second = map(read, args.runs)
    print(as_text(compare(first, second)))
    return 0


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(prog="klrl diff", description="Settings, versions and metrics of two runs.")
    parser.add_argument("runs", nargs=2, metavar="RUN", help="a run folder, as outputs/NAME")
    parser.add_flag(
        "--bits",
        "the first iteration and metric that differ in any bit (except times), and whether the "
        "last checkpoints have the same parameters to the bit",
    )
    return parser
