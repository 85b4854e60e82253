"""``klrl figure SWEEP``: draws a metric of runs as a figure for a paper."""

from __future__ import annotations

from klrl.base.text import escaped
from klrl.cli.wrapper import DONE, Parser


def figure_command(argv: list[str]) -> int:
    """Write a figure; return the exit code."""
    args = parser().parse_args(argv)

    from klrl.api_sweep import Sweep

    options = {name: getattr(args, name) for name in ("width", "smooth", "out")}
    Sweep(args.sweep, unfinished=args.unfinished).figure(args.y, args.x, **options)
    print(escaped(args.out))
    return DONE


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(
        prog="klrl figure",
        description="Draw a metric: a colour per setting, its mean over seeds and 95 % interval.",
    )
    parser.add_argument("sweep", metavar="SWEEP", help="the folder of a sweep, or of any runs")
    of_y = "a metric of metrics.jsonl, such as kl/ref/exact (default: the return)"
    parser.add_argument("--y", metavar="METRIC", help=of_y)
    of_x = "frames, samples or iteration; another metric: a point per setting, at its final means"
    parser.add_argument("--x", metavar="METRIC", help=of_x)
    parser.add_argument("--width", type=float, default=3.3, help="inches (3.3, a column)")
    smooth = "show the mean of this many of a run's latest values (1)"
    parser.add_argument("--smooth", type=int, default=1, help=smooth)
    where = "FILE.pdf, .svg or .png (figure.pdf)"
    parser.add_argument("--out", metavar="FILE", default="figure.pdf", help=where)
    parser.add_flag("--unfinished", "count running and interrupted runs too")
    return parser
