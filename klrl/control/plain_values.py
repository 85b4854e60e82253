"""Plain values as JSON and back, to the bit: what an environment keeps in its attributes.

Numbers, strings, arrays, tensors, random generators, and lists, tuples, dicts, TensorDicts, sets
and deques of them. A value of another kind than JSON's stands as a mapping with one entry, its
kind. Nothing is ever unpickled.
"""

from __future__ import annotations

import random
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

#: Kinds of numpy's types that bytes and a name describe: no objects, no records.
_KINDS = "biufcSUmM"
_AS_THEY_ARE = (type(None), bool, int, float, str)
_LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


class Unplain(TypeError):
    """A value that is none of these, as a handle of a simulator or a window."""


def encode(value: Any) -> Any:
    """A plain value as JSON.

    Raises:
        Unplain: it is none.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is np.ndarray and value.dtype.kind in _KINDS:
        return {"array": [value.dtype.str, list(value.shape), _text(value.tobytes())]}
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
        return {"number": [value.dtype.str, _text(value.tobytes())]}
    if kind.__name__ in _LISTS and kind is _LISTS[kind.__name__]:
        return {kind.__name__: [encode(item) for item in value]}
    if kind is dict:
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if kind is deque:
        return {"deque": [value.maxlen, [encode(item) for item in value]]}
    if kind is bytes:
        return {"bytes": _text(value)}
    if kind is torch.Tensor:
        return {"tensor": encode(_as_array(value))}
    if kind is TensorDict:
        return {"TensorDict": [list(value.batch_size), encode(dict(value.items()))]}
    return _encode_generator(value)


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.device.type != "cpu" or tensor.requires_grad:
        raise Unplain("a tensor on a GPU, or of a graph, is no plain value")
    try:
        return np.ascontiguousarray(tensor.numpy()).reshape(tensor.shape)
    except TypeError as error:  # bfloat16
        raise Unplain(f"a tensor of {tensor.dtype} is no plain value") from error


def _encode_generator(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return {"Generator": encode(value.bit_generator.state)}
    if isinstance(value, np.random.RandomState):
        return {"RandomState": encode(value.get_state(legacy=False))}
    if type(value) is random.Random:
        return {"Random": encode(value.getstate())}
    if type(value) is torch.Generator and value.device.type == "cpu":
        return {"torch.Generator": encode(value.get_state())}
    raise Unplain(f"a {type(value).__name__} is no plain value")


def decode(value: Any, before: Any = None) -> Any:
    """The value that :func:`encode` gave.

    Args:
        value: JSON.
        before: what stands in its place now. A generator is set to the state and returned, so that
            whoever else holds it draws from it too.

    Raises:
        KeyError, TypeError, ValueError: it is no such thing.
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if type(value) is not dict or len(value) != 1:
        raise TypeError(f"a {type(value).__name__} stands for no value")
    ((kind, held),) = value.items()
    if kind == "array":
        name, shape, text = held
        return np.frombuffer(b64decode(text), np.dtype(name)).reshape(shape).copy()
    if kind == "number":
        name, text = held
        return np.frombuffer(b64decode(text), np.dtype(name))[0]
    if kind in _LISTS:
        return _LISTS[kind]([decode(item) for item in held])
    if kind == "dict":
        return {decode(key): decode(item) for key, item in held}
    if kind == "deque":
        longest, items = held
        return deque([decode(item) for item in items], longest)
    if kind == "bytes":
        return b64decode(held)
    if kind == "tensor":
        return torch.from_numpy(decode(held))
    if kind == "TensorDict":
        size, entries = held
        return TensorDict(decode(entries), batch_size=size)
    if kind in _GENERATORS:
        return _GENERATORS[kind](decode(held), before)
    raise ValueError(f"{kind!r} is no kind of value")


def _generator(state: Any, before: Any) -> np.random.Generator:
    name = state["bit_generator"]
    if name not in _BIT_GENERATORS:
        raise ValueError(f"{name!r} is no bit generator of numpy's")
    made = isinstance(before, np.random.Generator)
    if not made or type(before.bit_generator).__name__ != name:
        before = np.random.Generator(getattr(np.random, name)())
    before.bit_generator.state = state
    return before


def _random_state(state: Any, before: Any) -> np.random.RandomState:
    held = before if isinstance(before, np.random.RandomState) else np.random.RandomState()
    held.set_state(state)
    return held


def _random(state: Any, before: Any) -> random.Random:
    held = before if type(before) is random.Random else random.Random()
    held.setstate(state)
    return held


def _torch_generator(state: Any, before: Any) -> torch.Generator:
    held = before if isinstance(before, torch.Generator) else torch.Generator()
    held.set_state(state)
    return held


_GENERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Generator": _generator,
    "RandomState": _random_state,
    "Random": _random,
    "torch.Generator": _torch_generator,
}


def _text(content: bytes) -> str:
    return b64encode(content).decode()
