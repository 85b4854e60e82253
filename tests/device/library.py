"""The library of ``standin.cpp``: whether this machine can have it, and its build. No torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from klrl.base.cache import cache_dir
from klrl.base.files import replacing

SOURCE = Path(__file__).with_name("standin.cpp")
#: The user's cache, also where tests have one of their own; so for the processes that they start.
CACHE = Path(os.environ.setdefault("KLRL_STANDIN", str(cache_dir() / "standin")))
VERSION = importlib.metadata.version("torch")


def _compiler() -> str | None:
    from klrl.runs.machine import cxx  # and with it hydra, which pytest wants to import first

    return cxx()


def unusable() -> str | None:
    """Why there can be no stand-in here."""
    if not sys.platform.startswith("linux"):
        return "the stand-in for CUDA is built on Linux alone"
    if "+cpu" not in VERSION:
        return f"torch {VERSION} is not a CPU build, which the stand-in for CUDA needs"
    return None if _compiler() else "the stand-in for CUDA needs a C++ compiler; none is installed"


def torch_folder() -> Path:
    """Where torch is installed."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    return Path(str(spec.origin)).parent


def build() -> Path:
    """The library, of this source and this torch; the first process builds it, others wait."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    library = CACHE / f"{VERSION}-{sys.implementation.cache_tag}-{digest}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            compiler, include, lib = _compiler(), torch_folder() / "include", torch_folder() / "lib"
            assert compiler is not None
            with replacing(library) as partial:
                flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-o", str(partial)]
                folders = [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{lib}"]
                links = ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
                subprocess.run([compiler, *flags, str(SOURCE), *folders, *links], check=True)
    return library
