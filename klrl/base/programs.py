"""Keeps files of the current folder, which may be a stranger's, from starting as programs."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def protect() -> None:
    """Keep this process and its child processes from running programs of the current folder.

    A program is called by its name, so drop relative entries of PATH, such as ``.``. On import,
    mujoco's package glfw starts a Python that would import modules of the current folder, to search
    a library whose path PYGLFW_LIBRARY gives.
    """
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(filter(os.path.isabs, path))
    if spec := find_spec("glfw"):
        wayland = os.environ.get("XDG_SESSION_TYPE") == "wayland"  # chosen as by glfw
        kind = os.environ.get("PYGLFW_LIBRARY_VARIANT") or ("wayland" if wayland else "x11")
        folder = Path(spec.origin or "").parent
        found = [*folder.glob(f"{kind.lower()}/libglfw*"), *folder.glob("libglfw*")]
        system = "libglfw.3.dylib" if sys.platform == "darwin" else "libglfw.so.3"
        os.environ.setdefault("PYGLFW_LIBRARY", str(next(iter(found), system)))
