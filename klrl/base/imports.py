"""Imports of large libraries, and the garbage collector, which they keep busy."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the garbage collector still while modules are imported.

    Importing torch and TorchRL makes some hundred thousand objects that stay; looking through them
    again and again for garbage is a tenth to a fifth of the time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def import_for_good(*modules: str) -> None:
    """Import modules into a process that is klrl's own, where they stay until its end.

    What they made is moved out of the collector's sight: each of its full rounds would take half a
    second to find that all of it is still in use.
    """
    with collection_paused():
        for module in modules:
            importlib.import_module(module)
        gc.freeze()
