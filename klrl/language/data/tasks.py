"""Makes a language run's prompts and rewards from the settings of the ``env`` group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from klrl.base.errors import ConfigError, RewardError
from klrl.base.files import expanded
from klrl.base.seeds import derived_seed
from klrl.config import (
    LANGUAGE,
    InstructionsConfig,
    LanguageEnvConfig,
    SortDigitsConfig,
    TextConfig,
    factory,
)
from klrl.language.data.files import SPLIT, hold_out, read_prompts, rows_digest
from klrl.language.data.instructions import Instructions
from klrl.language.data.prompts import (
    Prompt,
    PromptBatch,
    PromptStream,
    ShuffledEpochs,
    Tokenizer,
    encode,
    variables_of,
)
from klrl.language.data.rewards import Extras, Reward
from klrl.language.data.sort_digits import SortDigits


class WeightedRewards:
    """The sum of weight * reward over the functions of ``env.reward`` that score a sample.

    Of several functions, each returns None for a sample that is not its own.
    """

    def __init__(
        self, names: Sequence[str], weights: Sequence[float] | None, timeout: float | None
    ) -> None:
        rewards = [Reward(name, timeout, abstains=len(names) > 1) for name in names]
        self._rewards = dict(zip(labels(names), rewards, strict=True))
        self._weights = [1.0] * len(names) if weights is None else list(weights)

    def prepare(self, chat: bool = False) -> None:
        """Call :meth:`Reward.prepare` of each function."""
        for reward in self._rewards.values():
            reward.prepare(chat)

    def parts(
        self, prompts: Sequence[Prompt], responses: Sequence[str], extras: Extras | None = None
    ) -> dict[str, Tensor]:
        """Return label -> unweighted scores [B] of each function; NaN if it returned None."""
        parts = {name: reward(prompts, responses, extras) for name, reward in self._rewards.items()}
        for index in torch.stack([*parts.values()]).isnan().all(0).nonzero().flatten().tolist():
            sample = next(iter(self._rewards.values())).sample(index, prompts, responses)
            raise RewardError(f"{sample}: each function of env.reward returned None; score it")
        return parts

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the scores [B]: the weighted sum of :meth:`parts`."""
        weighted = zip(self._weights, parts.values(), strict=True)
        of_each = torch.stack([weight * part for weight, part in weighted])
        scores = of_each.masked_fill(of_each.isnan(), 0.0).sum(0)
        if not scores.isfinite().all():
            index = int((~scores.isfinite()).nonzero()[0, 0])
            raise RewardError(
                f"env.reward_weights={self._weights}: the weighted sum of sample {index} of "
                f"{len(scores)} is {float(scores[index]):g}; give smaller weights"
            )
        return scores

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], extras: Extras | None = None
    ) -> Tensor:
        """Call :meth:`parts`, and return the weighted sum [B]."""
        return self.total(self.parts(prompts, responses, extras))


def labels(names: Sequence[str]) -> list[str]:
    """Return a label per reward: its function's or folder's name; the full name if two share it.

    If two of these labels are equal, all labels are full names.
    """
    short = [Path(name.partition(":")[2] or name).name for name in names]
    full, count = [name.replace(":", ".") for name in names], Counter(short)
    told = [s if count[s] == 1 else f for s, f in zip(short, full, strict=True)]
    return told if len(set(told)) == len(told) else full


@dataclass(frozen=True)
class Task:
    """Training and evaluation prompts, by number, and their rewards.

    Attributes:
        train: i -> training prompt number i.
        evaluate: i -> prompt number i of the evaluation split.
        reward: the reward that the policy learns from.
        gold: the intended score, which is only measured; None if it is the reward or unknown.
        checked: prompts to encode before the run, to find errors: all of a file, or generated ones.
        evaluations: number of evaluation prompts; None if they are endless.
        template: arguments of the chat template.
        read: "setting=value" of a data set -> the prompts read from it.
        notes: lines to print when a run begins.
    """

    train: Callable[[int], Prompt]
    evaluate: Callable[[int], Prompt]
    reward: WeightedRewards
    gold: Reward | None = None
    checked: Sequence[Prompt] = ()
    evaluations: int | None = None
    template: Mapping[str, object] = field(default_factory=dict)
    read: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def stream(self, tokenizer: Tokenizer, limit: int | None, split: str = "train") -> PromptStream:
        """Return the stream of a split's encoded prompts, from its start."""
        prompt_at = self.train if split == "train" else self.evaluate
        return PromptStream(prompt_at, tokenizer, limit, self.template, self._digests)

    def trial_batch(
        self, tokenizer: Tokenizer, limit: int | None, count: int, split: str = "train"
    ) -> PromptBatch:
        """Encode the shortest and longest prompt of ``checked``, and the first prompts of a split.

        The ``count`` >= 2 prompts have three more columns on the left, so that each has padding.
        """
        prompt_at = self.train if split == "train" else self.evaluate
        by_length = sorted(self.checked, key=lambda prompt: len(str(prompt.content)))
        extremes = [*by_length[:1], *by_length[-1:]]
        prompts = [*extremes, *map(prompt_at, range(count - len(extremes)))]
        few = PromptStream(prompts.__getitem__, tokenizer, limit, self.template).take(count)
        ids, mask = (torch.nn.functional.pad(each, (3, 0)) for each in (few.ids, few.mask))
        return PromptBatch(ids, mask, few.prompts)

    @cached_property
    def _digests(self) -> Mapping[str, str]:
        return {named: rows_digest(prompts) for named, prompts in self.read.items()}

    @property
    def chat(self) -> bool:
        """Whether any prompt of ``checked`` is a conversation."""
        return any(not isinstance(p.content, str) for p in self.checked)

    def check(self, tokenizer: Tokenizer, limit: int | None) -> None:
        """Load reward models; refuse prompts or template arguments that cannot be used."""
        self.reward.prepare(self.chat)
        if self.template and not self.chat:
            raise ConfigError(
                "env.template_kwargs: no prompt is a conversation, so no chat template is used; "
                "drop it, or give messages"
            )
        encode(self.checked, tokenizer, limit, self.template)
        used = variables_of(str(tokenizer.chat_template or "")) if self.chat else set()
        for name in sorted(set(self.template) - used):
            raise ConfigError(
                f"env.template_kwargs.{name}: the chat template does not use {name}; drop it"
            )


def make_task(config: LanguageEnvConfig, seed: int) -> Task:
    """Make the task of the chosen ``env``; ``seed`` fixes the order of its prompts."""
    return factory("env", config, LANGUAGE)(config, seed)


def _reward(config: LanguageEnvConfig) -> WeightedRewards:
    return WeightedRewards(config.rewards, config.reward_weights, config.reward_timeout)


def sort_digits(config: SortDigitsConfig, seed: int) -> Task:
    """``env=sort_digits``; see :func:`make_task`."""
    problems = (config.shortest, config.longest, config.shots)
    return Task(
        train=SortDigits(*problems, seed=derived_seed(seed, "prompts")),
        # seed=0: the same problems for every run.
        evaluate=SortDigits(*problems, seed=0, split="eval"),
        reward=_reward(config),
        gold=None if config.rewards == ["exact"] else Reward("exact", None),
        checked=[SortDigits(config.longest, config.longest, config.shots)(0)],
    )


def instructions(config: InstructionsConfig, seed: int) -> Task:
    """``env=instructions``; see :func:`make_task`."""
    return Task(
        train=Instructions(seed=derived_seed(seed, "prompts")),
        evaluate=Instructions(seed=0, split="eval"),  # the same for every run
        reward=_reward(config),
        gold=None if config.rewards == ["followed"] else Reward("followed", None),
        checked=[Instructions(split=split)(0) for split in ("train", "eval")],
    )


def text(config: TextConfig, seed: int) -> Task:
    """``env=text``; see :func:`make_task`."""
    reward = _reward(config)
    set_by = "env.split" if config.split != SPLIT else None
    prompts: Sequence[Prompt] = read_prompts(
        config.data, split=config.split, set_by=set_by, key=config.prompt_key
    )
    train, held_out, notes = _splits(config, prompts)
    read = {f"env.data={config.data}": prompts}
    others = (("eval_data", config.eval_data), ("eval_split", config.eval_split))
    if name := next((f"env.{name}={value}" for name, value in others if value is not None), None):
        read[name] = held_out
    checked = train if held_out is train else [*train, *held_out]
    if "exact" in config.rewards:
        for each in checked:
            if not isinstance(each.row.get("answer"), str):
                raise ConfigError(
                    f"env.reward=exact: {each.origin} has no answer; add a field answer with a "
                    "text, or choose another reward"
                )
    return Task(
        train=ShuffledEpochs(train, derived_seed(seed, "prompts")),
        evaluate=lambda index: held_out[index % len(held_out)],
        reward=reward,
        checked=checked,
        evaluations=len(held_out),
        template=config.template_kwargs,
        read=read,
        notes=notes,
    )


def _splits(
    config: TextConfig, prompts: Sequence[Prompt]
) -> tuple[Sequence[Prompt], Sequence[Prompt], Sequence[str]]:
    """Return training prompts, evaluation prompts, and any lines to print about the evaluation."""
    path, split = config.eval_data, config.eval_split
    if path is not None or split is not None:
        where = (config.data, "env.data") if path is None else (path, "env.eval_data")
        set_by = None if split is None else "env.eval_split"
        split = split or config.split
        return prompts, read_prompts(*where, split, set_by=set_by, key=config.prompt_key), ()
    if not config.eval_share:
        note = "evaluations use the training prompts; env.eval_share=0.1 would hold out a tenth"
        return prompts, prompts, [f"env.eval_data=null: {note}"]
    train, held_out = hold_out(prompts, config.eval_share)
    of = f"{len(held_out)} of {len(prompts)} prompts are held out for evaluation"
    return train, held_out, [f"env.eval_share={config.eval_share:g}: {of}"]


def evaluated_on(config: LanguageEnvConfig) -> tuple[object, ...]:
    """Return the settings that choose evaluation prompts: file, split, share; () if endless."""
    if not isinstance(config, TextConfig):
        return ()
    path, split = config.eval_data, config.eval_split
    share = config.eval_share if path is None and split is None else 0.0
    return expanded(path or config.data).resolve(), split or config.split, share
