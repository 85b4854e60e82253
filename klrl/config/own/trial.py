"""A trial of a custom part: it is used, and what another one lacks then is lost at a resume."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from klrl.base.sources import reached
from klrl.config.fields import OwnPart
from klrl.config.own.find import errors_of, make_own
from klrl.config.own.parts import top_level


def saves(part: object) -> bool:
    """Whether a part has ``load_state_dict``, and a ``state_dict``."""
    return all(callable(getattr(part, f"{name}state_dict", None)) for name in ("", "load_"))


def make_tried(
    setting: str,
    part: OwnPart,
    given: Mapping[str, object],
    kind: type,
    use: Callable[[Any], object],
    *,
    trial: Mapping[str, Callable[[], object]] | None = None,
    saved: bool = True,
) -> tuple[Any, bool]:
    """A custom part, and whether it has state that no checkpoint holds.

    Before it two others are made, and one is used. The second loads the state of the first, where
    ``saved`` says that a checkpoint has it, and must then hold the same; what both share must not
    have moved.

    Args:
        setting: of the part.
        part: its settings.
        given: as of :func:`klrl.config.own.make_own`; so is ``kind``.
        kind: of what it makes.
        use: calls it as a run does, and refuses a wrong answer.
        trial: what those two are given in place of what a run moves.
        saved: whether its ``state_dict`` is in a checkpoint.
    """
    from klrl.base.seeds import generators_kept  # numpy, which a command line does without

    def make(given: Mapping[str, object]) -> Any:
        with generators_kept():  # both draw the same
            return make_own(setting, part, given, kind)

    first, second = ({**given, **{k: v() for k, v in (trial or {}).items()}} for _ in range(2))
    with errors_of(setting, part), generators_kept():
        used, fresh = make(first), make(second)
        before = _shared(part)
        use(used)
        moved = _shared(part) != before
        if saved and saves(used):
            fresh.load_state_dict(used.state_dict())
        # What both were given is klrl's, which saves it.
        klrls = [each for name, each in first.items() if each is second[name]]
        forgets = moved or _held(used, klrls) != _held(fresh, klrls)
    return make_own(setting, part, given, kind), forgets


def moved_by(part: OwnPart, function: object, use: Callable[[], object]) -> bool:
    """Whether a call moves what a custom function holds, or what its modules share."""
    before = _shared(part), _held(function, ())
    use()
    return (_shared(part), _held(function, ())) != before


def _held(part: object, given: Iterable[object]) -> object:
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


def _spaces(modules: Iterable[types.ModuleType]) -> Iterator[object]:
    for module in modules:
        yield module
        for value in vars(module).values():
            if isinstance(value, _CODE) and value.__module__ == module.__name__:
                yield value


_CODE = types.FunctionType | type


def _pickled(value: object, given: Iterable[object] = ()) -> bytes | None:
    """None where it cannot be pickled."""
    pickler = _Pickler(file := io.BytesIO())
    pickler.given = tuple(given)
    try:
        pickler.dump(value)
    except Exception:  # what another's object raises
        return None
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes tensors and functions by what they hold; classes, modules, klrl's by identity."""

    given: tuple[object, ...] = ()

    def persistent_id(self, obj: object) -> int | None:
        known = isinstance(obj, type | types.ModuleType) or any(obj is each for each in self.given)
        return id(obj) if known else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType):  # the code is the same in two objects
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            return tuple, ([id(obj.__code__), obj.__defaults__, obj.__kwdefaults__, cells],)
        if hasattr(obj, "untyped_storage"):  # a tensor: its own pickle has the storage's address
            import torch

            raw = obj.detach().cpu().contiguous().flatten().view(torch.uint8)
            return tuple, ([str(obj.dtype), tuple(obj.shape), raw.numpy().tobytes()],)
        return NotImplemented
