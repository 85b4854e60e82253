"""The user's cache folder: compiled updates and the small base model; what in it to trust."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from klrl.base.files import replacing


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/klrl``, by default ``~/.cache/klrl``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "klrl"


class Untrusted(Exception):
    """A file or folder of the cache that others than this user can, or could, have written."""


def private_folder(path: Path) -> None:
    """Make a folder, and the one that it lies in, for this user alone.

    Raises:
        Untrusted: one of them is another user's, or can be written by others.
        OSError: it cannot be made.
    """
    for folder in (path.parent, path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)


def write_digest(path: Path, contents: Path) -> None:
    """Write the SHA-256 that :func:`check_digest` asks for; both files become this user's alone.

    Args:
        path: where the file will lie.
        contents: where it lies now.
    """
    with replacing(_digest_path(path)) as partial:
        partial.write_text(_sha256(contents) + "\n", encoding="utf-8")
        for file in (partial, contents):
            file.chmod(0o600)  # with umask 002 the group could write them


def check_digest(path: Path) -> None:
    """Refuse a file that is not as it was written.

    Raises:
        Untrusted: it or its SHA-256 is another user's, or they do not belong together.
        OSError: it, or its SHA-256, cannot be read.
    """
    _check_owner(path)
    _check_owner(_digest_path(path))
    if _digest_path(path).read_text(encoding="utf-8").strip() != _sha256(path):
        raise Untrusted("it is damaged, its SHA-256 is another")


def _digest_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_owner(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise Untrusted(f"{path} belongs to another user (uid {status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(f"{path} can be written by others (chmod go-w)")
