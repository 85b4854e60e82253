"""Draws, renders and pads prompts.

JSONL file or generator -> :class:`Prompt` by index -> :class:`PromptStream` -> tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor

from klrl.base.errors import ConfigError, first_line

#: A tokenizer of ``transformers``; importing its class costs seconds.
Tokenizer: TypeAlias = Any
#: One turn of a conversation: {"role": ..., "content": ...}.
Message: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class Prompt:
    """The prompt of a response.

    Args:
        content: plain text, or a conversation whose last turn is not the assistant's.
        row: all fields of its line; a reward function gets them.
        origin: its source, for messages.
    """

    content: str | Sequence[Message]
    row: Mapping[str, Any] = field(default_factory=dict)
    origin: str = "prompt"


@dataclass(frozen=True)
class PromptBatch:
    """N prompts, left-padded.

    Args:
        ids: [N, P] int64.
        mask: [N, P] bool, True at real tokens; by position, so that a pad may equal EOS.
        prompts: the N prompts.
    """

    ids: Tensor
    mask: Tensor
    prompts: list[Prompt]

    def repeat(self, group: int) -> PromptBatch:
        """[N * group, P]: each prompt ``group`` times in a row."""
        return PromptBatch(
            self.ids.repeat_interleave(group, 0),
            self.mask.repeat_interleave(group, 0),
            [prompt for prompt in self.prompts for _ in range(group)],
        )


# ------------------------------------------------------------------------------------ rendering


def encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a prompt: a conversation through the chat template, ready for an answer.

    A plain text gets the special tokens that the tokenizer puts around texts, except a closing EOS,
    which no response could follow.

    Raises:
        ConfigError: no chat template, one that refuses the conversation, or no token at all.
    """
    if isinstance(prompt.content, str):
        ids = list(tokenizer(prompt.content)["input_ids"])
        bare = tokenizer(prompt.content, add_special_tokens=False)["input_ids"]
        if ids[-1:] == [tokenizer.eos_token_id] and ids[-1:] != bare[-1:]:
            ids = ids[:-1]
    else:
        ids = _render(prompt, tokenizer)
    if not ids:
        raise ConfigError(f"{prompt.origin}: holds no token; a response needs one to follow")
    return ids


def _render(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    try:
        rendered = tokenizer.apply_chat_template(
            list(prompt.content), add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{prompt.origin}: the chat template refuses it ({first_line(error)}); fix the "
            "conversation or the tokenizer's chat_template"
        ) from error
    return list(rendered["input_ids"])


def check_prompt_length(ids: Sequence[int], prompt: Prompt, limit: int | None) -> None:
    """Refuse a prompt that leaves no room for its response.

    Args:
        ids: its tokens.
        prompt: for the message.
        limit: most tokens, the model's context less the longest response; None for no limit.

    Raises:
        ConfigError: it has more.
    """
    if limit is not None and len(ids) > limit:
        raise ConfigError(
            f"{prompt.origin}: {len(ids)} tokens, and the model's context less the longest "
            f"response leaves {limit}; shorten the prompt or the response"
        )


def check_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, limit: int | None) -> int:
    """Render a whole data set before anything runs.

    Returns:
        The tokens of its longest prompt.

    Raises:
        ConfigError: one prompt cannot be rendered or is longer than ``limit``.
    """
    longest = 0
    for prompt in prompts:
        ids = encode(prompt, tokenizer)
        check_prompt_length(ids, prompt, limit)
        longest = max(longest, len(ids))
    return longest


def left_pad(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Stack N rows of ids, padded on the left.

    Returns:
        ids [N, P] int64 and mask [N, P] bool, P the longest row.
    """
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        start = width - len(row)
        ids[index, start:] = torch.tensor(row, dtype=torch.int64)
        mask[index, start:] = True
    return ids, mask


# -------------------------------------------------------------------------------------- drawing


class ShuffledEpochs:
    """Prompt number i of endless epochs over a data set, each epoch in a new order.

    Args:
        prompts: the data set.
        seed: fixes the order, together with the epoch's number.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts, self._seed = prompts, seed
        self._epoch, self._order = -1, np.arange(0)

    def __call__(self, index: int) -> Prompt:
        """The prompt of this number; numbers may come in any order."""
        epoch, position = divmod(index, len(self._prompts))
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            self._epoch, self._order = epoch, rng.permutation(len(self._prompts))
        return self._prompts[int(self._order[position])]


class PromptStream:
    """Batches of encoded prompts. Its state is one counter.

    Args:
        prompt_at: prompt number i: :class:`ShuffledEpochs` or a generator like ``SortDigits``.
        tokenizer: of the policy, with a pad token.
        limit: most tokens of a prompt; None for no limit.
    """

    def __init__(
        self, prompt_at: Callable[[int], Prompt], tokenizer: Tokenizer, limit: int | None
    ) -> None:
        self._prompt_at, self._tokenizer, self._limit = prompt_at, tokenizer, limit
        self.served = 0

    def take(self, count: int) -> PromptBatch:
        """The next ``count`` prompts.

        Raises:
            ConfigError: one cannot be rendered or is too long.
        """
        prompts = [self._prompt_at(self.served + i) for i in range(count)]
        rows = [self._encoded(prompt) for prompt in prompts]
        self.served += count
        return PromptBatch(*left_pad(rows, self._tokenizer.pad_token_id), prompts)

    def _encoded(self, prompt: Prompt) -> list[int]:
        ids = encode(prompt, self._tokenizer)
        check_prompt_length(ids, prompt, self._limit)
        return ids

    def state_dict(self) -> dict[str, int]:
        """The counter."""
        return {"served": self.served}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the prompts that were served."""
        self.served = int(state["served"])
