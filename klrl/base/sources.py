"""The source of a module of the user's: where it lies, a digest over its files, its version."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DIGITS = 12
#: Folders of a package whose files are no part of it.
_NOT_SOURCE = {"__pycache__", "outputs", "site-packages", "node_modules"}


@dataclass(frozen=True)
class Source:
    """Where a module comes from.

    Attributes:
        folder: that holds its top-level module or package.
        digest: twelve hexadecimal digits over its local files; None for an installed package, whose
            version says what it is.
        version: of the distribution that it belongs to; None without one.
    """

    folder: str
    digest: str | None
    version: str | None


def source_of(module: str) -> Source:
    """The source of an importable module.

    All ``.py`` files of its top-level package count, or its one file; and those of the local
    modules that they import, wherever an ``import`` stands. What is imported by a computed name is
    not seen.

    Raises:
        ImportError: the module has no file.
    """
    top = module.partition(".")[0]
    places = _places(top)
    if not places:
        raise ImportError(f"{top} has no source file")
    local = not _installed(places[0])
    digest = _digest(top) if local else None
    return Source(str(places[0].parent), digest, _version(top, installed=not local))


def _places(top: str) -> list[Path]:
    """The file of a top-level module, or the folders of a package; empty for others."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [Path(each).resolve() for each in spec.submodule_search_locations]
    file = Path(spec.origin) if spec.origin else None
    return [file.resolve()] if file is not None and file.suffix == ".py" else []


def _installed(place: Path) -> bool:
    """Whether a package manager or Python itself put it there."""
    library = (Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
    packages = {"site-packages", "dist-packages"} & set(place.parts)
    return bool(packages) or any(place.is_relative_to(folder) for folder in library)


def _digest(top: str) -> str:
    """Over the names and bytes of all local files that a top-level module reaches."""
    digest = hashlib.sha256()
    for name, files in sorted(_reached(top).items()):
        for inner, file in files:
            digest.update(f"{name}/{inner}\0".encode())
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:_DIGITS]


def _reached(top: str) -> dict[str, list[tuple[str, Path]]]:
    """Local top-level module -> its files, with their names below it; from one on."""
    reached: dict[str, list[tuple[str, Path]]] = {}
    waiting = [top]
    while waiting:
        name = waiting.pop()
        if name in reached or name in sys.stdlib_module_names or name == "klrl":
            continue
        places = [place for place in _places(name) if not _installed(place)]
        reached[name] = [each for place in places for each in _files(place)]
        waiting += [other for _, file in reached[name] for other in _imported(file)]
    return reached


def _files(place: Path) -> Iterator[tuple[str, Path]]:
    if place.is_file():
        yield place.name, place
        return
    for file in sorted(place.rglob("*.py")):
        inner = file.relative_to(place)
        if not _NOT_SOURCE & set(inner.parts) and not any(p.startswith(".") for p in inner.parts):
            yield inner.as_posix(), file


def _imported(file: Path) -> set[str]:
    """The top-level modules that a file imports by full name; relative ones are in its package."""
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
    return names


def _version(top: str, *, installed: bool) -> str | None:
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        if not installed:
            return None
    # A distribution of another name; to look through all of them takes a tenth of a second.
    names = importlib.metadata.packages_distributions().get(top, [])
    return importlib.metadata.version(names[0]) if names else None
