"""A model's tokenizer, and the tokens that end a response."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from klrl.base.errors import ConfigError, first_line
from klrl.language.model_files import read_json
from klrl.language.prompts import Tokenizer


def load_tokenizer(
    folder: Path, *, chat: bool, setting: str, say: Callable[[str], None] = print
) -> Tokenizer:
    """The tokenizer of a folder, padding on the left.

    If it has no pad token, EOS is used and ``say`` gets a line: klrl knows padding by position,
    never by value.

    Args:
        folder: of the model.
        chat: whether a chat template is needed.
        setting: for messages, as in ``actor.model=...``.
        say: takes the line.
    """
    settings = _read_settings(folder, setting)
    # The folder's tokenizer.json must win over the model's type: for a Qwen2 model, AutoTokenizer
    # of transformers 5.23 replaces its rules by Qwen2's own.
    exact = settings.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
    kind: Any = PreTrainedTokenizerFast if exact else AutoTokenizer
    try:
        tokenizer: Tokenizer = kind.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # a broken tokenizer.json raises anything, Exception itself too
        raise ConfigError(
            f"{setting}: no tokenizer can be read from it ({first_line(error)}); save the "
            "model's tokenizer there with save_pretrained"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{setting}: its tokenizer has no EOS token, so no response could end; set eos_token "
            "in its tokenizer_config.json"
        )
    if chat and not tokenizer.chat_template:
        raise ConfigError(
            f"{setting}: its tokenizer has no chat template, and the prompts are conversations; "
            "put a chat_template.jinja beside it, or give plain prompts"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        say(f"{setting}: no pad token; padding with EOS, told apart by position")
    tokenizer.padding_side = "left"
    return tokenizer


def end_tokens(
    tokenizer: Tokenizer, eos_token_id: Any, setting: str, say: Callable[[str], None] = print
) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's EOS, and those that the model lists.

    Chat models list several: Llama 3 has one each for the end of a turn, of a message to a tool and
    of a text. A single id of the model is ignored: classes of transformers have one by default
    (Llama's is 2), whatever the tokenizer. ``say`` gets a line if there are several ids.

    Args:
        tokenizer: has an EOS.
        eos_token_id: of the model's generation config: a list, an id or None.
        setting: for messages, as in ``actor.model=...``.
        say: takes the line.
    """
    listed = list(eos_token_id) if isinstance(eos_token_id, list | tuple) else []
    for token in listed:
        known = isinstance(token, int) and token >= 0
        if not known or tokenizer.convert_ids_to_tokens(token) is None:
            raise ConfigError(
                f"{setting}: eos_token_id={listed} of its generation config names {token}, which "
                "is no token; fix its generation_config.json"
            )
    ends = tuple(dict.fromkeys((tokenizer.eos_token_id, *listed)))
    if len(ends) > 1:
        names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(list(ends))))
        say(f"{setting}: a response ends with any of {names}, as its generation config lists")
    return ends


def _read_settings(folder: Path, setting: str) -> dict[str, Any]:
    """The content of ``tokenizer_config.json``; one that needs remote code is refused."""
    file = folder / "tokenizer_config.json"
    settings = read_json(file, setting) if file.is_file() else {}
    if settings.get("auto_map"):
        raise ConfigError(
            f"{setting}: its tokenizer runs code of its own (auto_map), which klrl never does; "
            "choose a model whose tokenizer transformers itself implements"
        )
    return settings
