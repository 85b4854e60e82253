"""A base policy, an expert of the new task, and eight ways from the one to the other.

A finished base is one line of ``docs/results/predictors/cells.jsonl``. A stopped one goes on with
the first run that it has not measured.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.mujoco.cells import Cell
from benchmarks.predictors.models import HEAVY, HEAVY_CHEETAH, MASS
from benchmarks.results import cpu_name
from klrl.config.identity import NUMERICS

OUTPUTS = Path("outputs/predictors")
#: Of a return; of a KL, whose episodes differ less; of the expert's demonstrations.
EPISODES, VISITS, DEMONSTRATIONS = 100, 50, 50
#: The expert's seed is its base's and this; the folder of its demonstrations.
EXPERT, DATA = 1000, "demonstrations"
#: Of each policy: KLs to the base in states of the new task, which the policy visits, and of the
#: old task, which the base visits.
KLS = ("new_forward", "new_reverse", "old_forward", "old_reverse")


@dataclass(frozen=True)
class Task:
    """A task, its change, and how long its runs are."""

    words: tuple[str, ...]  # of every run
    new: str  # the changed task
    old: str
    told: str
    frames: tuple[int, int, int, int]  # base and expert, reinforcement, distillation, cloning
    coefs: tuple[str, ...] = ("0", "0.1", "0.3", "1", "3")


#: The presets' loss when the committed cells ran, which do not name it.
LOSS = "loss=klpen"
RAW = ("env.reward_scale=0.1", "env.normalize_reward=false")
TASKS = {
    "pendulum": Task(
        *(("env=pendulum",), "env.kwargs.g=14", "env.kwargs.g=10", "gravity 10 → 14 m/s²"),
        *((100_000, 50_000, 25_000, 200_000), ("0", "0.03", "0.1", "0.3", "1")),
    ),
    "hopper": Task(
        *(("env=hopper", *RAW), f"env.kwargs.xml_file={HEAVY}", "env.kwargs.xml_file=hopper.xml"),
        *("torso twice as heavy", (500_000, 100_000, 150_000, 500_000)),
    ),
    "half_cheetah": Task(
        *(("env=half_cheetah", *RAW), f"env.kwargs.xml_file={HEAVY_CHEETAH}"),
        *("env.kwargs.xml_file=half_cheetah.xml", "all parts twice as heavy"),
        (300_000, 100_000, 150_000, 500_000),
    ),
}


@dataclass(frozen=True)
class BaseCell(Cell):
    """A base policy with all that is made of it."""

    @property
    def prints(self) -> str:
        """Changes with the words of any of its runs."""
        words = {name: [w for w in of if w != LOSS] for name, of in self.words_of().items()}
        told = json.dumps([words, EPISODES, VISITS, DEMONSTRATIONS, MASS])
        return f"{sha256(told.encode()).hexdigest()[:12]}-{NUMERICS}"

    @property
    def process(self) -> list[str]:
        return ["-m", "benchmarks.predictors", "--cell", self.task, str(self.seed)]

    @property
    def runs(self) -> Path:
        """The folder of its runs."""
        return OUTPUTS / self.task / f"seed_{self.seed}"

    @property
    def folder(self) -> Path:
        """None of its runs': what is measured of a stopped cell stays."""
        return OUTPUTS / self.task / f"cell_{self.seed}"

    def words_of(self) -> dict[str, list[str]]:
        """Name -> the words of a run. The expert starts from weights of its own."""
        task, base, expert = TASKS[self.task], self.runs / "base", self.runs / "expert"
        trained, tuned, distilled, cloned = (f"frames={n}" for n in task.frames)
        common = [*task.words, "logger=none", "eval.every=0", "eval.final=0"]
        start = [*common, task.new, f"actor.init={base}", f"seed={self.seed}"]
        anchored = [tuned, "reference=checkpoint", f"reference.path={base}"]
        teacher = ["experiment=distill", f"reference.path={expert}", "actor.hidden=[64,64]"]
        return {
            "base": [*common, LOSS, "kl=none", trained, f"seed={self.seed}"],
            "expert": [*common, LOSS, "kl=none", trained, task.new, f"seed={EXPERT + self.seed}"],
            **{f"rl {coef}": [*start, *anchored, LOSS, f"kl.coef={coef}"] for coef in task.coefs},
            "distill reverse": [*teacher, *start, distilled, "kl.divergence=reverse"],
            "distill forward": [*teacher, *start, distilled, "kl.divergence=forward"],
            "clone": ["experiment=clone", *start, f"data={self.runs / DATA}", cloned],
        }


def run_cell(cell: BaseCell) -> dict[str, Any]:
    """Train and measure what is missing; the cell's line."""
    found = {name: once(cell, name, words) for name, words in cell.words_of().items()}
    base, cpu = found["base"], round(sum(each["cpu"] for each in found.values()), 1)
    line = {"name": cell.name, "identity": cell.prints, "return": base["old"], "se": base["old_se"]}
    return {**line, "cpu": cpu, "machine": cpu_name(), "policies": found}


def once(cell: BaseCell, name: str, words: list[str]) -> dict[str, float]:
    """Train a run and measure its policy, or read what was measured."""
    import klrl

    folder = cell.runs / name.replace(" ", "_")
    kept = folder / "measured.json"
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    if found.get("words") != words:
        started = time.process_time()
        shutil.rmtree(folder, ignore_errors=True)
        if name == "clone":
            demonstrate(cell)
        run = klrl.run(*words, folder=folder)
        found = {"words": words, **measured(run, cell, name)}
        found["cpu"] = round(time.process_time() - started, 1)
        kept.write_text(json.dumps(found), encoding="utf-8")
    return {key: value for key, value in found.items() if key != "words"}


def measured(run: Any, cell: BaseCell, name: str) -> dict[str, float]:
    """Returns on both tasks; of a policy that was made of the base, how far it is from it."""
    import klrl

    task, base, row = TASKS[cell.task], cell.runs / "base", {}
    for key, word in (("new", task.new), ("old", task.old)):
        played = run.evaluate(EPISODES, word).row
        row |= {key: played["eval/return"], f"{key}_se": played["eval/return_se"]}
    if name == "base":
        return row
    for states, on, label in (("new", run.folder, "run"), ("old", base, "other")):
        found = run.kl(base, on=on, episodes=VISITS).distances
        row[f"{states}_reverse"] = found[f"KL(run||other) on {label}"].mean
        row[f"{states}_forward"] = found[f"KL(other||run) on {label}"].mean
    weights = [dict(policy.named_parameters()) for policy in (run.policy(), klrl.load_policy(base))]
    row["weights"] = float(sum((weights[0][n] - p).square().sum() for n, p in weights[1].items()))
    return {**row, "weights": row["weights"] ** 0.5}


def demonstrate(cell: BaseCell) -> None:
    """The expert's episodes, sampled: of its likeliest actions a clone would have no spread."""
    data = cell.runs / DATA
    shutil.rmtree(data, ignore_errors=True)
    words = ["record", str(cell.runs / "expert"), "--sampled", f"--episodes={DEMONSTRATIONS}"]
    subprocess.run([sys.executable, "-m", "klrl", *words, f"--output={data}"], check=True)
