"""A trial of a custom part: it is used, and what another one lacks then is lost at a resume."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from klrl.base.seeds import generators_kept
from klrl.base.sources import reached
from klrl.config.fields import OwnPart
from klrl.config.own.find import told
from klrl.config.own.parts import top_level


def saves(part: Any) -> bool:
    """Whether a part has ``load_state_dict``, and a ``state_dict``."""
    return all(callable(getattr(part, f"{name}state_dict", None)) for name in ("", "load_"))


def forgets(
    setting: str,
    part: OwnPart,
    make: Callable[[], Any],
    use: Callable[[Any], object],
    *,
    given: Iterable[Any] = (),
    saved: bool = True,
) -> bool:
    """Whether a part has state that no checkpoint holds; errors of the user's code in one line.

    Two are made, and one is used. The other loads its state, where ``saved`` says that a
    checkpoint has it, and must then hold the same; what all share must not have moved.

    Args:
        setting: of the part.
        part: its settings.
        make: makes one.
        use: calls it as a run does, and refuses what it gives if that is wrong.
        given: objects that klrl gave it, and saves itself.
        saved: whether its ``state_dict`` is in a checkpoint.
    """
    with told(setting, part), generators_kept():
        used, fresh = _alike(make), _alike(make)
        before = _shared(part)
        use(used)
        moved = _shared(part) != before
        if saved and saves(used):
            fresh.load_state_dict(used.state_dict())
        return moved or _held(used, given) != _held(fresh, given)


def _alike(make: Callable[[], Any]) -> Any:
    """A new one, which draws the same numbers as any other."""
    with generators_kept():
        return make()


def _held(part: Any, given: Iterable[Any]) -> object:
    """What one object holds; never the same where that cannot be said."""
    part = getattr(part, "__self__", part)  # of a method
    if isinstance(part, types.FunctionType):
        part = [cell.cell_contents for cell in part.__closure__ or ()], vars(part)
    return _pickled(part, given) or object()


def _shared(part: OwnPart) -> dict[tuple[int, str], object]:
    """What the user's modules, their classes and their functions hold by name."""
    named = reached(top_level(str(part.target)), [str(Path.cwd())])
    tops = {name for name, files in named.items() if files}
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] in tops]
    return {
        (id(space), name): _pickled(value) or id(value)
        for space in _spaces(modules)
        for name, value in vars(space).items()
        if not name.startswith("__")
    }


def _spaces(modules: Iterable[types.ModuleType]) -> Iterator[Any]:
    for module in modules:
        yield module
        for value in vars(module).values():
            if isinstance(value, _CODE) and value.__module__ == module.__name__:
                yield value


_CODE = types.FunctionType | type


def _pickled(value: Any, given: Iterable[Any] = ()) -> bytes | None:
    """None where it cannot be pickled."""
    pickler = _Pickler(file := io.BytesIO())
    pickler.given = tuple(given)
    try:
        pickler.dump(value)
    except Exception:  # what another's object raises
        return None
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes tensors by their values; functions, classes, modules, what klrl gave by identity."""

    given: tuple[Any, ...] = ()

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, types.FunctionType):
            return id(obj.__code__)  # the same in two objects
        known = isinstance(obj, type | types.ModuleType) or any(obj is each for each in self.given)
        return id(obj) if known else None

    def reducer_override(self, obj: Any) -> Any:
        if hasattr(obj, "detach") and hasattr(obj, "tolist"):  # a tensor; no torch in here
            return tuple, ([str(obj.dtype), obj.tolist()],)
        return NotImplemented
