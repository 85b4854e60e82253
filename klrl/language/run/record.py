"""What a language run writes: what a row tells of its rollout, and some responses to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase

from klrl.base.seeds import derived_seed
from klrl.config import SamplerConfig
from klrl.kl.charge import ReferenceKL
from klrl.kl.estimators import masked_mean
from klrl.language.data.batch import (
    ATTENTION,
    LOG_PROBS,
    REF_LOG_PROBS,
    REWARD,
    SCORE,
    on_response,
    prompt_length,
    response_mask,
    set_scores,
)
from klrl.language.data.prompts import Prompt
from klrl.language.run.kl import CHARGED, EXACT
from klrl.language.run.rollout import GOLD, PARTS, sample, texts_of
from klrl.runs.metrics import PART, Row
from klrl.train.callbacks import Callback
from klrl.train.row import Rewards

if TYPE_CHECKING:
    from klrl.train.callbacks import Loop
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.files import read_plain
from klrl.config import LanguageConfig
from klrl.runs.folder import RunFolder
from klrl.runs.rows import read_rows


def rewards_of(batch: TensorDictBase, kl: ReferenceKL | None) -> Rewards:
    """Rewards and responses of a rollout [B], charged as ``kl`` says; None for ``kl=none``."""
    mask = response_mask(batch)
    score, tokens = batch[SCORE].flatten().double(), int(mask.sum())
    own: Row = {
        "reward/episode": float(score.mean()),
        "reward/episode_length": tokens / len(batch),
        "reward/episodes": len(batch),
        "reward/truncated": float(batch["next", "truncated"].double().mean()),
    }
    if _has(batch, GOLD):
        own["reward/gold"] = float(batch[GOLD].double().mean())
    for name, part in _parts(batch).items():
        own[f"{PART}{name}"] = float(part.double().mean())
    raw, shaped = float(score.sum()) / tokens, _mean(batch[REWARD], mask)
    charged = kl is not None and kl.charges_reward
    return Rewards(raw, shaped, _mean(batch[CHARGED], mask) if charged else 0.0, own)


def _mean(value: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean over valid tokens of [B, R, 1], in float64."""
    return float(masked_mean(value.squeeze(-1).double(), mask))


def _parts(batch: TensorDictBase) -> dict[str, torch.Tensor]:
    """The scores of each reward, where there are several."""
    return dict(batch[PARTS].items()) if _has(batch, PARTS) else {}


def _has(batch: TensorDictBase, key: tuple[str, ...]) -> bool:
    return key in batch.keys(include_nested=True)


class ShownSamples(Callback):
    """Some responses: of the first iteration, every ``collector.samples_every``, and at the end.

    ``weights`` says by its samples so far which policy drew a response. Those at the end are drawn
    by the policy that the last checkpoint holds, so that ``klrl verify`` can compute their numbers
    again. They stand as the next iteration's, which a resumed run drops. Nothing is learned from
    them, so they are not scored.

    Args:
        config: the collector group.
    """

    def __init__(self, config: SamplerConfig) -> None:
        self._config = config

    def iterated(self, training: Loop, row: Row, batch: TensorDictBase) -> None:
        """Record them when they are due."""
        every, counters = self._config.samples_every, training.counters
        if not every or (counters.iteration % every and counters.iteration != 1):
            return
        rollout, count = training.parts.collector, self._config.samples_count
        place = {"iteration": counters.iteration, "samples": counters.frames}
        drawn_by = {"weights": counters.frames - len(batch)}
        samples = []
        for index in range(0, len(batch), max(1, len(batch) // count))[:count]:
            prompt, response = rollout.scored_prompts[index], rollout.responses[index]
            entry = _entry(training, batch[index], prompt, response)
            samples.append({**place, **entry, **_scores(batch[index]), **drawn_by})
        training.recorder.samples(samples)

    def finished(self, training: Loop) -> None:
        """Draw and record the last ones."""
        if not self._config.samples_every:
            return
        parts, config, counters = training.parts, training.config, training.counters
        batch, prompts = self._drawn(parts, config, counters.iteration)
        frames, drawn_by = counters.frames + config.frames_per_iteration, counters.frames
        place = {"iteration": counters.iteration + 1, "samples": frames}
        responses, group = texts_of(parts.policy, batch), self._config.group_size
        entries = [
            _entry(training, batch[i * group], prompt, responses[i * group])
            for i, prompt in enumerate(prompts)
        ]
        training.recorder.samples([{**place, **each, "weights": drawn_by} for each in entries])

    def _drawn(
        self, parts: Any, config: Any, iteration: int
    ) -> tuple[TensorDictBase, list[Prompt]]:
        """Groups of responses to the prompts that come next, which are served again; measured."""
        before = parts.prompts.state_dict()
        prompts = parts.prompts.take(self._config.samples_count)
        parts.prompts.load_state_dict(before)
        seed = derived_seed(config.seed, "sample", iteration)
        batch = sample(parts.policy, parts.sampler, prompts, config, seed)
        set_scores(batch, torch.zeros(len(batch), device=batch.device))
        parts.charge_kl(batch)
        return batch, prompts.prompts


class UnreadColumns(Callback):
    """Names, after the first iteration, the columns of the data that nothing reads."""

    def __init__(self) -> None:
        self._told = False

    def iterated(self, training: Loop, row: Row, batch: TensorDictBase) -> None:
        """Tell once."""
        line = None if self._told else training.parts.task.unread()
        self._told = True
        if line is not None:
            training.recorder.say(line)


#: Decimals of a recorded log-prob, of whose digits float32 has no more.
_DECIMALS = 7


def _entry(training: Loop, row: TensorDictBase, prompt: Prompt, response: str) -> dict[str, Any]:
    """What a line of ``samples.jsonl`` says of one row [] of a rollout: texts, ids, log-probs."""
    tokenizer, batch = training.parts.policy.causal.tokenizer, row[None]
    real, width = response_mask(batch)[0], prompt_length(batch)
    prompt_ids = row["tokens", "prompt"][row[ATTENTION][:width]].tolist()
    ids = row["tokens", "response"][real].tolist()
    entry = {
        "prompt": prompt.content,
        "response": response,
        "truncated": bool(row["next", "truncated"].any()),
        "tokens": tokenizer.convert_ids_to_tokens(ids),
        "prompt_ids": prompt_ids,
        "response_ids": ids,
    }
    for name, key in (("log_probs", LOG_PROBS), ("ref_log_probs", REF_LOG_PROBS)):
        if _has(row, key):
            entry[name] = _rounded(on_response(batch, key)[0][real], _DECIMALS)
    if _has(row, EXACT):
        entry["kl"] = _rounded(row[EXACT][real], 6)
    return entry


def _scores(row: TensorDictBase) -> dict[str, Any]:
    """The scores of one row of a rollout."""
    scores: dict[str, Any] = {"reward": float(row[SCORE].sum())}
    if parts := _parts(row):
        scores["rewards"] = {name: float(part.sum()) for name, part in parts.items()}
    if _has(row, GOLD):
        scores["gold"] = float(row[GOLD].sum())
    return scores


def _rounded(values: torch.Tensor, decimals: int) -> list[float]:
    return [round(value, decimals) for value in values.double().tolist()]


#: What is verified -> the entry of a sample.
RECORDED = {"policy": "log_probs", "reference": "ref_log_probs", "KL": "kl"}
#: Which rollout a sample is of: its number, the samples after it, and those before it, which the
#: weights that drew it had learned from.
_PLACE = ("iteration", "samples", "weights")
_IDS = ("prompt_ids", "response_ids")

#: A sample, with the number of its line.
SampleLine = tuple[int, dict[str, Any]]


def recorded_names(config: LanguageConfig) -> list[str]:
    """Which of :data:`RECORDED` every sample of a job has; without a reference the policy alone."""
    return list(RECORDED) if config.has_reference else ["policy"]


@dataclass
class ReadSamples:
    """Samples of a ``samples.jsonl``, what is wrong with it, and what was left out rightly."""

    lines: list[SampleLine] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_samples(folder: Path, config: LanguageConfig, run: str) -> ReadSamples:
    """The samples of a run; a last line without an end is being written, and left out.

    Args:
        folder: the run's.
        config: its settings.
        run: the folder as it was given, for messages.
    """
    file = RunFolder(folder).samples
    if not file.is_file():
        raise ConfigError(f"{run}: has no samples.jsonl; set collector.samples_every >= 1")
    read, reached = ReadSamples(), _reached(folder)
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
