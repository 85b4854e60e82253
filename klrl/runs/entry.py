"""Writes and reads a checkpoint entry (format 3): a folder of plain files and their manifest.

``NAME.safetensors`` contains the tensors of component NAME; ``state.json`` contains the rest of the
components' states. ``manifest.json``, written last, contains the length and SHA-256 of each of
these files, and a SHA-256 of its own text. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from klrl.base.errors import first_line
from klrl.base.files import read_plain, sync, writing
from klrl.runs.state import Component, decode, encode, safetensors_chunks

MANIFEST = "manifest.json"
_STATE = "state.json"
#: Limit on the size of ``state.json`` in bytes.
_LARGEST = 1 << 28
_NAME = "klrl.checkpoint"
_VERSION = 3
_OURS = re.compile(r"state\.json|\w+\.safetensors")
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
    files, states = {}, {}
    for name, component in components.items():
        tensors: dict[str, Tensor] = {}
        states[name] = encode(component.state_dict(), tensors)
        if tensors:
            file = f"{name}.safetensors"
            files[file] = _write(folder / file, safetensors_chunks(tensors))
    files[_STATE] = _write(folder / _STATE, [json.dumps(states).encode()])
    manifest = {
        "format": _NAME,
        "format_version": _VERSION,
        "frames": frames,
        "metadata": dict(metadata),
        "files": files,
        "sha256": _BLANK,
    }
    text = json.dumps(manifest, indent=2) + "\n"
    _write(folder / MANIFEST, [text.replace(_BLANK, _digest(text.encode())).encode()])
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
    """Reads an entry of format 3.

    Raises:
        DamagedEntry: the manifest was changed after it was written, is unreadable, or has a
            different format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(MANIFEST):
            raw = read_plain(path / MANIFEST)
            manifest = json.loads(raw)
            if (manifest["format"], manifest["format_version"]) != (_NAME, _VERSION):
                raise ValueError("its format is that of another version of klrl")
            digest = str(manifest["sha256"])
            if _digest(raw.replace(digest.encode(), _BLANK.encode(), 1)) != digest:
                raise ValueError("its SHA-256 does not match")
            self.frames = int(manifest["frames"])
            self.metadata = dict(manifest["metadata"])
            for mark in self.metadata.get("rows", {}).values():
                if not isinstance(mark.get("bytes", 0), int):
                    raise ValueError("a length of rows is no number")
            self._files = {
                str(name): (int(listed["bytes"]), str(listed["sha256"]))
                for name, listed in manifest["files"].items()
            }

    def check(self) -> None:
        """Compare every file with the manifest.

        Raises:
            DamagedEntry: a file is missing, is not listed, or was changed after it was written.
        """
        present = self._lengths()
        for name, (length, digest) in self._files.items():
            if present[name] != length:
                raise DamagedEntry(f"{name}: has {present[name]:,} bytes, not {length:,}")
            with reading(name), (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise ValueError("its SHA-256 does not match")

    def _lengths(self) -> dict[str, int]:
        """Return file name -> length; refuse missing files, and files that the manifest lacks."""
        present = {}
        with reading(self.path.name):
            for path in self.path.rglob("*"):
                if path.is_dir() and not path.is_symlink():
                    continue
                name = path.relative_to(self.path).as_posix()
                if not path.is_file() or (name not in self._files and name != MANIFEST):
                    raise DamagedEntry(f"{name}: is not in its manifest, and is not opened")
                present[name] = path.stat().st_size
        for name in self._files:
            if not _OURS.fullmatch(name):
                raise DamagedEntry(f"{name}: is not a file that klrl writes, and is not opened")
            if name not in present:
                raise DamagedEntry(f"{name}: is missing")
        return present

    def digests(self, components: Iterable[str]) -> dict[str, str]:
        """Return component -> its tensors' SHA-256 in the manifest; call :meth:`check` first."""
        named = {name: self._files.get(f"{name}.safetensors") for name in components}
        return {name: listed[1] for name, listed in named.items() if listed is not None}

    def state(self, component: str, device: torch.device) -> Any:
        """Return a component's state, with tensors on ``device``; None if the entry lacks it.

        Raises:
            DamagedEntry: the state cannot be read.
        """
        file = f"{component}.safetensors"
        tensors: dict[str, Tensor] = {}
        if file in self._files:
            with reading(file):
                # With mmap, the default, a file that shrinks while it is read kills the process.
                tensors = load_file(self.path / file, backend="pread")
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        with reading(_STATE):
            state = json.loads(read_plain(self.path / _STATE, _LARGEST))
            return decode(state.get(component), tensors)


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


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
