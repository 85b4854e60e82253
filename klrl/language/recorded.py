"""The samples of a run as ``samples.jsonl`` records them, each line checked before it is believed.

What a line lacks, or says wrongly of itself, must not spare its numbers from being compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from klrl.base.errors import ConfigError
from klrl.base.files import read_plain
from klrl.config import LanguageConfig
from klrl.runs.folder import RunFolder
from klrl.runs.rows import read_rows

#: What is verified -> the entry of a sample.
RECORDED = {"policy": "log_probs", "reference": "ref_log_probs", "KL": "kl"}
#: Which rollout a sample is of: its number, the samples after it, and those before it, which the
#: weights that drew it had learned from.
_PLACE = ("iteration", "samples", "weights")
_IDS = ("prompt_ids", "response_ids")

#: A sample, with the number of its line.
Line = tuple[int, dict[str, Any]]


def recorded_names(config: LanguageConfig) -> list[str]:
    """Which of :data:`RECORDED` every sample of a job has; without a reference the policy alone."""
    return list(RECORDED) if config.has_reference else ["policy"]


@dataclass
class Samples:
    """Samples of a ``samples.jsonl``, what is wrong with it, and what was left out rightly."""

    lines: list[Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_samples(folder: Path, config: LanguageConfig, run: str) -> Samples:
    """The samples of a run; a last line without an end is being written, and left out.

    Args:
        folder: the run's.
        config: its settings.
        run: the folder as it was given, for messages.
    """
    file = RunFolder(folder).samples
    if not file.is_file():
        raise ConfigError(f"{run}: has no samples.jsonl; set collector.samples_every >= 1")
    read, reached = Samples(), _reached(folder)
    for number, line in enumerate(read_plain(file).split(b"\n")[:-1], 1):
        sample = _parsed(line)
        if fault := _fault(sample, config, reached):
            read.problems.append(f"samples.jsonl line {number}: {fault}")
        else:
            read.lines.append((number, sample))
    if not read.lines and not read.problems:
        raise ConfigError(f"{run}: its samples.jsonl holds no sample")
    return read


def _reached(folder: Path) -> int:
    """How many samples the run has seen, by its rows and by the names of its checkpoints."""
    metrics = RunFolder(folder).metrics
    rows = read_rows(metrics, say=lambda line: None) if metrics.is_file() else []
    told = [str(row.get("samples")) for row in rows]
    told += [path.name.removeprefix("frames-") for path in folder.glob("checkpoints/*/frames-*")]
    return max((int(each) for each in told if each.isdecimal()), default=0)


def _parsed(line: bytes) -> dict[str, Any]:
    """The object of a line; empty where it holds something else."""
    try:
        sample = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return sample if isinstance(sample, dict) else {}


def _fault(sample: Mapping[str, Any], config: LanguageConfig, reached: int) -> str | None:
    """What is wrong with a line; None for a sample that this run may have drawn."""
    keys = [RECORDED[name] for name in recorded_names(config)]
    wanted = [*_IDS, *_PLACE, *keys]
    missing = [key for key in wanted if key not in sample]
    if len(missing) == len(wanted):
        return "is no sample"
    if missing:
        return f"has no {missing[0]}"
    if superfluous := [key for key in RECORDED.values() if key in sample and key not in keys]:
        return f"has {superfluous[0]}, and the run has no reference"
    if not _is_sample(sample, keys):
        return "is no sample"
    return _misplaced(sample, config.frames_per_iteration, reached)


def _misplaced(sample: Mapping[str, Any], rollout: int, reached: int) -> str | None:
    """Whether a sample is of another rollout than it says, or of none: rollouts are alike large."""
    iteration, after, before = (sample[key] for key in _PLACE)
    true = (iteration - 1) * rollout, iteration * rollout
    if (before, after) != true:
        return (
            f"weights={before}, samples={after} are not those of iteration {iteration}: "
            f"{true[0]}, {true[1]}"
        )
    return f"weights={before}: the run has {reached} samples" if before > reached else None


def _is_sample(sample: Mapping[str, Any], keys: Sequence[str]) -> bool:
    """Whether a line has ids, and as many numbers as there are tokens in its response."""
    prompt, response = (sample[key] for key in _IDS)
    if not (isinstance(prompt, list) and isinstance(response, list) and prompt and response):
        return False
    numbers = [sample[key] for key in keys]
    return (
        all(map(_is_count, (*prompt, *response, *(sample[key] for key in _PLACE))))
        and sample["iteration"] > 0
        and all(isinstance(each, list) and len(each) == len(response) for each in numbers)
        and all(_is_number(number) for each in numbers for number in each)
    )


def _is_number(value: Any) -> bool:
    """Whether it is one that can be compared; NaN can, and is off."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _is_count(value: Any) -> bool:
    """Whether it is a whole number that a tensor can hold; true and false are none."""
    return type(value) is int and 0 <= value < 2**63
