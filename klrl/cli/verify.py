"""``klrl verify RUN``: checks the record of a run by recomputing as much of it as possible."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING

from klrl.base.text import text_table
from klrl.cli.evaluate import checked_run
from klrl.cli.export import add_model, check_language_run
from klrl.cli.wrapper import DONE, FAILED, Parser
from klrl.domains import CONTROL

if TYPE_CHECKING:
    from klrl.language.run.verify import Verdict


def verify_command(argv: list[str]) -> int:
    """Print how far the record is off; return 1 if that is beyond the bounds."""
    args = parser().parse_args(argv)

    from klrl.runs.resume import stored_config

    folder = checked_run(args)
    config = stored_config(folder)
    if config.domain == CONTROL.name:
        from klrl.train.verify import verify_record

        record = verify_record(folder, config, args.device)
        ok = not record.problems
        content = {"ok": ok, **vars(record)}
        print(json.dumps(content, indent=1) if args.json else "\n".join(record.lines))
    else:
        check_language_run(args.run)

        from klrl.language.run.verify import verify_run

        verdict = verify_run(args.run, args.device, args.model)
        ok = verdict.ok
        print(json.dumps(as_json(verdict), indent=1) if args.json else _as_text(verdict, args.run))
    if ok:
        return DONE
    print(f"klrl verify: the record of {args.run} is off", file=sys.stderr)
    return FAILED


def _as_text(verdict: Verdict, run: str) -> str:
    largest, mean = verdict.bounds
    head = ["nats per token", "samples", "tokens", "max off", "mean off", "", ""]
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
            lines.append(f"not computed again: {name} of {count} samples, whose weights are gone")
    return "\n".join([*lines, *verdict.notes, *verdict.problems, *verdict.record.lines])


def as_json(verdict: Verdict) -> dict[str, object]:
    """Return the output of ``--json``."""
    return {
        "ok": verdict.ok,
        "bounds": dict(zip(("max", "mean"), verdict.bounds, strict=True)),
        "measures": [
            {
                "name": each.name,
                "samples": each.samples,
                "tokens": each.tokens,
                # JSON has no infinity: print null, next to "ok": false.
                "max": each.largest if math.isfinite(each.largest) else None,
                "mean": each.mean if math.isfinite(each.mean) else None,
                "bounds": dict(zip(("max", "mean"), each.bounds, strict=True)),
                "place": each.place,
                "ok": each.ok,
            }
            for each in verdict.measures
        ],
        "not_computed": verdict.not_computed,
        "notes": verdict.notes,
        "problems": verdict.problems,
        "record": vars(verdict.record),
    }


def parser() -> Parser:
    """The argument list."""
    parser = Parser(
        prog="klrl verify",
        description="Is the record of a run true? Rows and settings against the checkpoints' "
        "digests, closing evaluations played again; of a language run also its samples: prompts, "
        "rewards, and log-probs and KLs by plain transformers. Exit code 1 if something is off.",
    )
    parser.add_argument("run", metavar="RUN", help="the run folder, as outputs/NAME")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or auto")
    add_model(parser)
    parser.add_flag("--json", "print one JSON object")
    return parser
