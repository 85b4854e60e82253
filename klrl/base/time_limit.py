"""Limits the time of calls to code that may hang."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


class TookTooLong(Exception):
    """A call did not return in time; the argument is its index among the calls."""


def within(timeout: float | None, call: Callable[[], T]) -> T:
    """Call a function and return its result; with a time limit, call it on a separate thread.

    Raises:
        TookTooLong: the call took more than ``timeout`` seconds.
    """
    return call() if timeout is None else each_within(timeout, lambda _: call(), [None])[0]


def each_within(timeout: float, call: Callable[[S], T], items: Sequence[S]) -> list[T]:
    """Call a function on each item, on one separate thread, at most ``timeout`` seconds each.

    Raises:
        TookTooLong: a call took longer. SystemExit ends it at its next bytecode; while it stays in
            C code, its thread keeps running.
    """
    returned: list[T] = []
    raised: list[BaseException] = []
    begun = time.monotonic()

    def work() -> None:
        nonlocal begun
        try:
            for item in items:
                begun = time.monotonic()
                returned.append(call(item))
        except BaseException as error:  # raised again in the caller's thread
            raised.append(error)

    # A daemon thread, so that the process can end while the call hangs.
    thread = threading.Thread(target=work, daemon=True, name="time limit")
    thread.start()
    while thread.is_alive() and (left := begun + timeout - time.monotonic()) > 0:
        thread.join(left)
    if raised:
        raise raised[0]
    if len(returned) < len(items):
        number = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))
        raise TookTooLong(len(returned))
    return returned
