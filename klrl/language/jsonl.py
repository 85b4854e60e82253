"""``env=text``: prompts from a file of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from klrl.base.errors import ConfigError
from klrl.language.prompts import Prompt


def read_jsonl(path: str | Path, setting: str = "env.data") -> list[Prompt]:
    """Read one prompt per line.

    A line is an object with ``prompt`` (a text) or ``messages`` (a conversation of
    {"role", "content"}, one turn or many, the last one not the assistant's). Other fields are the
    user's own and reach the reward function. Blank lines are skipped.

    Raises:
        ConfigError: no such file, no prompt in it, or a malformed line (with its number).
    """
    file = Path(path).expanduser()
    try:
        lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"{setting}={path}: {error.strerror or error}; give a JSONL file"
        ) from error
    prompts = [
        _parse(line, f"{setting}={path} line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(
            f'{setting}={path}: holds no prompt; write lines as {{"prompt": "..."}} or '
            '{"messages": [...]}'
        )
    return prompts


def _parse(line: bytes, origin: str) -> Prompt:
    try:
        row = json.loads(line.decode())
    # ValueError also for a number of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin}: not JSON ({error}); write one object per line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{origin}: {_kind(row)}; write an object with prompt or messages")
    fields = [name for name in ("prompt", "messages") if name in row]
    if len(fields) != 1:
        held = "both prompt and messages" if fields else f"only {', '.join(row) or 'no field'}"
        raise ConfigError(f"{origin}: holds {held}; give one of prompt and messages")
    content = row[fields[0]]
    if fields[0] == "messages":
        _check_messages(content, origin)
    elif not isinstance(content, str):
        raise ConfigError(f"{origin}: prompt is {_kind(content)}; give a text, or use messages")
    return Prompt(content, row, origin)


def _check_messages(messages: Any, origin: str) -> None:
    """Refuse what is no conversation, or one that ends with the assistant's turn."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{origin}: messages is {_kind(messages)}; give a list of turns")
    for turn, message in enumerate(messages, 1):
        texts = isinstance(message, dict) and [message.get("role"), message.get("content")]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError(
                f"{origin}: turn {turn} needs a role and a content, both texts; it is "
                f"{json.dumps(message)[:60]}"
            )
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{origin}: the last turn is the assistant's, so there is nothing to answer; "
            "end with the user's"
        )


def _kind(value: Any) -> str:
    """The JSON type of a value, for messages."""
    if isinstance(value, list | dict) and not value:
        return "empty"
    names = {str: "a text", list: "a list", dict: "an object", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")
