"""Models that are made once and cached: below a lock, and renamed when all is written.

An interrupted build leaves nothing, and two processes build one model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from klrl.base.cache import cache_dir
from klrl.base.errors import ConfigError
from klrl.base.files import replacing


def cached(name: str, build: Callable[[Path], object], cache: Path | None = None) -> Path:
    """The folder of this name in the cache; built first if the cache has none.

    Args:
        name: of the folder; everything that its content depends on must be in it.
        build: writes into an empty folder.
        cache: default: :func:`klrl.base.cache.cache_dir`.
    """
    cache = cache or cache_dir()
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _only_builder(cache / f"{name}.lock"):
            if not folder.is_dir():
                _build_into(folder, build)
    except OSError as error:
        raise ConfigError(
            f"XDG_CACHE_HOME: the model cannot be written to {cache} "
            f"({error.strerror or error}); point it to a folder that can"
        ) from error
    return folder


@contextmanager
def _only_builder(path: Path) -> Iterator[None]:
    """Hold the lock of one model; the system frees it when its holder dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print("another process is building the model; waiting for it", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build_into(folder: Path, build: Callable[[Path], object]) -> None:
    """Build beside the folder, then rename. Only the holder of the lock calls this."""
    for stale in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with replacing(folder) as partial:
        partial.mkdir()
        build(partial)
