"""Converts the conversations, texts or token ids of a TensorDict to the tokens to score.

Every sequence has three masks over positions:
- ``attention``: real tokens;
- ``scored``: tokens whose log-prob is kept; other tokens get 0;
- ``charged``: tokens that the policy produced in this step; earlier turns of a conversation were
  charged in their own steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from klrl.envs.llm.transforms.kl.rows import either, is_ragged, lengths, read_value, to_rows
from klrl.kl.policies import Key

if TYPE_CHECKING:
    from torchrl.data.llm import History

#: Texts -> ``input_ids``: a tokenizer of ``transformers``.
Tokenizer: TypeAlias = Callable[..., Mapping[str, Sequence[Sequence[int]]]]
ATTENTION_KEY = ("masks", "all_attention_mask")
ASSISTANT_KEY = ("masks", "all_assistant_mask")
MARKS_ASSISTANT = re.compile(r"{%-?\s*generation")
#: Default arguments of ``apply_chat_template``, which return token ids and the assistant mask.
TEMPLATE_DEFAULTS = {
    "return_assistant_tokens_mask": True,
    "tokenize": True,
    "return_dict": True,
    "padding": False,
    "add_generation_prompt": False,
}


@dataclass(frozen=True)
class Encoded:
    """B sequences. Each list has B rows [T_i]; ``dense``: whether the input was a tensor [B, T]."""

    ids: list[Tensor]
    attention: list[Tensor]
    scored: list[Tensor]
    charged: list[Tensor]
    dense: bool


def check_template_kwargs(kwargs: Mapping[str, object] | None) -> dict[str, object]:
    """Merge the chat template's default arguments with the user's; refuse invalid arguments."""
    merged = {**TEMPLATE_DEFAULTS, **(kwargs or {})}
    for name in ("return_assistant_tokens_mask", "tokenize", "return_dict"):
        if not merged[name]:
            raise ValueError(f"tokenizer_kwargs[{name!r}]={merged[name]}: must be True")
    if merged.get("return_tensors", "pt") != "pt":
        raise ValueError(f"tokenizer_kwargs['return_tensors']={merged['return_tensors']}: use 'pt'")
    return merged


def template_of(model: object, tokenizer: object) -> dict[str, object]:
    """Return the argument that selects the chat template: the wrapper's, else the tokenizer's.

    If the tokenizer's template cannot mark the assistant's tokens, the result is empty. TorchRL
    then uses a template of its own if the tokenizer's name contains "qwen", "llama", "falcon" or
    "deepseek".
    """
    for name in ("chat_template", "chat_template_name"):
        if getattr(model, name, None) is not None:
            return {name: getattr(model, name)}
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str) and MARKS_ASSISTANT.search(template):
        return {"chat_template": template}
    return {}


def encode_history(
    history: History,
    prompt: History | None,
    tokenizer: object,
    template: Mapping[str, object],
    assistant_only: bool,
) -> Encoded:
    """Render B conversations, ``History`` [B, turns], with the chat template.

    ``prompt``: the earlier turns, which are not charged. With ``assistant_only``, only assistant
    tokens are scored and charged.
    """
    ids, assistant = _render(history, tokenizer, template)
    real = [torch.ones_like(row, dtype=torch.bool) for row in ids]
    if not assistant_only:
        prompts = None
        if prompt is not None:
            prompts, _ = _render(prompt, tokenizer, {**template, "add_generation_prompt": True})
        return Encoded(ids, real, real, _behind(prompts, ids, real), False)
    empty = [index for index, row in enumerate(assistant) if not row.any()]
    if empty:
        raise ValueError(
            f"samples {empty} have no assistant token: add an assistant message, mark it in the "
            "chat template with {% generation %}, or set assistant_only=False"
        )
    charged = assistant
    if prompt is not None:
        # Skip as many assistant tokens as the earlier turns have. To compare ids is not possible: a
        # template may render a turn differently if further turns follow.
        earlier = [int(row.sum()) for row in _render(prompt, tokenizer, template)[1]]
        charged = [row & (row.cumsum(0) > n) for row, n in zip(assistant, earlier, strict=True)]
    return Encoded(ids, real, assistant, charged, False)


def _render(
    history: History, tokenizer: object, template: Mapping[str, object]
) -> tuple[list[Tensor], list[Tensor]]:
    rendered = history.apply_chat_template(tokenizer=tokenizer, **template)
    names = ("input_ids", "assistant_masks", "attention_mask")
    rows = [to_rows(rendered.get(name, as_list=True)) for name in names]
    ids, assistant = (
        [row[real.bool()] for row, real in zip(part, rows[2], strict=True)] for part in rows[:2]
    )
    return ids, [row.bool() for row in assistant]


def encode_text(
    texts: list[str], prompts: list[str] | None, tokenizer: Tokenizer, kwargs: Mapping[str, object]
) -> Encoded:
    """Tokenise B texts; charge the tokens after each prompt, or all tokens without prompts."""
    kept = {key: value for key, value in kwargs.items() if key not in _PADDING_KWARGS}

    def encode(strings: list[str]) -> list[Tensor]:
        return [torch.tensor(row) for row in tokenizer(list(strings), **kept)["input_ids"]]

    ids = encode(texts)
    real = [torch.ones_like(row, dtype=torch.bool) for row in ids]
    rendered = None if prompts is None else encode(prompts)
    return Encoded(ids, real, real, _behind(rendered, ids, real), False)


_PADDING_KWARGS = ("padding", "padding_side", "return_tensors")


def encode_tokens(
    tensordict: TensorDictBase, key: Key, attention_key: Key, tokenizer: object
) -> Encoded:
    """Read B sequences of token ids, dense [B, T] or ragged, with their masks.

    ``attention_key`` is read if ("masks", "all_attention_mask") is missing. Without either mask,
    the tokenizer's pad and EOS tokens show the padding of dense ids.
    """
    value = read_value(tensordict, key)
    if value is None:
        raise KeyError(
            f"no token ids at {key}: the batch holds {sorted(map(str, tensordict.keys()))}"
        )
    ids, ragged = to_rows(value), is_ragged(value)
    attention = mask_rows(tensordict, ATTENTION_KEY, ids)
    if attention is None:
        attention = mask_rows(tensordict, attention_key, ids)
    if attention is None:
        attention = [_not_padding(row, tokenizer, ragged) for row in ids]
    prompt_key = (*key[:-1], "prompt") if isinstance(key, tuple) else None
    charged = response_mask(tensordict, tensordict, attention, prompt_key)
    return Encoded(ids, attention, attention, charged or attention, not ragged)


def response_mask(
    first: TensorDictBase,
    second: TensorDictBase,
    attention: list[Tensor],
    prompt_key: Key | None = ("tokens", "prompt"),
) -> list[Tensor] | None:
    """Return the mask of the response: the assistant mask, else ``attention`` after the prompt.

    Both TensorDicts are searched; None if neither has an assistant mask or a prompt.
    """
    for source in (first, second):
        assistant = mask_rows(source, ASSISTANT_KEY, attention)
        if assistant is not None:
            return [a & real for a, real in zip(assistant, attention, strict=True)]
    prompt = either(first, second, prompt_key) if prompt_key is not None else None
    if prompt is None:
        return None
    return [_after(*pair) for pair in zip(attention, lengths(to_rows(prompt)), strict=True)]


def mask_rows(tensordict: TensorDictBase, key: Key, ids: list[Tensor]) -> list[Tensor] | None:
    """Read B masks [T_i], of the lengths of the rows ``ids``; None if the key is missing."""
    value = read_value(tensordict, key)
    if value is None:
        return None
    rows = [row.bool() for row in to_rows(value)]
    if lengths(rows) != lengths(ids):
        raise ValueError(f"{key} has lengths {lengths(rows)}, but its tokens {lengths(ids)}")
    return rows


def _not_padding(row: Tensor, tokenizer: object, ragged: bool) -> Tensor:
    """Return a mask [T] of real tokens: all but the pad tokens at both ends."""
    pad = getattr(tokenizer, "pad_token_id", None)
    real = torch.ones_like(row, dtype=torch.bool)
    if ragged or pad is None or not (row != pad).any():
        return real
    inside = (row != pad).nonzero().squeeze(-1)
    # If pad and EOS are the same token, the first pad on the right is the EOS of the sequence.
    last = int(inside[-1]) + int(pad == getattr(tokenizer, "eos_token_id", None))
    positions = torch.arange(row.numel(), device=row.device)
    return (positions >= inside[0]) & (positions <= last)


def _after(mask: Tensor, count: int) -> Tensor:
    """Set the mask to False before position ``count``."""
    return mask & (torch.arange(mask.numel(), device=mask.device) >= count)


def _behind(prompts: list[Tensor] | None, ids: list[Tensor], real: list[Tensor]) -> list[Tensor]:
    """Set the masks to False in the prompts; without prompts, return the masks unchanged."""
    if prompts is None:
        return real
    starts = [_common_prefix(*pair) for pair in zip(prompts, ids, strict=True)]
    return [_after(*pair) for pair in zip(real, starts, strict=True)]


def _common_prefix(first: Tensor, second: Tensor) -> int:
    size = min(first.numel(), second.numel())
    different = (first[:size] != second[:size]).nonzero()
    return int(different[0]) if different.numel() else size
