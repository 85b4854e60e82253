"""``klrl verify RUN``: looks for faults in the record of a run."""

from __future__ import annotations

from klrl.base.text import escaped_lines, warn
from klrl.cli.evaluate import checked_run
from klrl.cli.export import add_model
from klrl.cli.wrapper import DONE, FAILED, Parser


def verify_command(argv: list[str]) -> int:
    """Print what was checked and what is wrong; return 1 if anything is wrong."""
    args = parser().parse_args(argv)

    from klrl.config import LanguageConfig
    from klrl.runs.machine import check_language_packages
    from klrl.runs.resume import stored_config
    from klrl.train.verify import Record, verify_record

    folder = checked_run(args)
    config, record = stored_config(folder), Record()
    if not isinstance(config, LanguageConfig):
        verify_record(folder, config, args.device, record)
    else:
        check_language_packages(config)

        from klrl.language.run.verify import verify_run

        record = verify_run(args.run, args.device, args.model)
    print(escaped_lines("\n".join(record.lines)))
    if not record.problems:
        return DONE
    warn(f"klrl verify: the record of {args.run} is wrong")
    return FAILED


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(
        prog="klrl verify",
        description="Check a run: compare each row with itself, and settings and checkpoints with "
        "their digests; play the closing evaluations again; for a language run recompute samples' "
        "log-probs and KLs with plain transformers. Exit code 1 if something is wrong.",
    )
    parser.add_argument("run", metavar="RUN", help="the run folder, such as outputs/NAME")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or auto")
    add_model(parser)
    return parser
