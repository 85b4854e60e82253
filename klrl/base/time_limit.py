"""A time limit on a call into code that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class TookTooLong(Exception):
    """A call did not return in time."""


def within(timeout: float | None, call: Callable[[], Any]) -> Any:
    """Call, and return or raise what the call does. With a limit it runs on a thread of its own.

    Raises:
        TookTooLong: it took more than ``timeout`` seconds; its thread is left behind.
    """
    if timeout is None:
        return call()
    outcome: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # raised again in the caller's thread
            outcome.append((None, error))

    # A daemon thread: one that hangs must not keep the process from ending.
    thread = threading.Thread(target=work, daemon=True, name="time limit")
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise TookTooLong
    returned, error = outcome[0]
    if error is not None:
        raise error
    return returned
