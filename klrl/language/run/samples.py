"""Are a language run's samples those of its task: prompts, ids, texts, rewards, how many?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from klrl.base.errors import RewardError, first_line
from klrl.config import LanguageConfig
from klrl.language.data.prompts import PromptStream
from klrl.language.data.rewards import Drawn
from klrl.language.data.tasks import Task
from klrl.language.run.policy import Policy
from klrl.language.run.record import SampleLine
from klrl.runs.metrics import Row
from klrl.train.verify import Record

#: Recorded numbers have seven decimals, and a mean is a sum of float32.
_ROUNDING = 1e-4


def check_samples(
    config: LanguageConfig,
    policy: Policy,
    task: Task,
    limit: int | None,
    lines: Sequence[SampleLine],
    rows: Sequence[Row],
    record: Record,
) -> None:
    """Compare samples with prompts, texts and scores made anew; problems go into the record.

    Args:
        config: the job.
        policy: its tokenizer and its marks.
        task: asks and scores.
        limit: most tokens of a prompt.
        lines: of ``samples.jsonl``.
        rows: of ``metrics.jsonl``.
        record: gets what was found.
    """
    by_iteration: dict[int, list[SampleLine]] = defaultdict(list)
    for line in lines:
        by_iteration[line[1]["iteration"]].append(line)
    stream = task.stream(policy.causal.tokenizer, limit)
    told = {int(row["iteration"]): row for row in rows}
    for iteration, samples in by_iteration.items():
        learned = iteration <= config.iterations and iteration in told
        record.problems += _prompts(config, stream, iteration, samples, learned)
        record.problems += _ids(config, policy, samples)
        if learned:
            record.problems += _counted(config, iteration, samples, told[iteration])
    record.problems += _missing(config, by_iteration, told)
    record.looked.append("prompts, ids, tokens, truncation and number of the samples")
    scored = [(n, sample) for n, sample in lines if "reward" in sample]
    try:
        record.problems += _scores(task, stream, config, by_iteration, scored)
        record.looked.append(f"rewards of {len(scored)} samples, scored again")
    except RewardError as error:
        record.unseen.append(f"rewards of samples ({first_line(error)})")


def _places(config: LanguageConfig, iteration: int, count: int, learned: bool) -> list[int]:
    """The numbers of the prompts of an iteration's samples."""
    collector, first = config.collector, (iteration - 1) * config.collector.prompts
    if not learned:  # drawn at the end, one for each prompt that comes next
        return [first + i for i in range(count)]
    size = config.frames_per_iteration
    rows = range(0, size, max(1, size // collector.samples_count))[:count]
    return [first + row // collector.group_size for row in rows]


def _asked(stream: PromptStream, number: int) -> Any:
    stream.served = number
    return stream.take(1)


def _prompts(
    config: LanguageConfig,
    stream: PromptStream,
    iteration: int,
    samples: Sequence[SampleLine],
    learned: bool,
) -> Iterator[str]:
    numbers = _places(config, iteration, len(samples), learned)
    for (line, sample), number in zip(samples, numbers, strict=False):
        asked = _asked(stream, number)
        content = asked.prompts[0].content
        content = content if isinstance(content, str) else [dict(turn) for turn in content]
        if sample.get("prompt") != content:
            yield f"samples.jsonl line {line}: its prompt is not number {number} of the task"
        elif sample["prompt_ids"] != asked.ids[0][asked.mask[0]].tolist():
            yield f"samples.jsonl line {line}: its prompt_ids are not those of its prompt"


def _ids(config: LanguageConfig, policy: Policy, samples: Sequence[SampleLine]) -> Iterator[str]:
    """What follows from the ids of a response: its tokens, and whether it was cut off."""
    convert, ends = policy.causal.tokenizer.convert_ids_to_tokens, set(policy.special.eos)
    for line, sample in samples:
        ids = sample["response_ids"]
        if sample.get("tokens") != convert(ids):
            yield f"samples.jsonl line {line}: its tokens are not those of its ids"
        if sample.get("truncated") is not (ids[-1] not in ends):
            yield f"samples.jsonl line {line}: its truncated is not what its last token says"
        if len(ids) > config.collector.max_new_tokens:
            yield f"samples.jsonl line {line}: it is longer than collector.max_new_tokens"


def _missing(
    config: LanguageConfig, found: Mapping[int, Sequence[SampleLine]], told: Mapping[int, Row]
) -> Iterator[str]:
    """As many samples as each iteration that is due has."""
    every, size = config.collector.samples_every, config.frames_per_iteration
    due = range(0, size, max(1, size // config.collector.samples_count))
    count = len(due[: config.collector.samples_count])
    wanted = {i: count for i in told if i and (i == 1 or i % every == 0)}
    if config.iterations in told:  # drawn at the end, one for each prompt
        wanted[config.iterations + 1] = config.collector.samples_count
    for iteration, count in wanted.items():
        if (has := len(found.get(iteration, ()))) != count:
            yield f"samples.jsonl: has {has} samples of iteration {iteration}, and had {count}"


def _counted(
    config: LanguageConfig, iteration: int, samples: Sequence[SampleLine], row: Row
) -> Iterator[str]:
    """The means of a row, where all of its samples are kept."""
    if len(samples) != config.frames_per_iteration:
        return
    each = [sample for _, sample in samples]
    tokens = sum(len(sample["response_ids"]) for sample in each)
    means = {
        "reward/episode": sum(sample["reward"] for sample in each) / len(each),
        "reward/episode_length": tokens / len(each),
        "reward/truncated": sum(sample["truncated"] for sample in each) / len(each),
    }
    if config.has_reference:
        means["kl/ref/exact"] = sum(sum(sample["kl"]) for sample in each) / tokens
    for name, mean in means.items():
        if not abs(row.get(name, mean) - mean) <= _ROUNDING * max(1.0, abs(mean)):
            yield (
                f"metrics.jsonl, iteration {iteration}: {name} is {row[name]:.6g}, and that of its "
                f"samples {mean:.6g}"
            )


def _scores(
    task: Task,
    stream: PromptStream,
    config: LanguageConfig,
    by_iteration: Mapping[int, Sequence[SampleLine]],
    scored: Sequence[SampleLine],
) -> list[str]:
    """Rewards, their parts and gold scores, by the task's own functions."""
    if not scored:
        return []
    prompts = {}
    for iteration, samples in by_iteration.items():
        numbers = _places(config, iteration, len(samples), "reward" in samples[0][1])
        for (line, _), number in zip(samples, numbers, strict=False):
            prompts[line] = _asked(stream, number).prompts[0]
    each = [sample for _, sample in scored]
    cut, asked, ids = (
        [sample[name] for sample in each] for name in ("truncated", "prompt_ids", "response_ids")
    )
    drawn = Drawn(cut, asked, ids)
    given = ([prompts[line] for line, _ in scored], [s["response"] for s in each], drawn)
    parts = task.reward.parts(*given)
    table = {"reward": task.reward.total(parts).tolist()}
    if task.gold is not None:
        table["gold"] = task.gold(*given).tolist()
    problems = []
    for name, values in table.items():
        for (line, sample), value in zip(scored, values, strict=True):
            if not abs(sample.get(name, float("nan")) - value) <= _ROUNDING * max(1.0, abs(value)):
                problems.append(
                    f"samples.jsonl line {line}: its {name} is {value:g}, and {sample.get(name)} "
                    "is recorded"
                )
    return problems
