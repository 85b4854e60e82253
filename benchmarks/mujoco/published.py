"""Published returns of PPO and of TRPO on the MuJoCo tasks at one million frames: published.csv.

A return is followed by +- and what the column ``spread`` says. By its hyperparams/ppo.yml
rl-baselines3-zoo has the defaults of Stable-Baselines3 on Ant, and on Swimmer with gamma = .9999;
nearly every number is tuned on the other three.

Only what was read. Looked up and left out: Stable-Baselines3's documentation (PyBullet only),
Spinning Up's own page (curves to 3M), PFRL and Henderson et al. 2018 as it quotes them (2M),
SLM-Lab's v5 table (4M to 10M), CleanRL's RPO page (8M), TorchRL's sota-implementations (no
figures); of Andrychowicz et al. 2021 only the abstract could be read. The PPO paper's adaptive KL
penalty has no returns per task: its Table 1, as quoted, gives .74 at d_targ = .01 against .82 for
clip = .2, normalised over all tasks.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FRAMES = 1_000_000
#: Preset, as in ``env=hopper`` -> Gymnasium's name without its version.
NAMES = {
    "half_cheetah": "HalfCheetah",
    "hopper": "Hopper",
    "walker2d": "Walker2d",
    "ant": "Ant",
    "swimmer": "Swimmer",
    "reacher": "Reacher",
    "inverted_pendulum": "InvertedPendulum",
    "inverted_double_pendulum": "InvertedDoublePendulum",
    "humanoid": "Humanoid",
}
#: What a return on v5 does not share with the versions before, from Gymnasium's documentation.
V5 = {
    "hopper": "no healthy_reward on the step that ends the episode",
    "walker2d": "no healthy_reward on the last step; equal friction of both feet",
    "ant": "no healthy_reward on the last step; contact forces observed (klrl's preset leaves them "
    "out), their cost in the reward",
    "reacher": "the distance is that after the step, not before",
    "inverted_pendulum": "no reward on the step that ends the episode",
    "inverted_double_pendulum": "no healthy_reward on the step that ends the episode",
    "humanoid": "no healthy_reward on the last step; the contact cost of v3, which v4 had dropped",
}


@dataclass(frozen=True)
class Source:
    """A published table; ``returns`` is preset -> (return, spread or None)."""

    name: str
    method: str
    address: str
    versions: str  # of the environments
    seeds: int | None  # None: not said
    tuning: str  # "per task" or "one setting"
    measured: str
    spread: str
    frames: int
    approximate: bool  # read off curves, by whom ``measured`` says
    returns: Mapping[str, tuple[float, float | None]]


def read_sources() -> list[Source]:
    """All published tables."""
    sources = []
    with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            cells = {task: row.pop(task).partition(" +- ") for task in NAMES}
            found = {
                task: (float(value), float(spread) if spread else None)
                for task, (value, _, spread) in cells.items()
                if value
            }
            numbers = {"seeds": int(row["seeds"] or 0) or None, "frames": int(row["frames"])}
            approximate = {"approximate": bool(row["approximate"])}
            sources.append(Source(**{**row, **numbers, **approximate, "returns": found}))
    return sources


SOURCES = read_sources()


def best(
    task: str, sources: Iterable[Source] = SOURCES, method: str = "PPO"
) -> tuple[float, Source]:
    """The highest published return and its source, the first of equal ones."""
    those = [source for source in sources if source.method == method and task in source.returns]
    if not those:
        raise ValueError(f"{task}: no published return of {method}")
    source = max(those, key=lambda source: source.returns[task][0])
    return source.returns[task][0], source
