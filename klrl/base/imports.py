"""Imports of large libraries, faster."""

from __future__ import annotations

import gc
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
