"""Limits the time of a call to code that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TookTooLong(Exception):
    """A call did not return in time."""


def within(timeout: float | None, call: Callable[[], T]) -> T:
    """Call a function and return its result; with a time limit, call it on a separate thread.

    Raises:
        TookTooLong: the call took more than ``timeout`` seconds; its thread keeps running.
    """
    if timeout is None:
        return call()
    returned: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # raised again in the caller's thread
            raised.append(error)

    # A daemon thread, so that the process can end while the call hangs.
    thread = threading.Thread(target=work, daemon=True, name="time limit")
    thread.start()
    thread.join(timeout)
    if raised:
        raise raised[0]
    if not returned:
        raise TookTooLong
    return returned[0]
