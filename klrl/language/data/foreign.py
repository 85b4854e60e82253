"""Calls tokenizers and chat templates, the work of a model's author, within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from klrl.base.errors import ConfigError, first_line
from klrl.base.time_limit import TookTooLong, each_within

S = TypeVar("S")
T = TypeVar("T")


def guarded(
    call: Callable[[S], T],
    items: Sequence[S],
    what: Callable[[S], str],
    remedy: str,
    seconds: float = 10.0,
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
