"""``klrl report PATH...``: compares runs in one offline page."""

from __future__ import annotations

from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.base.text import warn
from klrl.cli.wrapper import Parser


def report_command(argv: list[str]) -> int:
    """Write a report; return the exit code."""
    args = parser().parse_args(argv)

    from klrl.report.runs import find_runs
    from klrl.report.write import write_report

    inventory = find_runs(args.paths)
    for line in inventory.skipped:
        warn(f"klrl report: skipped {line}")
    if not inventory.runs and not inventory.sweeps:
        raise ConfigError(f"{' '.join(args.paths)}: no run there can be read")
    folder = Path(args.output or expanded(args.paths[0]) / "report")
    try:
        write_report(inventory, folder, unfinished=args.unfinished)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{error}; choose another folder with -o") from error
    return 0


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(prog="klrl report", description="Compare runs in one offline HTML page.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="run folders, or folders of them")
    parser.add_argument(
        "-o", dest="output", metavar="FOLDER", help="where to write (default: PATH/report)"
    )
    parser.add_flag("--unfinished", "count running and interrupted runs too")
    return parser
