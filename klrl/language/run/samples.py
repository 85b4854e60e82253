"""Checks the prompts, ids, texts, rewards and number of the samples in ``samples.jsonl``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, StrictBool, ValidationError

from klrl.base.errors import ConfigError, RewardError, first_line
from klrl.base.files import ROWS, read_plain
from klrl.base.text import counted
from klrl.config import LanguageConfig
from klrl.language.data.prompts import PromptBatch
from klrl.language.data.rewards import Extras, Reward, response_texts
from klrl.language.data.tasks import Task, WeightedRewards, make_task
from klrl.language.run.load import Policy
from klrl.language.run.record import shown_rows
from klrl.runs.folder import RunFolder
from klrl.runs.metrics import Row
from klrl.train.verify import Record

#: Tolerance for rounding errors: absolute for numbers up to 1, relative for larger numbers.
_ROUNDING = 1e-4

_Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
_Ids = Annotated[list[_Count], Field(min_length=1)]
_Numbers = list[Annotated[float, Field(strict=True, allow_inf_nan=False)]]


class Sample(BaseModel):
    """A line of ``samples.jsonl``; log-probs and KL are nats, one number per response token.

    ``samples`` is the number of samples drawn by the end of this ``iteration``; ``weights`` is the
    number from which the policy had learned before it. Samples after training have no reward.
    """

    line: int
    iteration: Annotated[_Count, Field(gt=0)]
    samples: _Count
    weights: _Count
    prompt_ids: _Ids
    response_ids: _Ids
    log_probs: _Numbers
    ref_log_probs: _Numbers = []
    kl: _Numbers = []
    prompt: object = None
    response: object = None
    tokens: object = None
    truncated: StrictBool | None = None
    reward: float | None = None
    gold: float | None = None

    def __str__(self) -> str:
        return f"samples.jsonl line {self.line}"


#: Verified quantity -> its field in a sample.
RECORDED = {"policy": "log_probs", "reference": "ref_log_probs", "KL": "kl"}


def recorded_names(config: LanguageConfig) -> list[str]:
    """Return the keys of :data:`RECORDED`; only "policy" if the run has no reference."""
    return list(RECORDED) if config.has_reference else ["policy"]


# ------------------------------------------------------------------------------------- reading


def read_samples(
    folder: Path, config: LanguageConfig, run: str, rows: Sequence[Row], record: Record
) -> list[Sample]:
    """Read the samples of a run; add a problem to the record for each invalid line.

    A last line without a newline is still being written, and is left out. ``run`` is the folder's
    name in messages; ``rows`` are the rows of ``metrics.jsonl``.
    """
    files = RunFolder(folder)
    if not files.samples.is_file():
        if config.collector.samples_every:
            record.problems.append("samples.jsonl: is missing")
            return []
        raise ConfigError(f"{run}: has no samples.jsonl; set collector.samples_every >= 1")
    reached = max([files.checkpointed, *(int(row.get("samples") or 0) for row in rows)])
    samples = []
    for number, line in enumerate(read_plain(files.samples, ROWS).split(b"\n")[:-1], 1):
        try:
            samples.append(_parsed(line, number, config, reached))
        except ValueError as error:
            record.problems.append(f"samples.jsonl line {number}: {error}")
    if not (samples or record.problems):
        raise ConfigError(f"{run}: its samples.jsonl has no samples")
    return samples


def _parsed(line: bytes, number: int, config: LanguageConfig, reached: int) -> Sample:
    """Parse a line; raise a ValueError if this run cannot have drawn such a sample."""
    try:
        values = {**json.loads(line), "line": number}
        sample = Sample(**values)
    except ValidationError as error:
        missing = [str(each["loc"][0]) for each in error.errors() if each["type"] == "missing"]
        raise ValueError(
            f"has no {missing[0]}" if 0 < len(missing) < 6 else "is not a valid sample"
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError("is not a valid sample") from error
    names = [RECORDED[name] for name in recorded_names(config)]
    for name in RECORDED.values():
        if (name in values) != (name in names):
            raise ValueError(
                f"has {name}, but the run has no reference" if name in values else f"has no {name}"
            )
        if name in values and len(getattr(sample, name)) != len(sample.response_ids):
            raise ValueError("is not a valid sample")
    size = config.frames_per_iteration  # every rollout has this size
    true = (sample.iteration - 1) * size, sample.iteration * size
    if (sample.weights, sample.samples) != true:
        told = f"has weights={sample.weights}, samples={sample.samples}"
        of = f"iteration {sample.iteration} has weights={true[0]}, samples={true[1]}"
        raise ValueError(f"{told}; {of}")
    if sample.weights > reached:
        raise ValueError(f"has weights={sample.weights}, but the run has only {reached} samples")
    return sample


# ------------------------------------------------------------------------------------ comparing


def check_samples(
    config: LanguageConfig,
    policy: Policy,
    samples: Sequence[Sample],
    rows: Sequence[Row],
    record: Record,
) -> None:
    """Compare samples with recomputed prompts, texts and scores; add problems to the record."""
    task = make_task(config.env, config.seed)
    found: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[sample.iteration].append(sample)
    recorded = {int(row["iteration"]): row for row in rows}
    prompts = _prompts_of(config, policy, task, found)
    for sample in samples:
        record.problems += _differs(config, policy, sample, prompts.get(sample.line))
    for iteration, group in found.items():
        if iteration <= config.iterations and len(group) == config.frames_per_iteration:
            record.problems += _counted(config, group, recorded.get(iteration, {}))
    record.problems += _missing(config, found, recorded)
    record.looked.append("prompts, ids, tokens, truncation and number of the samples")
    learned = [s for s in samples if s.iteration <= config.iterations and s.line in prompts]
    try:
        record.problems += _scores(task, learned, prompts)
        record.looked.append(f"rewards of {counted(len(learned), 'sample')}, scored again")
    except RewardError as error:
        record.unseen.append(f"rewards of samples ({first_line(error)})")


def _prompts_of(
    config: LanguageConfig, policy: Policy, task: Task, found: Mapping[int, Sequence[Sample]]
) -> dict[int, PromptBatch]:
    """Map a sample's line number to its prompt; leave out surplus samples of an iteration."""
    collector, prompts = config.collector, {}
    limit = policy.causal.prompt_limit(collector.max_new_tokens)
    stream = task.stream(policy.causal.tokenizer, limit)
    for iteration, samples in found.items():
        places: Iterable[int] = range(len(samples))  # after training, each prompt has one response
        if iteration <= config.iterations:
            places = [row // collector.group_size for row in shown_rows(config)]
        for sample, place in zip(samples, places, strict=False):
            stream.served = (iteration - 1) * collector.prompts + place
            prompts[sample.line] = stream.take(1)
    return prompts


def _differs(
    config: LanguageConfig, policy: Policy, sample: Sample, prompt: PromptBatch | None
) -> Iterator[str]:
    """Yield a problem for each field that contradicts the task's prompt or the sample's ids."""
    ids, tokenizer, eos = sample.response_ids, policy.causal.tokenizer, policy.special.eos
    true: dict[str, object] = {
        "response": response_texts(tokenizer, [ids], eos)[0],
        "tokens": tokenizer.convert_ids_to_tokens(ids),
        "truncated": ids[-1] not in eos,
    }
    if prompt is not None:
        true["prompt"] = prompt.prompts[0].recorded
        true["prompt_ids"] = prompt.ids[0][prompt.mask[0]].tolist()
    for name, value in true.items():
        if getattr(sample, name) != value:
            source = "the task" if name.startswith("prompt") else "response_ids"
            yield f"{sample}: the field {name} does not match {source}"
    if len(ids) > config.collector.max_new_tokens:
        most = config.collector.max_new_tokens
        yield f"{sample}: has {len(ids)} tokens, more than collector.max_new_tokens={most}"
    if sample.iteration > config.iterations and sample.reward is not None:
        yield f"{sample}: has a reward, but samples after the last iteration are not scored"


def _missing(
    config: LanguageConfig, found: Mapping[int, Sequence[Sample]], recorded: Mapping[int, Row]
) -> Iterator[str]:
    """Yield a problem for each iteration with a wrong number of samples."""
    every, last = config.collector.samples_every, config.iterations
    wanted = {i: len(shown_rows(config)) for i in recorded if i and (i == 1 or i % every == 0)}
    if last in recorded:  # samples drawn after training
        wanted[last + 1] = config.collector.samples_count
    for iteration, count in wanted.items():
        if (has := len(found.get(iteration, ()))) != count:
            had = counted(has, "sample")
            yield f"samples.jsonl: has {had} of iteration {iteration} instead of {count}"


def _counted(config: LanguageConfig, samples: Sequence[Sample], row: Row) -> Iterator[str]:
    """Yield a problem for each metric of a rollout that differs from the mean over its samples."""
    count, tokens = len(samples), sum(len(sample.response_ids) for sample in samples)
    means = {
        "reward/episode": sum(sample.reward or 0.0 for sample in samples) / count,
        "reward/episode_length": tokens / count,
        "reward/truncated": sum(sample.truncated is True for sample in samples) / count,
    }
    if config.has_reference:
        means["kl/ref/exact"] = sum(sum(sample.kl) for sample in samples) / tokens
    for name, mean in means.items():
        if not _equal(row.get(name, mean), mean):
            told = f"{name} is {row[name]:.6g}, but the mean of its samples is {mean:.6g}"
            yield f"metrics.jsonl, iteration {samples[0].iteration}: {told}"


def _scores(
    task: Task, samples: Sequence[Sample], batches: Mapping[int, PromptBatch]
) -> Iterator[str]:
    """Yield a problem for each reward or gold score that differs when computed again.

    Raises a RewardError if ``env.reward`` fails, or if a score depends on the rest of the batch.
    """

    def score(function: WeightedRewards | Reward, some: Sequence[Sample]) -> list[float]:
        extras = Extras(
            [sample.truncated is True for sample in some],
            [sample.prompt_ids for sample in some],
            [sample.response_ids for sample in some],
        )
        prompts = [batches[sample.line].prompts[0] for sample in some]
        return function(prompts, [str(sample.response) for sample in some], extras).tolist()

    for name, function in (("gold", task.gold), ("reward", task.reward)):
        values = score(function, samples) if function and samples else []
        given = [(each, getattr(each, name), v) for each, v in zip(samples, values, strict=False)]
        wrong = [each for each in given if each[1] is None or not _equal(*each[1:])]
        if function and wrong:  # all twice: a score may depend on how often a response occurs
            alone = [score(function, [sample])[0] for sample in samples]
            if not all(map(_equal, alone, score(function, [*samples, *samples]))):
                raise RewardError("env.reward scores a response differently in a different batch")
        for sample, recorded, value in wrong:
            yield f"{sample}: its {name} is {recorded}, but scoring it again gives {value:g}"


def _equal(one: float, other: float) -> bool:
    """Compare up to rounding; NaN equals nothing."""
    return abs(one - other) <= _ROUNDING * max(1.0, abs(other))
