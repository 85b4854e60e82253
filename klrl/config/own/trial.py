"""Makes and uses a custom part on trial, to find state that a checkpoint would not restore."""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from klrl.config.fields import OwnPart
from klrl.config.own.find import Made, config_errors, make_own


def has_state_dict(part: object) -> bool:
    """Return whether a part has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(part, f"{name}state_dict", None)) for name in ("", "load_"))


def try_part(
    setting: str,
    part: OwnPart,
    given: Mapping[str, object],
    kind: type[Made],
    use: Callable[[Made], object],
    *,
    trial: Mapping[str, Callable[[], object]] | None = None,
    saved: bool = True,
) -> tuple[Made, bool]:
    """Make a custom part; return it, and whether a resume would lose some of its state.

    To find out, make two trial parts and use the first. If ``saved``, the second then loads the
    ``state_dict`` of the first. State would be lost if the two parts still differ.

    Args:
        setting: the setting that names the part.
        part: the settings of the part.
        given: the arguments that klrl passes, as in :func:`klrl.config.own.make_own`.
        kind: the class that the part must have.
        use: a function that calls the part as a run does, and refuses wrong results.
        trial: argument -> function that makes a new value of the argument for each trial part.
        saved: whether a checkpoint stores the part's ``state_dict``.
    """
    from klrl.base.seeds import generators_kept  # numpy is slow to import

    def make(given: Mapping[str, object]) -> Any:
        with generators_kept():  # so that both trial parts draw the same random numbers
            return make_own(setting, part, given, kind)

    first, second = ({**given, **{k: v() for k, v in (trial or {}).items()}} for _ in range(2))
    with config_errors(setting, part), generators_kept():
        used, fresh = make(first), make(second)
        use(used)
        if saved and has_state_dict(used):
            fresh.load_state_dict(used.state_dict())
        # Objects that both trial parts got belong to klrl, which saves them itself.
        klrls = [each for name, each in first.items() if each is second[name]]
        unsaved = _state_of(used, klrls) != _state_of(fresh, klrls)
    return make_own(setting, part, given, kind), unsaved


def _state_of(part: object, given: Sequence[object]) -> object:
    """Pickle an object for comparison; a state that cannot be pickled equals no other."""
    pickler = _Pickler(file := io.BytesIO())
    pickler.given = given
    try:
        pickler.dump(getattr(part, "__self__", part))  # of a method, its object
    except Exception:  # the user's object may raise anything
        return object()
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles tensors by content; functions by their code, classes and ``given`` by identity."""

    given: Sequence[object] = ()

    def persistent_id(self, obj: object) -> int | None:
        if isinstance(obj, types.FunctionType):  # functions of one ``def`` share a code object
            return id(obj.__code__)
        known = isinstance(obj, type | types.ModuleType) or any(obj is each for each in self.given)
        return id(obj) if known else None

    def reducer_override(self, obj: Any) -> Any:
        if hasattr(obj, "untyped_storage"):  # a tensor; its default pickle contains an address
            import torch

            raw = obj.detach().cpu().contiguous().flatten().view(torch.uint8)
            return tuple, ([str(obj.dtype), tuple(obj.shape), raw.numpy().tobytes()],)
        return NotImplemented
