"""Students that learn a teacher's policy from the KL alone, beside training from scratch.

    python -m benchmarks.distillation                # what is missing, then the tables
    python -m benchmarks.distillation --envs hopper --seeds 0
    python -m benchmarks.distillation --tables       # from what is finished

Control: the teacher trains on the reward for 500,000 frames; the student, a quarter as wide, learns
by ``experiment=distill`` on its own samples; another of its size trains on the reward. Language:
the teacher is ``experiment=sort_digits``, the student starts from the same supervised base.
Students and those from scratch have other seeds than their teachers. One job at a time, one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median

import gymnasium
import numpy as np

import klrl
from benchmarks.results import ROOT, environment, table
from benchmarks.rounds import last_words

#: Frames of a student, and what else it is given.
STUDENTS = {"pendulum": (100_000, ()), "hopper": (300_000, ())}
TEACHER_FRAMES, SHARE, SEEDS = 500_000, 0.95, (0, 1, 2)
#: Of the runs' evaluations; start states are the same for all.
EPISODES, START = 100, 12345
COMMON = ("device=cpu", "threads=1", "logger=none")
FOLDER = ROOT / "outputs" / "distillation"


def job(env: str, role: str, seed: int, folder: Path) -> list[str]:
    """The overrides of a run; ``role`` is teacher, student or scratch."""
    words = [*COMMON, f"hydra.run.dir={folder / f'{env}_{role}_{seed}'}"]
    teacher = f"reference.path={folder / f'{env}_teacher_{seed}'}"
    if env == "sort_digits":
        words += ["experiment=sort_digits"] if role == "teacher" else ["experiment=distill_text"]
        own = [f"seed={seed}"] if role == "teacher" else [teacher, f"seed={seed + 10}"]
        return [*words, *own]
    frames, more = STUDENTS[env]
    words += [f"env={env}", "eval.every=4"]
    if role == "teacher":
        return [*words, f"frames={TEACHER_FRAMES}", f"seed={seed}"]
    words += [f"seed={seed + 10}"]
    if role == "scratch":
        return [*words, f"frames={TEACHER_FRAMES}", "actor.hidden=[16,16]"]
    best = "reference.which=best"
    return [*words, "experiment=distill", teacher, best, f"frames={frames}", *more]


def train(overrides: Sequence[str]) -> None:
    """Run klrl.

    Raises:
        SystemExit: it failed; the message is the last thing that it said.
    """
    command = [sys.executable, "-m", "klrl", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise SystemExit(f"{last_words(done.stderr)} ({' '.join(command)})")


def missing(folder: Path, envs: Sequence[str], seeds: Sequence[int]) -> Iterator[list[str]]:
    """The overrides of the runs that have not finished, teachers before their students."""
    for env in envs:
        roles = ("teacher", "student") + (() if env == "sort_digits" else ("scratch",))
        for seed in seeds:
            for role in roles:
                manifest = folder / f"{env}_{role}_{seed}" / "manifest.json"
                if manifest.exists() and json.loads(manifest.read_text())["status"] == "finished":
                    continue
                yield job(env, role, seed, folder)


@cache
def mean_return(run: Path, which: str) -> float:
    """Of :data:`EPISODES` episodes of the policy's mode."""
    return klrl.load_run(run).evaluate(EPISODES, which=which, seed=START).row["eval/return"]


@cache
def random_return(env: str) -> float:
    """Of as many episodes of uniform actions in Gymnasium's own environment."""
    copy = gymnasium.make(klrl.compose(f"env={env}").env.id)
    copy.action_space.seed(0)
    returns = []
    for episode in range(EPISODES):
        copy.reset(seed=START + episode)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = copy.step(copy.action_space.sample())
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


def reached(run: Path, goal: float) -> str:
    """The frames at the first evaluation during a run that is at least ``goal``."""
    rows = klrl.load_run(run).rows
    at = [row["frames"] for row in rows if row.get("eval/return", -np.inf) >= goal]
    return f"{at[0]:,.0f}" if at else f"not in {rows[-1]['frames']:,.0f}"


def control_table(folder: Path, env: str, seeds: Sequence[int]) -> str:
    """Each seed: returns, the student's share, and the frames to reach :data:`SHARE`."""
    rows, shares = [], []
    low = random_return(env)
    for seed in seeds:
        teacher, student, scratch = (
            folder / f"{env}_{role}_{seed}" for role in ("teacher", "student", "scratch")
        )
        high, learned = mean_return(teacher, "best"), mean_return(student, "last")
        share = (learned - low) / (high - low)
        shares.append(share)
        goal = low + SHARE * (high - low)
        other = mean_return(scratch, "last")
        kl = klrl.load_run(student).rows[-1]["kl/ref/exact"]
        rows.append(
            [
                *(str(seed), f"{high:,.1f}", f"{learned:,.1f}", f"{share:.3f}", f"{kl:.3f}"),
                *(reached(student, goal), f"{other:,.1f}", reached(scratch, goal)),
            ]
        )
    header = ["seed", "teacher", "student", "share", "KL, nats", "frames to .95"]
    header += ["from scratch", "frames to .95"]
    verdict = f"{env}: random {low:,.1f}; median share {median(shares):.3f}"
    return f"{verdict}, least {min(shares):.3f}\n\n{table(header, rows)}"


def language_table(folder: Path, seeds: Sequence[int]) -> str:
    """Each seed: KL(student||teacher) per token of the first iteration and of the last."""
    rows = []
    for seed in seeds:
        run = klrl.load_run(folder / f"sort_digits_student_{seed}")
        first, last = (run.rows[i]["kl/ref/exact"] for i in (0, -1))
        score = [
            klrl.load_run(folder / f"sort_digits_{role}_{seed}").rows[-1]["eval/return"]
            for role in ("teacher", "student")
        ]
        rows.append([str(seed), f"{first:.4f}", f"{last:.4f}", *(f"{each:.3f}" for each in score)])
    header = ["seed", "KL per token, first", "last", "score of the teacher", "of the student"]
    return f"sort_digits\n\n{table(header, rows)}"


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = (*STUDENTS, "sort_digits")
    parser.add_argument("--envs", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the runs")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    args = parser.parse_args()
    for overrides in [] if args.tables else missing(args.folder, args.envs, args.seeds):
        print(" ".join(overrides), flush=True)
        train(overrides)
    for env in args.envs:
        if env == "sort_digits":
            print(language_table(args.folder, args.seeds), end="\n\n")
        else:
            print(control_table(args.folder, env, args.seeds), end="\n\n")


if __name__ == "__main__":
    main()
