"""``python -m benchmarks.shipped [NUMBER ...]``: run what is missing, then write docs/results/."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.shipped import compare, estimators, frontier, smollm, transforms
from benchmarks.shipped.page import Result, write_index, write_result

_MODULES = {
    "beta_rules": compare,
    "transforms": transforms,
    "estimators": estimators,
    "frontier": frontier,
    "controllers": compare,
    "klpen_clip": compare,
    "smollm": smollm,
}
_ALL = [Result(name, module) for name, module in _MODULES.items()]
RESULTS: dict[int, Result] = {result.number: result for result in _ALL}


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    for number in args.numbers or RESULTS:
        result = RESULTS[number]
        if not args.draw:
            result.prepare()
            for sweep in result.sweeps:
                sweep.run(args.jobs)
        print(f"{write_result(result)}: written", flush=True)
        write_index()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shipped",
        description="Make the results in docs/results/; finished runs are not run again.",
    )
    told = "; ".join(f"{number}: {result.title}" for number, result in RESULTS.items())
    parser.add_argument("numbers", nargs="*", type=int, choices=[*RESULTS], help=told)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--draw", action="store_true", help="no runs; write from those there are")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
