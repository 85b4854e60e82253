"""The task of a language run: from the ``env`` group to its prompts and rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from klrl.base.seeds import derived_seed
from klrl.config import LANGUAGE, LanguageEnvConfig, SortDigitsConfig, TextConfig, factory
from klrl.language.prompts import (
    Prompt,
    PromptStream,
    ShuffledEpochs,
    Tokenizer,
    encode,
    read_jsonl,
)
from klrl.language.rewards import Reward, WeightedRewards
from klrl.language.sort_digits import SortDigits


@dataclass(frozen=True)
class Task:
    """Prompts by number, and their rewards.

    Attributes:
        train: prompt number i of training.
        evaluate: prompt number i of the evaluation split.
        reward: what the policy learns from.
        gold: the intended score, if ``reward`` is another function; measured, never learned from.
        checked: prompts rendered before anything runs: a file's, or one of the greatest length.
        evaluations: number of prompts to evaluate on; None for endless.
    """

    train: Callable[[int], Prompt]
    evaluate: Callable[[int], Prompt]
    reward: WeightedRewards
    gold: Reward | None = None
    checked: Sequence[Prompt] = ()
    evaluations: int | None = None

    def stream(self, tokenizer: Tokenizer, limit: int | None, split: str = "train") -> PromptStream:
        """Encoded prompts of a split, from its start."""
        prompt_at = self.train if split == "train" else self.evaluate
        return PromptStream(prompt_at, tokenizer, limit)

    @property
    def chat(self) -> bool:
        """Whether some prompt is a conversation."""
        return any(not isinstance(p.content, str) for p in self.checked)

    def check(self, tokenizer: Tokenizer, limit: int | None) -> None:
        """Render the prompts of ``checked``, and load reward models, before anything runs.

        Raises:
            ConfigError: a prompt cannot be rendered or leaves no room for its response; a model
                cannot be read.
        """
        self.reward.load()
        for prompt in self.checked:
            encode(prompt, tokenizer, limit)


def make_task(config: LanguageEnvConfig, seed: int) -> Task:
    """The task of the chosen ``env``; ``seed`` fixes the order of its prompts.

    Raises:
        ConfigError: the data or the reward function cannot be read.
    """
    return factory("env", config, LANGUAGE)(config, seed)


def _reward(config: LanguageEnvConfig) -> WeightedRewards:
    return WeightedRewards(config.rewards, config.reward_weights, config.reward_timeout)


def sort_digits(config: SortDigitsConfig, seed: int) -> Task:
    """``env=sort_digits``; arguments as :func:`make_task`."""
    problems = (config.shortest, config.longest, config.shots)
    return Task(
        train=SortDigits(*problems, seed=derived_seed(seed, "prompts")),
        # The same problems for every run.
        evaluate=SortDigits(*problems, seed=0, split="eval"),
        reward=_reward(config),
        gold=None if config.rewards == ["exact"] else Reward("exact", None),
        checked=[SortDigits(config.longest, config.longest, config.shots)(0)],
    )


def text(config: TextConfig, seed: int) -> Task:
    """``env=text``; arguments as :func:`make_task`."""
    reward = _reward(config)
    prompts = read_jsonl(config.data)
    held_out = prompts
    if config.eval_data is not None:
        held_out = read_jsonl(config.eval_data, "env.eval_data")
    return Task(
        train=ShuffledEpochs(prompts, derived_seed(seed, "prompts")),
        evaluate=lambda index: held_out[index % len(held_out)],
        reward=reward,
        checked=prompts if held_out is prompts else [*prompts, *held_out],
        evaluations=len(held_out),
    )
