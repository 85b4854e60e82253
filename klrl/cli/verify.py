"""``klrl verify RUN``: recomputes recorded values of a run, and compares them with the record."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from klrl.base.text import counted, text_table
from klrl.cli.evaluate import checked_run
from klrl.cli.export import add_model, check_language_run
from klrl.cli.wrapper import DONE, FAILED, Parser
from klrl.domains import CONTROL

if TYPE_CHECKING:
    from klrl.language.run.verify import Comparison, Verdict


def verify_command(argv: list[str]) -> int:
    """Print the result of the checks; return 1 if the record of the run is wrong."""
    args = parser().parse_args(argv)

    from klrl.runs.resume import stored_config
    from klrl.train.verify import Record, verify_record

    folder = checked_run(args)
    config, table = stored_config(folder), ""
    if config.domain == CONTROL.name:
        record = Record()
        verify_record(folder, config, args.device, record)
    else:
        check_language_run(args.run)

        from klrl.language.run.verify import verify_run

        record = verdict = verify_run(args.run, args.device, args.model)
        table = f"{_as_text(verdict, args.run)}\n"
    if args.json:
        print(json.dumps({"ok": record.ok, **vars(record)}, indent=1, default=_as_json))
    else:
        print(table + "\n".join(record.lines))
    if record.ok:
        return DONE
    print(f"klrl verify: the record of {args.run} is wrong", file=sys.stderr)
    return FAILED


def _as_text(verdict: Verdict, run: str) -> str:
    """Format the comparison of the samples' log-probs and KLs as a table."""
    largest, mean = verdict.bounds
    head = ["nats per token", "samples", "tokens", "max error", "mean error", "", ""]
    rows = [
        [
            f"log-probs of the {each.name}" if each.name != "KL" else "KL(policy||reference)",
            f"{each.samples}",
            f"{each.tokens:,}",
            f"{each.largest:.2g}",
            f"{each.mean:.2g}",
            ("ok" if each.samples else "-") if each.ok else "OFF",
            "" if each.ok else each.place,
        ]
        for each in verdict.measures
    ]
    allowed = f"allowed: {largest:g} at most, {mean:.2g} in the mean"
    for each in verdict.measures:
        if each.bounds != verdict.bounds:
            allowed += f"; of the {each.name} {each.bounds[1]:.2g} in the mean"
    lines = [
        f"{run}: samples computed again with plain transformers, one at a time, without padding",
        text_table([head, *rows], right=range(1, 5)),
        allowed,
    ]
    for name, count in verdict.not_computed.items():
        if count:
            gone = counted(count, "sample")
            lines.append(f"not computed again: {name} of {gone}, whose weights are not stored")
    return "\n".join(lines)


def _as_json(each: Comparison) -> dict[str, object]:
    return {**vars(each), "mean": each.mean, "ok": each.ok}


def parser() -> Parser:
    """Return the command's argument parser."""
    parser = Parser(
        prog="klrl verify",
        description="Is the record of a run true? Rows and settings against the checkpoints' "
        "digests, closing evaluations played again; of a language run also its samples: prompts, "
        "rewards, and log-probs and KLs by plain transformers. Exit code 1 if something is wrong.",
    )
    parser.add_argument("run", metavar="RUN", help="the run folder, as outputs/NAME")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or auto")
    add_model(parser)
    parser.add_flag("--json", "print one JSON object")
    return parser
