"""Aliases of modules: the public names of pages.

:class:`Moved` is a finder of Python's import system. For these names it returns the module itself,
the same object under both names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: ``python -m NAME``, with which ``klrl/cli/module.py`` runs a command.
COMMANDS = (
    *("klrl.evaluate", "klrl.diff", "klrl.plan"),
    *("klrl.report.__main__", "klrl.doctor.__main__"),
)

#: Names that klrl's pages use -> the modules.
PUBLIC = {"klrl.kl.llm": "klrl.envs.llm.transforms.kl"}


class Moved(MetaPathFinder, Loader):
    """Finds the modules of :data:`PUBLIC` under their other names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for another name; None for every other module."""
        if fullname in COMMANDS:
            # A second module from the same file: runpy asks for the code by this name.
            spec = importlib.util.find_spec("klrl.cli.module")
            assert spec is not None
            return importlib.util.spec_from_file_location(fullname, spec.origin)
        if fullname not in PUBLIC:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself."""
        module = importlib.import_module(PUBLIC[spec.name])
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system replaced by the alias's."""
        module.__spec__ = self._own


def install() -> None:
    """Put :class:`Moved` before all other finders, once.

    After them, an empty folder that git left of an old version would be found as a package.
    """
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, Moved())
