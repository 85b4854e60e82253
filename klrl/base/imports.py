"""Imports of large libraries without the garbage collector, which would slow them down."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector while modules are imported.

    Importing torch and TorchRL makes some hundred thousand objects that stay; searching them for
    garbage again and again takes a tenth to a fifth of the import time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def import_for_good(*modules: str) -> None:
    """Import modules into klrl's own process, where they stay until its end.

    Their objects are frozen, so that the collector skips them: a full collection would take half a
    second, and find all of them still in use.
    """
    with collection_paused():
        for module in modules:
            importlib.import_module(module)
        gc.freeze()
