"""Whether what a custom part holds moves, and is saved."""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterable
from typing import Any


def saves(part: Any) -> bool:
    """Whether a part has ``load_state_dict``, and a ``state_dict`` that is the user's."""
    write, read = (getattr(type(part), f"{name}state_dict", None) for name in ("", "load_"))
    return bool(write and read) and not write.__module__.startswith("klrl.")


def unsaved(part: Any, given: Iterable[Any] = (), saved: Iterable[str] = ()) -> object:
    """What a part holds and no checkpoint does; equal before and after a call where that stays.

    ``given`` are objects that klrl gave it, and saves itself; ``saved`` attributes that klrl saves.
    """
    part = getattr(part, "__self__", part)  # of a method
    held = {name: each for name, each in getattr(part, "__dict__", {}).items() if name not in saved}
    cells = [cell.cell_contents for cell in getattr(part, "__closure__", None) or ()]
    pickler = _Pickler(file := io.BytesIO())
    pickler.given = tuple(given)
    try:
        pickler.dump(None if saves(part) else (held, cells))
    except Exception:  # what another's object raises; nobody knows then that it stays
        return object()
    return file.getvalue()


class _Pickler(pickle.Pickler):
    given: tuple[Any, ...] = ()

    def persistent_id(self, obj: Any) -> int | None:
        constant = isinstance(obj, types.FunctionType | type)
        return id(obj) if constant or any(obj is each for each in self.given) else None
