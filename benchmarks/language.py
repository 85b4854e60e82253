"""Samples per CPU-second of klrl's language experiments and of TRL's GRPOTrainer.

    make bench-lm                              # about 20 minutes; writes the results
    python -m benchmarks.language --quick      # one short round of each workload; writes nothing
    python -m benchmarks.language --only smollm --before TREE   # an older checkout in turn, too

The same base model, prompts, group size, prompts per iteration, minibatches, epochs, response
length, learning rate and coefficient. Contenders are processes of their own, one at a time, in turn
(A B A B), on one thread; a round is a seed. Imports, building and the first iteration are not
counted. The ratio is taken within a round; rewards after equal samples stand beside it. A rollout
is learned from in several minibatches, for which TRL computes the old log-probs once more; with one
it would not. With a large vocabulary TRL runs twice: as it ships, and with its head on response
tokens alone, as it has it on CUDA; the target holds for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.peers.common import versions
from benchmarks.peers.lm import LAST, PACKAGES
from benchmarks.results import ROOT, about, commit, language, save
from benchmarks.rounds import (
    Failed,
    Line,
    Told,
    complete,
    error_in,
    loads,
    median_phases,
    rounds,
    run_line,
    spread,
)

#: Ways to run TRL, by what is added to its command.
COMPACT = "TRL, head on response tokens alone"
BEFORE = "klrl before"
PEERS: dict[str, tuple[str, ...]] = {"TRL": (), COMPACT: ("--compact",)}
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"


@dataclass(frozen=True)
class Workload:
    """What both contenders do; ``target`` is the least ratio to TRL that is good enough."""

    name: str  # for people
    target: float  # see above
    # beside the defaults of :func:`benchmarks.peers.lm.make_parser`
    settings: Mapping[str, str | int | float]
    iterations: int = 40  # in a full round; the first one is not counted
    # its vocabulary is: TRL runs with its head on response tokens alone too
    large: bool = False

    @property
    def task(self) -> str:
        """Of :data:`benchmarks.peers.lm.TASKS`."""
        return str(self.settings.get("task", "sort_digits"))

    @property
    def shots(self) -> int:
        """Worked examples in a prompt."""
        return int(self.settings.get("shots", 0))


WORKLOADS = {
    "short": Workload("14-token prompts", 1.8, {"prompts": 32}),
    "long": Workload("94-token prompts", 3.0, {"prompts": 32, "shots": 4}),
    "smollm": Workload(
        "SmolLM2-135M, 2 x 8 responses",
        1.6,
        {
            **{"task": "instructions", "prompts": 2, "minibatches": 2, "new-tokens": 32},
            **{"temperature": 0.8, "lr": 1e-5},
        },
        iterations=3,
        large=True,
    ),
}


def base_model_of(workload: Workload) -> Path:
    """The folder of the model that both start from; trained first for prompts with shots."""
    if workload.task == "instructions":
        from klrl.language.model.smollm import smollm

        return smollm()
    from benchmarks.sort_digits_base import build, recipe_for
    from klrl.language.data.sort_digits import BASE_MODEL
    from klrl.language.model.smollm import cached

    if not workload.shots:
        return BASE_MODEL
    recipe = recipe_for(4, 8, workload.shots)
    return cached(f"sort_digits-{workload.shots}-shots", partial(build, recipe))


def write_prompts(file: Path, workload: Workload, seed: int, count: int) -> None:
    """The prompts that klrl's experiment draws with ``seed=...``, in its order."""
    from klrl.base.seeds import derived_seed
    from klrl.language.data.instructions import Instructions
    from klrl.language.data.sort_digits import SortDigits

    drawn = derived_seed(seed, "prompts")
    if workload.task == "instructions":
        rows = [Instructions(drawn)(index) for index in range(count)]
    else:
        rows = [SortDigits(shots=workload.shots, seed=drawn)(index) for index in range(count)]
    told = [{"prompt": [dict(turn) for turn in row.content], **row.row} for row in rows]
    file.write_text(json.dumps(told))


def run_klrl(words: Mapping[int, Sequence[str]], tree: Path, seed: int) -> Line:
    return run_line([sys.executable, "-m", "benchmarks.peers.klrl_lm", *words[seed]], tree)


def run_trl(
    python: Path,
    words: Mapping[int, Sequence[str]],
    data: Mapping[int, Path],
    more: Sequence[str],
    seed: int,
) -> Line:
    """A run with the words and prompts of a seed."""
    if not python.exists():
        raise Failed("TRL's environment is missing; make bench-lm sets it up")
    given = ["-m", "benchmarks.peers.trl_grpo", *words[seed], "--data", str(data[seed]), *more]
    return run_line([str(python.absolute()), *given])


def compare(workload: Workload, args: argparse.Namespace) -> Line:
    """Rounds of all, in turn; a round is a seed."""
    print(workload.name, flush=True)
    model, iterations = base_model_of(workload), args.iterations or workload.iterations
    with tempfile.TemporaryDirectory() as folder:
        data = {seed: Path(folder) / f"{seed}.json" for seed in range(args.rounds)}
        for seed, file in data.items():
            write_prompts(file, workload, seed, int(workload.settings["prompts"]) * iterations)
        words = {seed: make_words(workload, model, seed, iterations, args.epochs) for seed in data}
        trees = {"klrl": ROOT, **({BEFORE: args.before} if args.before else {})}
        tasks = {name: partial(run_klrl, words, tree) for name, tree in trees.items()}
        for name, more in PEERS.items():
            if workload.large or not more:
                tasks[name] = partial(run_trl, args.trl_python, words, data, more)
        found = rounds(tasks, args.rounds, in_words)
        require_equal_prompts(found)
    told = {"rounds": args.rounds, "epochs": args.epochs, "last": LAST, "load": loads(found)}
    told |= {"before": commit(args.before)} if args.before else {}
    told |= {"versions": versions(PACKAGES), "contenders": summarise(found, workload)}
    return {**about(), **told}


def make_words(
    workload: Workload, model: Path, seed: int, iterations: int, epochs: int
) -> list[str]:
    """What both get."""
    given = {**workload.settings, "model": model, "seed": seed}
    given |= {"iterations": iterations, "epochs": epochs}
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def in_words(told: Line) -> str:
    speed, reward = told["frames_per_cpu_second"], told["reward_last"]
    rate = f"{speed:,.{0 if speed >= 100 else 2}f}"
    return f"{rate} samples per CPU-second; reward {told['reward_first']:.2f} -> {reward:.2f}"


def require_equal_prompts(found: dict[str, list[Told]]) -> None:
    """All answered the same questions in the first iteration of every round."""
    for told in zip(*found.values(), strict=False):
        if len({line["asked"] for line in told if isinstance(line, dict)}) > 1:
            raise SystemExit("klrl and TRL were asked different questions: nothing was compared")


def summarise(found: dict[str, list[Told]], workload: Workload) -> dict[str, Line]:
    """Per contender: speed, rewards, phases; klrl's ratio to each other one within a round."""
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
            "last": told[0]["last"],
            "tokens": spread([x["tokens"] for x in told]),
            "peak_mb": round(statistics.median(x["peak_mb"] for x in told)),
            "phases": phases_of(told) if name.startswith("klrl") else {},
            "versions": told[0]["versions"],
        }
    key, mine = "frames_per_cpu_second", found["klrl"]
    for name in [name for name in found if name != "klrl"]:
        if complete(mine, len(found[name])) and complete(found[name], len(mine)):
            pairs = zip(mine, found[name], strict=True)
            ratio = spread([own[key] / theirs[key] for own, theirs in pairs])
            summary["klrl"].setdefault("ratios", {})[name] = ratio
    summary["klrl"]["target"] = workload.target
    return summary


def phases_of(told: Sequence[Line]) -> dict[str, float]:
    """us of CPU per sample; there is no simulator, so that a rollout is all sampling."""
    found = median_phases(told)
    found.pop("env")
    return {"sampling and scoring": found.pop("policy"), **found}


def good_enough(summary: dict[str, Line]) -> bool:
    """The medians of the ratios to TRL reach the target."""
    klrl = summary["klrl"]
    return all(klrl["ratios"][x]["median"] >= klrl["target"] for x in PEERS if x in summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, help="default 3, quick 1")
    parser.add_argument("--iterations", type=int, help="default 40 (SmolLM2: 3), quick 5")
    parser.add_argument("--epochs", type=int, default=1, help="passes over each rollout")
    parser.add_argument("--only", choices=WORKLOADS, help="one workload")
    parser.add_argument("--before", type=Path, help="an older checkout, in turn with this one")
    parser.add_argument(
        "--trl-python", type=Path, default=TRL_PYTHON, help="python of its environment"
    )
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    chosen = {args.only: WORKLOADS[args.only]} if args.only else WORKLOADS
    if args.quick:
        chosen = {key: replace(w, iterations=min(w.iterations, 5)) for key, w in chosen.items()}
    data = {w.name: compare(w, args) for w in chosen.values()}
    print(language(data))
    found = [part["contenders"] for part in data.values()]
    failed = any("error" in row for contenders in found for row in contenders.values())
    if not (args.quick or args.no_save or failed):
        print(save("language", data).relative_to(ROOT))
    if failed or not all(map(good_enough, found)):
        sys.exit(1)


if __name__ == "__main__":
    main()
