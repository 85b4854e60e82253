"""A checkpoint entry of klrl 0.1.0, format 1: what ``torchrl.checkpoint`` wrote, read without it.

Per component ``state.json`` (the state's shape, see :func:`klrl.runs.state.decode`) and a folder
``state`` with the tensors as they lie in memory, described by its ``meta.json``. TorchRL and
tensordict would map those files for writing, which lengthens one that was cut, and would unpickle
others beside them (``other.pickle``, ``pickle.pkl``, ``state.pt``). Here only those three kinds of
file are opened, for reading.

This format has no checksums: a file of the right length is taken.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from klrl.runs.entry import MANIFEST, DamagedEntry, check_length, lengths, manifest_bytes, reading
from klrl.runs.state import DTYPES, decode

_NAME = "torchrl.checkpoint"
_OURS = re.compile(r"components/[\w-]+/(state\.json|state/meta\.json|state/tensor_\d{8}\.memmap)")
_FLAT = "<class 'tensordict._td.TensorDict'>"
_DTYPES = {str(dtype): dtype for dtype in DTYPES}


def is_v1(path: Path) -> bool:
    """Whether an entry says that it is of format 1."""
    with reading(MANIFEST):
        return json.loads(manifest_bytes(path))["format"] == _NAME


class EntryV1:
    """An entry of format 1; as :class:`klrl.runs.entry.Entry`.

    Raises:
        DamagedEntry: its manifest cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(MANIFEST):
            manifest = json.loads(manifest_bytes(path))
            if manifest["format_version"] != 1:
                raise ValueError("its format is unknown to this version of klrl")
            self.metadata = dict(manifest["metadata"])
            self.frames = int(self.metadata["frames"])
            self._files = {
                str(name): [f"{told['path']}/{file}" for file in told["files"]]
                for name, told in manifest["components"].items()
            }

    def check(self) -> None:
        """Compare the files with the manifest, and their lengths with the tensors' sizes.

        Raises:
            DamagedEntry: a file is missing, superfluous, of another kind, or of another length.
        """
        names = [name for listed in self._files.values() for name in listed]
        present = lengths(self.path, names, _OURS)
        for component in self._files:
            self._shape(component)
            for name, (dtype, shape) in self._tensors(component).items():
                if size := math.prod(shape) * dtype.itemsize:  # an empty tensor has no file
                    check_length(name, present.get(name, 0), size)

    def state(self, component: str, device: torch.device) -> Any:
        """A component's state, with its tensors on a device; None where the entry has none.

        Raises:
            DamagedEntry: it cannot be read.
        """
        if component not in self._files:
            return None
        tensors: dict[str, Tensor] = {}
        for name, (dtype, shape) in self._tensors(component).items():
            with reading(name):
                tensor = torch.empty(shape, dtype=dtype)
                if tensor.numel():
                    raw = bytearray((self.path / name).read_bytes())
                    tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
            tensors[Path(name).stem] = tensor.to(device)
        with reading(self._file(component, "state.json")):
            return decode(self._shape(component), tensors)

    def _shape(self, component: str) -> Any:
        """What :func:`klrl.runs.state.decode` reads."""
        name = self._file(component, "state.json")
        with reading(name):
            return json.loads((self.path / name).read_bytes())

    def _tensors(self, component: str) -> dict[str, tuple[torch.dtype, list[int]]]:
        """File below the entry -> dtype and shape of its tensor."""
        name = self._file(component, "state/meta.json")
        with reading(name):
            told = json.loads((self.path / name).read_bytes())
            if told.pop("_type") != _FLAT:
                raise ValueError("it is no plain TensorDict")
            tensors = {key: about for key, about in told.items() if isinstance(about, dict)}
            return {
                name.replace("meta.json", f"{key}.memmap"): (
                    _DTYPES[about["dtype"]],
                    [int(size) for size in about["shape"]],
                )
                for key, about in tensors.items()
            }

    def _file(self, component: str, name: str) -> str:
        """Of the files that the manifest lists for a component, the one of that name."""
        for file in self._files[component]:
            if _OURS.fullmatch(file) and file.endswith(f"/{name}"):
                return file
        raise DamagedEntry(f"{component}: has no {name}")
