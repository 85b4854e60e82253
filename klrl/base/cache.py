"""Finds and protects the user's cache folder (compiled code, models) and state folder."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from klrl.base.files import expanded, replacing, writing
from klrl.base.programs import safe_children


def cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/klrl``, by default ``~/.cache/klrl``."""
    return _home("XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """Return ``$XDG_STATE_HOME/klrl``, by default ``~/.local/state/klrl``."""
    return _home("XDG_STATE_HOME", ".local/state")


def _home(variable: str, default: str) -> Path:
    given = os.environ.get(variable, "")
    # The XDG specification says to ignore a relative path.
    return (Path(given) if Path(given).is_absolute() else Path.home() / default) / "klrl"


#: Environment variable that lists the trusted runs, one per line. Child processes inherit it.
_TRUSTED = "KLRL_TRUST"


def trust(run: str | Path) -> None:
    """Let this process and its child processes import the code that a run's settings name."""
    os.environ[_TRUSTED] = f"{os.environ.get(_TRUSTED, '')}\n{expanded(run).resolve()}"


def trusted(run: Path) -> bool:
    """Return whether :func:`trust` was called for a run."""
    return str(run.resolve()) in os.environ.get(_TRUSTED, "").splitlines()


class Untrusted(Exception):
    """A file or folder that klrl reads may have been written by another user, or is damaged."""


def private_folder(path: Path) -> None:
    """Make a folder and its parent with mode 700, unless they exist.

    Raises:
        Untrusted: the folder or its parent belongs to another user, or others can write to it.
        OSError: the folder cannot be made.
    """
    for folder in (path.parent, path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)


@contextmanager
def compiling() -> Iterator[None]:
    """Make torch's compiler keep its files in klrl's cache, unless the user set other folders.

    The compiler's default folder, ``$TMPDIR/torchinductor_USER``, is unsafe: another user can make
    it first. Importing torch sets TORCHINDUCTOR_CACHE_DIR to this folder. Precompiled headers are
    written below TMPDIR, whatever this variable says. Raises as :func:`private_folder` does.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = cache_dir() / "compiler"
    private_folder(folder)
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") == default_cache_dir():
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)  # the compiler's processes inherit TMPDIR
    try:
        with safe_children():
            yield
    finally:
        del os.environ["TMPDIR"]
        os.environ.update({"TMPDIR": before[0]} if before[0] is not None else {})
        tempfile.tempdir = before[1]


def write_digest(path: Path, contents: Path) -> None:
    """Write the digest file of ``path``. The caller then moves the file ``contents`` to ``path``.

    The digest is that of ``contents``. Both files get mode 600.
    """
    with replacing(_digest_path(path)) as partial:
        with writing(partial) as file:
            file.write(f"{_sha256(contents)}\n".encode())
        for each in (partial, contents):
            each.chmod(0o600)  # with umask 002 the group could write to both


def check_digest(path: Path) -> None:
    """Refuse a file that was changed after klrl wrote it.

    Raises:
        Untrusted: the file or its ``.sha256`` belongs to another user, others can write to it, or
            the digest does not match.
        OSError: the file or its ``.sha256`` cannot be read.
    """
    _check_owner(path)
    _check_owner(_digest_path(path))
    if _digest_path(path).read_bytes().strip() != _sha256(path).encode():
        raise Untrusted("it is damaged, its SHA-256 does not match")


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
