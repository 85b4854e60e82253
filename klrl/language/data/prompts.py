"""Reads prompts, shuffles them, renders them to token ids, and pads them.

Data file or generator -> :class:`Prompt` by index -> :class:`PromptStream` -> token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from klrl.base.errors import ConfigError, first_line
from klrl.base.files import ROWS, expanded, read_plain
from klrl.base.time_limit import TookTooLong, each_within
from klrl.language.data.templates import rendered

S = TypeVar("S")
T = TypeVar("T")
#: A tokenizer of ``transformers``; Any, since importing its class takes seconds.
Tokenizer: TypeAlias = Any
#: One turn of a conversation: {"role": ..., "content": ...}.
Message: TypeAlias = Mapping[str, str]
#: The content of a prompt: plain text or a conversation.
Content: TypeAlias = str | Sequence[Message]
#: All fields of a row of data.
Fields: TypeAlias = Mapping[str, Any]
#: No arguments for the chat template.
NO_ARGUMENTS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the row of data that contains it.

    ``content``: plain text, or a conversation whose last turn is not the assistant's. ``row``: all
    fields of the row, for the reward function. ``origin``: where the prompt comes from, for
    messages. ``turn``: the assistant's turn that followed ``content``; None without one.
    """

    content: Content
    row: Fields = field(default_factory=dict)
    origin: str = "prompt"
    turn: str | None = None

    @property
    def recorded(self) -> str | list[dict[str, str]]:
        """The text, or role and content of each turn; its other fields may not fit into JSON."""
        if isinstance(self.content, str):
            return self.content
        return [{"role": t["role"], "content": t.get("content") or ""} for t in self.content]


@dataclass(frozen=True)
class PromptBatch:
    """N prompts, left-padded.

    Args:
        ids: [N, P] int64.
        mask: [N, P] bool, True at real tokens; made from the lengths, so the pad id may equal EOS.
        prompts: the N prompts.
    """

    ids: Tensor
    mask: Tensor
    prompts: list[Prompt]


# ------------------------------------------------------------------------------------------ reading


def read_json_file(
    path: str | Path, setting: str = "env.data", key: str = "prompt"
) -> list[Prompt]:
    """Read JSON lines, or a ``.json`` file with a list; skip blank lines.

    A row is an object with ``prompt`` (a text or a conversation) or ``messages`` (a conversation).
    A conversation is a list of turns {"role", "content"}. If the last turn is the assistant's, it
    is removed from the prompt; it becomes the row's ``answer`` if the row has none. ``key`` is the
    field to read in place of ``prompt``.
    """
    file, where = expanded(path), f"{setting}={path}"
    try:
        content = read_plain(file, ROWS).removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror or error}; give a JSONL file") from error
    if file.suffix == ".json" and content.lstrip().startswith(b"["):
        rows = [(f"{where} row {i}", row) for i, row in enumerate(_loaded(content, where), 1)]
    else:
        lines = ((f"{where} line {i}", line) for i, line in enumerate(content.split(b"\n"), 1))
        rows = [(origin, _loaded(line, origin)) for origin, line in lines if line.strip()]
    if not rows:
        raise ConfigError(
            f'{where}: has no prompts; write lines as {{"prompt": "..."}} or {{"messages": [...]}}'
        )
    return [parse_row(row, origin, key) for origin, row in rows]


def _loaded(text: bytes, origin: str) -> Any:
    try:
        loaded = json.loads(text.decode())
        # encode() raises a ValueError for half a surrogate pair, which no tokenizer accepts.
        json.dumps(loaded, ensure_ascii=False).encode()
    # json.loads also raises a ValueError for a number with thousands of digits.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not JSON ({error}); write one object per line") from error
    return loaded


#: The fields of a row that may contain the prompt.
CONTENT = ("prompt", "messages")


def parse_row(row: object, origin: str, key: str = "prompt") -> Prompt:
    """Convert a row of data to a prompt, the field ``key``; refuse a row without a valid one."""
    if not isinstance(row, dict):
        raise ConfigError(f"{origin}: is {json_type(row)}; write an object with prompt or messages")
    if key != "prompt":
        if key not in row:
            raise ConfigError(f"{origin}: has no {key}, which env.prompt_key names; add it")
        row = {"prompt": row[key], **{k: v for k, v in row.items() if k not in CONTENT}}
    fields = [name for name in CONTENT if name in row]
    if len(fields) != 1:
        some = f"only {', '.join(row)}" if row else "no fields"
        held = "both prompt and messages" if fields else some
        raise ConfigError(f"{origin}: has {held}; give either prompt or messages")
    content = row[fields[0]]
    if fields[0] == "messages" or isinstance(content, list):
        _check_messages(content, origin, fields[0])
        tools_of(row, origin)
        if content[-1]["role"] == "assistant":
            calls = content[-1].get("tool_calls")
            turn = None if calls else content[-1]["content"]
            answer = (calls or turn) if row.get("answer") is None else row["answer"]
            rest = {"answer": answer, fields[0]: content[:-1]}
            return Prompt(content[:-1], {**row, **rest}, origin, turn)
    elif not isinstance(content, str):
        raise ConfigError(f"{origin}: prompt is {json_type(content)}; give a text, or use messages")
    return Prompt(content, row, origin)


def _check_messages(messages: object, origin: str, name: str) -> None:
    """Refuse a value that is not a conversation, or whose only turn is the assistant's."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{origin}: {name} is {json_type(messages)}; give a list of turns")
    for turn, message in enumerate(messages, 1):
        texts = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if texts and message.get("tool_calls"):
            texts[1] = texts[1] or ""
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError(
                f"{origin}: turn {turn} needs a role and a content (or tool_calls), texts; it is "
                f"{json.dumps(message, default=repr)[:60]}"
            )
    if messages[-1]["role"] == "assistant" and len(messages) == 1:
        raise ConfigError(
            f"{origin}: the only turn is the assistant's, so there is nothing to answer; "
            "begin with the user's"
        )


def tools_of(row: Fields, origin: str = "a row") -> dict[str, Any]:
    """Return a row's ``tools``, a list or its JSON text, for the chat template; {} without any."""
    tools = row.get("tools") or []
    with suppress(ValueError):
        tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{origin}: tools is {json_type(tools)}; give a list of JSON schemas")
    return {"tools": tools} if tools else {}


def json_type(value: object) -> str:
    """Return the name of a value's JSON type, for messages."""
    if isinstance(value, list | dict) and not value:
        return "empty"
    names = {str: "a text", list: "a list", dict: "an object", bool: "a boolean"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


# ---------------------------------------------------------------------------------------- rendering


def guarded(
    call: Callable[[S], T],
    items: Sequence[S],
    what: Callable[[S], str],
    remedy: str,
    seconds: float = 20.0,  # a template has 10 s, and its process may have to start
) -> list[T]:
    """Call a template or tokenizer, the code of a model's author, on each item, within bounds.

    A call that fails or takes too long raises the ConfigError ``what(item) (why); remedy``.
    """

    def caught(item: S) -> T:
        try:
            return call(item)
        except ConfigError:
            raise
        except BaseException as error:  # a panic of the package tokenizers is no Exception
            raise ConfigError(f"{what(item)} ({first_line(error)[:200]}); {remedy}") from error

    try:
        return each_within(seconds, caught, items)
    except TookTooLong as error:
        took = f"took more than {seconds:g} s"
        raise ConfigError(f"{what(items[error.args[0]])} ({took}); {remedy}") from error


def encode(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    limit: int | None = None,
    template: Mapping[str, object] = NO_ARGUMENTS,
) -> list[list[int]]:
    """Return the token ids of each prompt.

    The chat template renders a conversation, with its row's tools, up to the start of the
    assistant's turn. Plain text gets the tokenizer's special tokens, see :func:`plain_ids`, except
    an EOS at the end, since a response follows. A prompt of more than ``limit`` tokens is refused,
    since it leaves no room for a response.
    """
    chats = ((p.content, p.row) for p in prompts if not isinstance(p.content, str))
    ids_of_chats = render(tokenizer, chats, template, add_generation_prompt=True)

    def ids_of(prompt: Prompt) -> list[int]:
        if not isinstance(prompt.content, str):
            return next(ids_of_chats)
        ids, bare = plain_ids(tokenizer, prompt.content)
        added = ids[-1:] == [tokenizer.eos_token_id] and ids[-1:] != bare[-1:]
        return ids[:-1] if added else ids

    def what(prompt: Prompt) -> str:
        reader = "tokenizer" if isinstance(prompt.content, str) else "chat template"
        return f"{prompt.origin}: the {reader} refuses it"

    remedy = "fix the prompt, or the tokenizer's files and chat_template"
    rows = guarded(ids_of, prompts, what, remedy)
    for prompt, ids in zip(prompts, rows, strict=True):
        if not ids:
            raise ConfigError(f"{prompt.origin}: the prompt has no tokens; give at least one")
        if limit is not None and len(ids) > limit:
            raise ConfigError(
                f"{prompt.origin}: {len(ids)} tokens, but the model's context minus the longest "
                f"response leaves {limit}; shorten the prompt or the response"
            )
    return rows


def plain_ids(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a text with the tokenizer's special tokens, and without.

    A text that begins with the BOS, as rendered conversations do, gets no second one.
    """
    ids, bare = (list(tokenizer(text, add_special_tokens=a)["input_ids"]) for a in (True, False))
    bos = bare[:1]
    twice = bos == [tokenizer.bos_token_id] and ids[: len(bare) + 1] == [*bos, *bare]
    return ids[twice:], bare


def variables_of(template: str) -> set[str]:
    """Return the names of the variables that a chat template reads but does not set."""
    unmarked = _MARKS.sub("", template)
    try:
        return find_undeclared_variables(_JINJA.parse(unmarked))
    except TemplateError as error:
        raise ConfigError(f"the chat template cannot be parsed ({first_line(error)})") from error


#: Parses chat templates as ``transformers`` does, except for its ``{% generation %}`` tag.
_JINJA = Environment(extensions=["jinja2.ext.loopcontrols"])
_MARKS = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")


def render(
    tokenizer: Tokenizer,
    chats: Iterable[tuple[Sequence[Message], Fields]],
    template: Mapping[str, object],
    **how: bool,
) -> Iterator[list[int]]:
    """Apply the chat template to conversations; yield the token ids of each.

    Call ``next`` in :func:`guarded`, since a template may raise anything.

    Args:
        tokenizer: with a chat template.
        chats: conversations, each with its row of data, which may have tools.
        template: arguments of the chat template.
        how: options of ``apply_chat_template``, such as ``add_generation_prompt=True``.
    """
    common = {**tokenizer.special_tokens_map, **template, **how}
    # As apply_chat_template does: templates fail on content=None, but not without a content.
    each = (
        {"conversations": [[{k: v for k, v in t.items() if v is not None} for t in turns]]}
        | tools_of(row)
        for turns, row in chats
    )
    for text in rendered(each, chat_template=tokenizer.get_chat_template(), **common):
        yield list(tokenizer(text, add_special_tokens=False)["input_ids"])


def end_of_turn(
    tokenizer: Tokenizer, eos: Sequence[int], prompt: Prompt, template: Mapping[str, object]
) -> int:
    """Return the EOS after an answer: the first one that the template renders there, else eos[0].

    ``eos`` are the ids that end a response, the tokenizer's EOS first, which ends plain text. Call
    this in :func:`guarded`.
    """
    if isinstance(prompt.content, str) or len(eos) == 1:
        return eos[0]
    chats = ([*prompt.content, {"role": "assistant", "content": answer}] for answer in "12")
    one, other = render(tokenizer, ((chat, prompt.row) for chat in chats), template)
    from_answer = dropwhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return next((token for token, _ in from_answer if token in eos), eos[0])


def left_pad(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Stack N rows of token ids, padded on the left: ids [N, P] int64 and mask [N, P] bool."""
    stack = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = stack([torch.tensor(row, dtype=torch.int64) for row in rows], padding_value=pad)
    return ids, stack([torch.ones(len(row), dtype=torch.bool) for row in rows])


# -------------------------------------------------------------------------------------- drawing


class ShuffledEpochs:
    """Maps i to the i-th prompt of endless epochs; seed and epoch give the order of each."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts, self._seed = prompts, seed
        self._epoch, self._order = -1, np.arange(0)

    def __call__(self, index: int) -> Prompt:
        """Return prompt number ``index``; calls may come in any order."""
        epoch, position = divmod(index, len(self._prompts))
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            self._epoch, self._order = epoch, rng.permutation(len(self._prompts))
        return self._prompts[int(self._order[position])]


class PromptStream:
    """Serves batches of encoded prompts. Checkpoints store its counter and digests of the data.

    ``prompt_at`` maps i to prompt number i. ``limit``: most tokens of a prompt. ``rows``:
    "setting=value" of a data set -> digest of its rows. A resume with different rows is refused,
    since even one more row would reorder all prompts.
    """

    def __init__(
        self,
        prompt_at: Callable[[int], Prompt],
        tokenizer: Tokenizer,
        limit: int | None,
        template: Mapping[str, object] = NO_ARGUMENTS,
        rows: Mapping[str, object] = NO_ARGUMENTS,
    ) -> None:
        self._prompt_at, self._tokenizer, self._limit = prompt_at, tokenizer, limit
        self._template, self._rows = template, rows
        self.served = 0

    def take(self, count: int) -> PromptBatch:
        """Return the next ``count`` prompts, encoded."""
        prompts = [self._prompt_at(self.served + i) for i in range(count)]
        rows = encode(prompts, self._tokenizer, self._limit, self._template)
        self.served += count
        return PromptBatch(*left_pad(rows, self._tokenizer.pad_token_id), prompts)

    def state_dict(self) -> dict[str, object]:
        """Return the number of prompts served so far, and any digests of the rows."""
        return {"served": self.served, **({"rows": dict(self._rows)} if self._rows else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last served prompt; refuse a state with different digests."""
        stored = state.get("rows", {})
        for named, digest in self._rows.items():
            if stored.get(named, digest) != digest:
                raise ConfigError(
                    f"{named}: its rows have changed since the run began; restore them, or "
                    "start a new run"
                )
        self.served = int(state["served"])
