"""Renders chat templates, the code of a model's author, in a child process.

A template can call C code that runs for hours, such as the sum of a million lists. Neither a thread
nor a signal's handler in the same process ends such a call, but a timer's signal ends the process.
This file is also the program of the process; it imports no torch.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path

from jinja2 import TemplateError

#: Limits on rendering one conversation: seconds, bytes of new memory (on Linux), characters.
SECONDS, MEMORY, LONGEST = 10.0, 2**29, 1_000_000
#: Conversations per message to the child, which holds them all in its limited memory.
BATCH = 32
#: The date that chat templates get from the clock, so that all runs have the same prompts: the
#: default date of Llama 3's templates.
TODAY = datetime(2024, 7, 26)

#: Id of this process -> a child that waits for a template. A forked process starts its own child.
_idle: dict[int, subprocess.Popen[str]] = {}


def prepare() -> None:
    """Start the child early: its imports take a second. Replace a child that was killed."""
    if (child := _idle.get(os.getpid())) and child.poll() is not None:
        _end()
    if os.getpid() not in _idle:
        _idle[os.getpid()] = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # a terminal's Ctrl-C is for klrl
        )


def rendered(each: Iterable[Mapping[str, object]], **common: object) -> Iterator[str]:
    """Yield the text of ``transformers``' ``render_jinja_template`` for each item's arguments.

    Raises:
        TemplateError: the template failed on the next item, or exceeded a limit there.
    """
    items = iter(each)
    while batch := list(islice(items, BATCH)):
        yield from _rendered(batch, common)


def _rendered(batch: Sequence[Mapping[str, object]], common: object) -> Iterator[str]:
    # transformers also shows a template only the type of a value that is not JSON.
    request = json.dumps([SECONDS, common, batch], default=lambda v: f"<{type(v).__name__}>")
    prepare()
    child = _idle.pop(os.getpid())
    assert child.stdin is not None
    assert child.stdout is not None
    unread = len(batch)
    try:
        with suppress(BrokenPipeError):
            print(request, file=child.stdin, flush=True)
        while unread:
            answer = child.stdout.readline()
            if not answer:
                took = f"took more than {SECONDS:g} s"
                killed = f"ended its process with status {child.wait()}"
                raise TemplateError(took if child.returncode == -signal.SIGALRM else killed)
            unread -= 1
            if not unread:
                _idle[os.getpid()] = child
            text, error = json.loads(answer)
            if error is not None:
                raise TemplateError(error)
            yield text
    finally:
        if unread:
            child.kill()
            child.communicate()


@atexit.register
def _end() -> None:
    if child := _idle.pop(os.getpid(), None):
        child.kill()
        child.communicate()


# ------------------------------------------------------------------------------ in the child


class _Today(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return TODAY


def _serve() -> None:
    """Answer each item of each request with a line: [text, null] or [null, error]."""
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = _Today  # type: ignore[misc]  # its strftime_now calls now()
    _limit_memory()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin:
        seconds, common, batch = json.loads(line)
        for own in batch:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                text = chat_template_utils.render_jinja_template(**{**common, **own})[0][0]
                long = f"it renders {len(text):,} characters, more than {LONGEST:,}"
                answer = [text, None] if len(text) <= LONGEST else [None, long]
            except Exception as error:
                answer = [None, str(error).strip() or type(error).__name__]
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(json.dumps(answer), flush=True)  # now: the next item may end the process


def _limit_memory() -> None:
    size = Path("/proc/self/statm")
    if size.exists():
        most = int(size.read_text().split()[0]) * resource.getpagesize() + MEMORY
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    _serve()
