"""Aliases of modules: public names, and the names that modules had in 0.1.0.

:class:`Moved` is a finder of Python's import system. For these names it returns the module itself,
the same object under both names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: ``python -m NAME`` -> the module that it runs.
COMMANDS = {
    "klrl.evaluate": "klrl.cli.evaluate",
    "klrl.diff": "klrl.cli.diff",
    "klrl.plan": "klrl.cli.plan",
    "klrl.report.__main__": "klrl.cli.report",
    "klrl.doctor.__main__": "klrl.cli.doctor",
}

#: Names that klrl's pages use -> the modules.
PUBLIC = {"klrl.kl.llm": "klrl.transforms.llm"}

#: Module names of version 0.1.0's architecture page -> the modules now.
MOVED = {
    "klrl.advantage": "klrl.control.advantage",
    "klrl.checkpoint": "klrl.runs.checkpoint",
    "klrl.checks": "klrl.config.checks",
    "klrl.compiled": "klrl.control.compiled",
    "klrl.curves": "klrl.runs.curves",
    "klrl.envs": "klrl.control.env",
    "klrl.errors": "klrl.base.errors",
    "klrl.kl.base": "klrl.transforms.base",
    "klrl.kl.build": "klrl.control.kl",
    "klrl.kl.collector_policy": "klrl.transforms.retrieve_kl",
    "klrl.kl.computation": "klrl.transforms.computation",
    "klrl.kl.constrained": "klrl.transforms.constrained",
    "klrl.kl.divergence": "klrl.kl.estimators",
    "klrl.kl.legacy": "klrl.transforms.legacy",
    "klrl.kl.retrieve": "klrl.transforms.retrieve",
    "klrl.kl.retrieve_kl": "klrl.transforms.retrieve_kl",
    "klrl.kl.workers": "klrl.transforms.workers",
    "klrl.learner": "klrl.train.learner",
    "klrl.load": "klrl.api",
    "klrl.loggers": "klrl.runs.loggers",
    "klrl.metrics": "klrl.runs.metrics",
    "klrl.models": "klrl.control.actor",
    "klrl.preflight": "klrl.runs.machine",
    "klrl.progress": "klrl.runs.progress",
    "klrl.record": "klrl.runs.record",
    "klrl.resume": "klrl.runs.resume",
    "klrl.rollout": "klrl.control.rollout",
    "klrl.run_folder": "klrl.runs.folder",
    "klrl.seeds": "klrl.base.seeds",
    "klrl.training": "klrl.train.loop",
    "klrl.update": "klrl.control.step",
}


class Moved(MetaPathFinder, Loader):
    """Finds the modules of :data:`PUBLIC` and :data:`MOVED` under their other names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for another name; None for every other module."""
        if fullname in COMMANDS:
            # A second module from the same file: runpy asks for the code by this name.
            spec = importlib.util.find_spec(COMMANDS[fullname])
            assert spec is not None
            return importlib.util.spec_from_file_location(fullname, spec.origin)
        if fullname in MOVED:
            text = f"{fullname} is {MOVED[fullname]} since klrl 0.2; import that"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        elif fullname not in PUBLIC:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself."""
        module = importlib.import_module(PUBLIC.get(spec.name) or MOVED[spec.name])
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
