"""Keeps files of the current folder, which may be a stranger's, from starting as programs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

#: Environment variables: Python does not search the current folder first; klrl set the former.
_SAFE, _ADDED = "PYTHONSAFEPATH", "KLRL_SAFEPATH"


@contextmanager
def safe_children() -> Iterator[None]:
    """Keep Pythons that libraries start from importing the current folder's modules first.

    :func:`protect` removes the variables in a child, so that the user's programs do not get them.
    """
    added = {} if os.environ.get(_SAFE) else {_SAFE: "1", _ADDED: "1"}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def protect() -> None:
    """Keep this process and its child processes from running programs of the current folder."""
    if os.environ.pop(_ADDED, None):
        os.environ.pop(_SAFE, None)
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(filter(os.path.isabs, path))  # without entries such as .
    # When mujoco imports glfw, glfw searches its library by a Python that imports modules of the
    # current folder, unless it is given the library.
    if spec := find_spec("glfw"):
        wayland = os.environ.get("XDG_SESSION_TYPE") == "wayland"
        kind = os.environ.get("PYGLFW_LIBRARY_VARIANT", "wayland" if wayland else "x11").lower()
        folder = Path(spec.origin or "").parent
        found = [*folder.glob(f"{kind}/libglfw*"), *folder.glob("libglfw*"), "libglfw.so.3"]
        os.environ.setdefault("PYGLFW_LIBRARY", str(found[0]))
