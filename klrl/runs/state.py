"""Encodes a component's state for files: tensors as safetensors, all else as JSON."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

#: dtype -> its name in safetensors, https://huggingface.co/docs/safetensors#format.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


#: The state of a component: nested numbers, texts and tensors.
State: TypeAlias = Mapping[str, Any]


class Component(Protocol):
    """An object whose state a checkpoint stores by name."""

    def state_dict(self) -> State:
        """Return the state that a resumed run needs."""

    def load_state_dict(self, state: State, /) -> object:
        """Restore the state."""


def encode(value: object, tensors: dict[str, Tensor], path: tuple[str, ...] = ()) -> Any:
    """Encode a state as JSON values; add its tensors to ``tensors`` by path, such as a/b.

    Numbers, strings, booleans and None are unchanged; any other value becomes a mapping with a
    ``kind``.
    """
    if isinstance(value, Tensor):
        name = "/".join(path)
        if name in tensors:
            raise ValueError(f"a state has two tensors named {name}")
        tensors[name] = value.detach()
        return {"kind": "tensor", "key": name}
    if isinstance(value, Mapping):
        items = [[key, encode(item, tensors, (*path, str(key)))] for key, item in value.items()]
        metadata = getattr(value, "_metadata", None)  # a module's state_dict has versions there
        if metadata is None:
            return {"kind": "dict", "items": items}
        return {"kind": "ordered_dict", "items": items, "metadata": encode(metadata, {})}
    if isinstance(value, list | tuple):
        items = [encode(item, tensors, (*path, str(i))) for i, item in enumerate(value)]
        return {"kind": "tuple" if isinstance(value, tuple) else "list", "items": items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a state has a {type(value).__name__} at {'/'.join(path)}; no checkpoint can store that"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that :func:`encode` encoded as ``value`` and ``tensors``."""
    if not isinstance(value, dict):
        return value
    kind = value["kind"]
    if kind == "tensor":
        return tensors[value["key"]]
    if kind in ("dict", "ordered_dict"):
        state = OrderedDict((key, decode(item, tensors)) for key, item in value["items"])
        if kind == "dict":
            return dict(state)
        state._metadata = decode(value["metadata"], {})  # type: ignore[attr-defined]
        return state
    if kind in ("tuple", "list"):
        items = [decode(item, tensors) for item in value["items"]]
        return tuple(items) if kind == "tuple" else items
    raise ValueError(f"a state has a value of kind {kind!r}")


def safetensors_chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in chunks, without a second copy of all tensors in memory.

    ``safetensors.torch.save_file`` refuses tied and non-contiguous tensors. It also does not return
    the bytes that it writes, but the caller has to hash them.
    """
    # Write the widest dtypes first, so that each tensor begins at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise TypeError(f"the tensor {name} is {tensor.dtype}; no checkpoint can store that")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.numel():
            # One element that was expanded has the stride 0, and counts as contiguous.
            flat = tensor.cpu().contiguous().as_strided((tensor.numel(),), (1,))
            yield flat.view(torch.uint8).numpy().data
