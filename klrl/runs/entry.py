"""Writes and reads a checkpoint entry (format 4): a folder of two plain files and their manifest.

``state.safetensors`` contains the tensors of all components, ``state.json`` the rest of their
states. ``manifest.json``, written last, contains the length and SHA-256 of both files, and a
SHA-256 of its own text. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from klrl.base.errors import first_line
from klrl.base.files import read_plain, sync, writing
from klrl.runs.state import Component, decode, encode, safetensors_chunks

MANIFEST = "manifest.json"
_STATE, _TENSORS = "state.json", "state.safetensors"
#: Limit on the size of ``state.json`` in bytes.
_LARGEST = 1 << 28
_NAME = "klrl.checkpoint"
_VERSION = 4
#: The manifest's SHA-256 is computed with this text in place of the digest.
_BLANK = "0" * 64
#: Exceptions that parsing may raise if a file's contents are wrong.
_UNREADABLE = (
    *(AttributeError, LookupError, TypeError, ValueError),
    *(ArithmeticError, RuntimeError, SafetensorError),
)


class DamagedEntry(Exception):
    """An entry is damaged, and must not be used; the message names the file and its fault."""


# ------------------------------------------------------------------------------------- writing


def write_entry(
    folder: Path, components: Mapping[str, Component], frames: int, metadata: Mapping[str, object]
) -> None:
    """Write an entry into a new folder, and sync each file to the disk.

    Raises:
        OSError: writing failed, as on a full disk; an incomplete folder remains.
    """
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    states = {
        name: encode(component.state_dict(), tensors, (name,))
        for name, component in components.items()
    }
    files = {
        _TENSORS: _write(folder / _TENSORS, safetensors_chunks(tensors)),
        _STATE: _write(folder / _STATE, [json.dumps(states).encode()]),
    }
    manifest = {
        "format": _NAME,
        "format_version": _VERSION,
        "frames": frames,
        "metadata": dict(metadata),
        "files": files,
        "sha256": _BLANK,
    }
    text = json.dumps(manifest, indent=2) + "\n"
    _write(folder / MANIFEST, [text.replace(_BLANK, _digest([text.encode()])).encode()])
    sync(folder)


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, object]:
    sha, length = hashlib.sha256(), 0
    with writing(path) as file:
        for chunk in chunks:
            file.write(chunk)
            sha.update(chunk)
            length += len(chunk)
    return {"bytes": length, "sha256": sha.hexdigest()}


# ------------------------------------------------------------------------------------- reading


class CheckpointEntry:
    """Reads an entry of format 4.

    Raises:
        DamagedEntry: the manifest was changed after it was written, is unreadable, or has a
            different format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(MANIFEST):
            raw = read_plain(path / MANIFEST)
            manifest = json.loads(raw)
            name, version = manifest["format"], manifest["format_version"]
            if (name, version) != (_NAME, _VERSION):
                raise ValueError(
                    f"has the format {name} {version}, and this klrl reads {_VERSION}; use the "
                    "klrl that the run's manifest.json names"
                )
            digest = str(manifest["sha256"])
            if _digest([raw.replace(digest.encode(), _BLANK.encode(), 1)]) != digest:
                raise ValueError("its SHA-256 does not match")
            self.frames = int(manifest["frames"])
            self.metadata = dict(manifest["metadata"])
            for mark in self.metadata.get("rows", {}).values():
                if not isinstance(mark.get("bytes", 0), int):
                    raise ValueError("a length of rows is no number")
            self._files = {
                name: (int(manifest["files"][name]["bytes"]), manifest["files"][name]["sha256"])
                for name in (_TENSORS, _STATE)
            }

    def check(self) -> None:
        """Compare every file with the manifest.

        Raises:
            DamagedEntry: a file is missing, is not klrl's, or was changed after it was written.
        """
        with reading(self.path.name):
            present = {path.name for path in self.path.iterdir()}
        if foreign := present - {MANIFEST, *self._files}:
            name = min(foreign)
            raise DamagedEntry(f"{name}: is not a file that klrl writes, and is not opened")
        for name, (length, digest) in self._files.items():
            path = self.path / name
            with reading(name):
                if not path.is_file():
                    raise ValueError("is missing, or is not a regular file")
                if path.stat().st_size != length:
                    raise ValueError(f"has {path.stat().st_size:,} bytes, not {length:,}")
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                        raise ValueError("its SHA-256 does not match")

    def digests(self, components: Iterable[str]) -> dict[str, str]:
        """Return component -> SHA-256 of its tensors; call :meth:`check` first."""
        stored = {name: self._tensors(name) for name in components}
        return {
            name: _digest(safetensors_chunks(tensors))
            for name, tensors in stored.items()
            if tensors
        }

    def state(self, component: str, device: torch.device) -> Any:
        """Return a component's state, with tensors on ``device``; None if the entry lacks it.

        Raises:
            DamagedEntry: the state cannot be read.
        """
        tensors = {name: tensor.to(device) for name, tensor in self._tensors(component).items()}
        with reading(_STATE):
            state = json.loads(read_plain(self.path / _STATE, _LARGEST))
            return decode(state.get(component), tensors)

    def _tensors(self, component: str) -> dict[str, Tensor]:
        """Read a component's tensors, by their names in the file: ``agent/weight``."""
        # With mmap, the default, a file that shrinks while it is read kills the process.
        path = self.path / _TENSORS
        with reading(_TENSORS), safe_open(path, framework="pt", backend="pread") as file:
            names = [name for name in file.keys() if name.startswith(f"{component}/")]
            return {name: file.get_tensor(name) for name in names}


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn an exception that reading a file raises into a DamagedEntry that names the file."""
    try:
        yield
    except OSError as error:
        raise DamagedEntry(f"{name}: {error.strerror or error}") from error
    except KeyError as error:
        raise DamagedEntry(f"{name}: has no {error}") from error
    except _UNREADABLE as error:
        raise DamagedEntry(f"{name}: {first_line(error)}") from error


def _digest(chunks: Iterable[bytes | memoryview]) -> str:
    sha = hashlib.sha256()
    for chunk in chunks:
        sha.update(chunk)
    return sha.hexdigest()
