"""Imports the user's modules, and large libraries with the garbage collector paused."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from klrl.base.errors import ConfigError, with_line
from klrl.base.text import nearest


def lazy_attribute(module: str, where: Mapping[str, str], name: str) -> object:
    """Import ``name`` from its module in ``where``, for the ``__getattr__`` of ``module``."""
    if name not in where:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return getattr(importlib.import_module(where[name]), name)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector while modules are imported.

    Importing torch and TorchRL makes several hundred thousand permanent objects. The collector
    would search them repeatedly, which takes a tenth to a fifth of the import time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def import_for_good(*modules: str) -> None:
    """Import modules, and exempt all live objects from garbage collection.

    Otherwise each full collection would take half a second to search the objects of these modules.
    If no module is new, exempt nothing, since reference cycles of exempt objects are never freed.
    """
    if all(module in sys.modules for module in modules):
        return
    with collection_paused():
        for module in modules:
            importlib.import_module(module)
        gc.freeze()


def import_user_module(setting: str, module: str, folder: str | None = None) -> ModuleType:
    """Import a user's module from Python's path, the current folder, or ``folder``.

    Args:
        setting: the setting that names the module, with its value: ``env.reward=mine:score``.
        module: the module's name.
        folder: a folder to search last, such as the folder that a stored run names.
    """
    # Unlike python -m, the installed command klrl does not search the current folder.
    for each in (str(Path.cwd()), folder):
        if each is not None and each not in sys.path:
            sys.path.append(each)
            importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{setting}: importing {module} fails ({with_line(error)}); fix it, or "
            "start klrl in the folder that contains it"
        ) from error


def import_named(setting: str, source: str) -> ModuleType:
    """Import a user's module by its name or its file: ``package.module`` or ``path/file.py``."""
    if not source.endswith(".py"):
        return import_user_module(setting, source)
    path = Path(source).resolve()
    if not path.is_file():
        raise ConfigError(f"{setting}: no such file {source}; fix the path")
    name = f"klrl_file_{path.stem}"
    if getattr(sys.modules.get(name), "__file__", None) == str(path):
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # @dataclass looks up the module of a class by name
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that the file can import modules next to it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{setting}: importing {source} fails ({with_line(error)}); fix it"
        ) from error
    return module


def named_in(setting: str, module: ModuleType, source: str, name: str) -> Callable[..., Any]:
    """Return a module's class or function ``name``; messages call the module ``source``."""
    found: object = module
    for each in name.split("."):
        if not hasattr(found, each):
            known = [key for key in vars(found) if not key.startswith("_")]
            remedy = nearest(each, known) or "; fix the name"
            raise ConfigError(f"{setting}: {source} has no {name}{remedy}")
        found = getattr(found, each)
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"{setting}: is of type {kind}; name a class or a function")
    return found
