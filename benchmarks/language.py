"""Samples per CPU-second of klrl's ``experiment=sort_digits`` and of TRL's GRPOTrainer.

    make bench-lm                              # about 20 minutes; writes the results
    python -m benchmarks.language --quick      # one short round of each workload; writes nothing

The same base model, prompts, group size, prompts per iteration, minibatches, epochs, response
length, learning rate and coefficient. Contenders are processes of their own, one at a time, in turn
(A B A B), on one thread; a round is a seed. Imports, building and the first iteration are not
counted. The ratio is taken within a round; rewards after equal samples stand beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.common import versions
from benchmarks.peers.lm import LAST, PACKAGES
from benchmarks.results import ROOT, language, save
from benchmarks.rounds import (
    Failed,
    Line,
    Told,
    complete,
    error_in,
    median_phases,
    rounds,
    run_line,
    spread,
)

TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"


@dataclass(frozen=True)
class Workload:
    """Prompts of one length; ``target`` is the least ratio to TRL that is good enough."""

    name: str
    shots: int
    target: float


WORKLOADS = (Workload("14-token prompts", 0, 1.8), Workload("94-token prompts", 4, 3.0))


def base_model_of(workload: Workload) -> Path:
    """The folder of klrl's own small model for these prompts; made first where there is none."""
    from klrl.language.base_model import base_model, recipe_for

    return base_model(recipe_for(4, 8, workload.shots))


def write_prompts(file: Path, workload: Workload, seed: int, count: int) -> None:
    """The prompts that ``experiment=sort_digits seed=...`` draws, in its order."""
    from klrl.base.seeds import derived_seed
    from klrl.language.sort_digits import SortDigits

    problem = SortDigits(shots=workload.shots, seed=derived_seed(seed, "prompts"))
    rows = [problem(index) for index in range(count)]
    told = [{"prompt": [dict(turn) for turn in row.content], **row.row} for row in rows]
    file.write_text(json.dumps(told))


# ---------------------------------------------------------------------------------------- running


def run_klrl(words: Sequence[str]) -> Line:
    return run_line([sys.executable, "-m", "benchmarks.peers.klrl_lm", *words])


def run_trl(python: Path, words: Sequence[str], data: Path) -> Line:
    if not python.exists():
        raise Failed("TRL's environment is missing; make bench-lm sets it up")
    given = ["-m", "benchmarks.peers.trl_grpo", *words, "--data", str(data)]
    return run_line([str(python.absolute()), *given])


def compare(workload: Workload, args: argparse.Namespace) -> dict[str, Line]:
    """Rounds of both, in turn; a round is a seed."""
    print(workload.name, flush=True)
    model = base_model_of(workload)
    with tempfile.TemporaryDirectory() as folder:
        data = {seed: Path(folder) / f"{seed}.json" for seed in range(args.rounds)}
        for seed, file in data.items():
            write_prompts(file, workload, seed, args.prompts * args.iterations)
        words = {seed: make_words(workload, args, model, seed) for seed in data}
        tasks = {
            "klrl": lambda seed: run_klrl(words[seed]),
            "TRL": lambda seed: run_trl(args.trl_python, words[seed], data[seed]),
        }
        found = rounds(tasks, args.rounds, in_words)
    require_equal_prompts(found)
    return summarise(found, workload)


def make_words(workload: Workload, args: argparse.Namespace, model: Path, seed: int) -> list[str]:
    """What both get."""
    given = {"model": model, "shots": workload.shots, "seed": seed, "prompts": args.prompts}
    given |= {"iterations": args.iterations, "epochs": args.epochs}
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def in_words(told: Line) -> str:
    speed, reward = told["frames_per_cpu_second"], told["reward_last"]
    return f"{speed:,.0f} samples per CPU-second; reward {told['reward_first']:.2f} -> {reward:.2f}"


def require_equal_prompts(found: dict[str, list[Told]]) -> None:
    """Both answered the same questions in the first iteration of every round."""
    for mine, theirs in zip(found["klrl"], found["TRL"], strict=False):
        if isinstance(mine, dict) and isinstance(theirs, dict) and mine["asked"] != theirs["asked"]:
            raise SystemExit("klrl and TRL were asked different questions: nothing was compared")


# ------------------------------------------------------------------------------------- summaries


def summarise(found: dict[str, list[Told]], workload: Workload) -> dict[str, Line]:
    """Per contender: speed, rewards, phases; klrl's ratio to TRL within a round."""
    summary: dict[str, Line] = {}
    for name, told in found.items():
        if error := error_in(told):
            summary[name] = {"error": error}
            continue
        summary[name] = {
            "samples_per_cpu_second": spread([x["frames_per_cpu_second"] for x in told]),
            "reward": spread([x["reward_last"] for x in told]),
            "reward_first": spread([x["reward_first"] for x in told]),
            "samples": told[0]["frames"] + told[0]["n"] * told[0]["t"],
            "peak_mb": round(statistics.median(x["peak_mb"] for x in told)),
            "phases": phases_of(told) if name == "klrl" else {},
            "versions": told[0]["versions"],
        }
    if complete(found["klrl"], len(found["TRL"])) and complete(found["TRL"], len(found["klrl"])):
        pairs = zip(found["klrl"], found["TRL"], strict=True)
        key = "frames_per_cpu_second"
        ratio = spread([mine[key] / theirs[key] for mine, theirs in pairs])
        summary["klrl"] |= {"ratio": ratio, "target": workload.target}
    return summary


def phases_of(told: Sequence[Line]) -> dict[str, float]:
    """us of CPU per sample; there is no simulator, so that a rollout is all sampling."""
    found = median_phases(told)
    found.pop("env")
    return {"sampling and scoring": found.pop("policy"), **found}


def good_enough(summary: dict[str, Line]) -> bool:
    """Nothing failed and the ratio's median reaches the target."""
    if any("error" in row for row in summary.values()):
        return False
    return summary["klrl"]["ratio"]["median"] >= summary["klrl"]["target"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, help="default 3, quick 1")
    parser.add_argument("--iterations", type=int, help="default 40, quick 5")
    parser.add_argument("--prompts", type=int, default=32, help="per iteration")
    parser.add_argument("--epochs", type=int, default=1, help="passes over each rollout")
    parser.add_argument("--shots", type=int, choices=[w.shots for w in WORKLOADS], help="only this")
    parser.add_argument(
        "--trl-python", type=Path, default=TRL_PYTHON, help="python of its environment"
    )
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    args.iterations = args.iterations or (5 if args.quick else 40)
    chosen = [w for w in WORKLOADS if args.shots in (None, w.shots)]
    data: Line = {"rounds": args.rounds, "epochs": args.epochs, "last": LAST}
    data["workloads"] = {workload.name: compare(workload, args) for workload in chosen}
    data["versions"] = versions(PACKAGES)
    print(language(data))
    if not (args.quick or args.no_save):
        print(save("language", data).relative_to(ROOT))
    if not all(good_enough(summary) for summary in data["workloads"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
