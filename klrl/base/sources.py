"""Identifies the source of a user's module: by folder and file digest, or by version."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path

_DIGITS = 12
#: Names of the folders into which package managers install packages.
_PACKAGES = {"site-packages", "dist-packages"}
#: Names of folders inside a package that do not belong to its source.
_NOT_SOURCE = {"__pycache__", "outputs", "site-packages", "node_modules"}
#: ``module.inner:Name``, as in Gymnasium's ``entry_point``: an import of the group, ``module``.
_ENTRY_POINT = re.compile(r"([A-Za-z_]\w*)[\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Source:
    """The source of a module."""

    folder: str  # the parent folder of the top-level module or package
    #: Twelve hexadecimal digits of a SHA-256 over the files. None if the version identifies the
    #: source, as for a package from PyPI or a requirement of klrl.
    digest: str | None
    version: str | None  # the version of the installed distribution; None without one

    def __str__(self) -> str:
        return f"source {self.digest}" if self.digest else f"version {self.version}"


def source_of(module: str, folders: Sequence[str] = ()) -> Source:
    """Find the source of a module or of ``path/file.py``, without importing it.

    The digest covers all ``.py`` files of the top-level package, or the single file. It also covers
    the modules that these files import, directly or not, except those that a version identifies.
    Imports by a computed name are not found. ``folders`` are searched after Python's path.

    Raises:
        ImportError: the module has no file.
    """
    file = Path(module).resolve() if module.endswith(".py") else None
    top = module.partition(".")[0] if file is None else str(file)
    folders = folders if file is None else [*folders, str(file.parent)]  # for the file's imports
    places = _source_paths(top, folders)
    if not places:
        raise ImportError(f"{top} has no source file")
    digest = None if _released(top, places[0]) else _digest(top, folders)
    found = _distribution(top, by_name=not _installed(places[0]))
    return Source(str(places[0].parent), digest, found.version if found else None)


def find(top: str, folders: Sequence[str] = ()) -> ModuleSpec | None:
    """Find the spec of a top-level module or a file; search ``folders`` after Python's path."""
    if top.endswith(".py"):
        path = Path(top).resolve()
        return spec_from_file_location(path.stem, path) if path.is_file() else None
    try:
        if top not in sys.modules and (spec := PathFinder.find_spec(top, [*sys.path, *folders])):
            return spec
        return importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return None


@cache
def requirements() -> frozenset[str]:
    """Return the distributions that klrl and its extras require, as names like ``ale_py``."""
    try:
        lines = importlib.metadata.requires("klrl") or ()
    except importlib.metadata.PackageNotFoundError:
        return frozenset()
    names = (re.match(r"[\w.-]+", each) for each in lines)
    return frozenset(name[0].lower().replace("-", "_") for name in names if name)


def belongs_to_klrl(top: str) -> bool:
    """Return whether a top-level module is klrl or an installed requirement of klrl."""
    places = _source_paths(top) if top in requirements() else []
    return top == "klrl" or bool(places and _installed(places[0]))


def _source_paths(top: str, folders: Sequence[str] = ()) -> list[Path]:
    """Return the file of a top-level module, or the folders of a package; [] if not found."""
    spec = find(top, folders)
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [Path(each).resolve() for each in spec.submodule_search_locations]
    file = Path(spec.origin) if spec.origin else None
    return [file.resolve()] if file is not None and file.suffix == ".py" else []


def _installed(place: Path) -> bool:
    """Return whether a path belongs to the standard library or to an installed package."""
    library = (Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
    return bool(_PACKAGES & set(place.parts)) or any(place.is_relative_to(each) for each in library)


def _released(top: str, place: Path) -> bool:
    """Return whether a version identifies the code, as for a package from PyPI."""
    if top in requirements() or not _PACKAGES & set(place.parts):
        return _installed(place)
    found = _distribution(top)
    # pip writes direct_url.json if it installs from a folder, a file or a repository, not PyPI.
    return found is not None and not found.read_text("direct_url.json")


def _digest(top: str, folders: Sequence[str]) -> str:
    """Return a digest over the names and bytes of all :func:`imported_files`."""
    digest = hashlib.sha256()
    for name, files in sorted(imported_files(top, folders).items()):
        for inner, file in files:
            digest.update(f"{name}/{inner}\0".encode())
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:_DIGITS]


def imported_files(top: str, folders: Sequence[str]) -> dict[str, list[tuple[str, Path]]]:
    """Map ``top`` and each module that it imports, directly or not, to its files: (name, path).

    The standard library and klrl are left out.

    The list is empty for a module that a version identifies.
    """
    found: dict[str, list[tuple[str, Path]]] = {}
    waiting = [top]
    while waiting:
        name = waiting.pop()
        if name in found or name in sys.stdlib_module_names or name == "klrl":
            continue
        places = [place for place in _source_paths(name, folders) if not _released(name, place)]
        found[name] = [each for place in places for each in _files(place)]
        waiting += [other for _, file in found[name] for other in _imported(file)]
    return found


def _files(place: Path) -> Iterator[tuple[str, Path]]:
    if place.is_file():
        yield place.name, place
        return
    for file in sorted(place.rglob("*.py")):
        inner = file.relative_to(place)
        if not _NOT_SOURCE & set(inner.parts) and not any(p.startswith(".") for p in inner.parts):
            yield inner.as_posix(), file


def _imported(file: Path) -> set[str]:
    """Return the top-level modules that a file imports, except by relative imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Constant) and (named := _ENTRY_POINT.fullmatch(str(node.value))):
            names.add(named[1])
    return names


def _distribution(top: str, *, by_name: bool = False) -> importlib.metadata.Distribution | None:
    """Find the distribution of a top-level module; with ``by_name``, it must have the same name."""
    # Without ``by_name``, _owners() reads all distributions, which takes a tenth of a second.
    for name in (top,) if by_name else (top, *_owners().get(top, ())):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.distribution(name)
    return None


@cache
def _owners() -> Mapping[str, Sequence[str]]:
    return importlib.metadata.packages_distributions()
