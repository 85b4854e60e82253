"""``python -m klrl.doctor [--parity] [--json]``; exits with 1 when a line of its own is off."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain

from klrl.doctor.lines import Line, off, table


def main(argv: Sequence[str] | None = None) -> None:
    """Run every check and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m klrl.doctor",
        description="Are this machine's KL numbers true? Estimators, gradients, placements, "
        "controllers and beta rules against enumeration and closed forms.",
    )
    parser.add_argument(
        "--parity",
        action="store_true",
        help="only kl=legacy against kl=retrieve, on one trajectory",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list of lines")
    args = parser.parse_args(argv)
    lines = examine(parity_only=args.parity)
    if args.json:
        told = [{**asdict(line), "ok": line.ok, "verdict": line.verdict} for line in lines]
        print(json.dumps(told, indent=1))
    else:
        print(table(lines))
    wrong = off(lines)
    if wrong:
        print(f"\n{len(wrong)} of klrl's own lines are off", file=sys.stderr)
        sys.exit(1)
    if not args.json:
        print(f"\n{sum(line.own for line in lines)} lines of klrl's own, all within tolerance")


def examine(parity_only: bool = False) -> list[Line]:
    """Every line, in the order of the tables."""
    import torch

    from klrl.doctor import episodes, estimates, parity, rules, tokens, upstream

    torch.set_num_threads(1)
    if parity_only:
        return list(parity.parity_lines())
    return list(
        chain(
            estimates.value_lines(),
            estimates.gradient_lines(),
            estimates.off_policy_lines(),
            estimates.forgotten_ratio_lines(),
            tokens.token_lines(),
            episodes.sequence_lines(),
            episodes.placement_lines(),
            rules.controller_lines(),
            rules.beta_lines(),
            upstream.upstream_lines(),
        )
    )


if __name__ == "__main__":
    main()
