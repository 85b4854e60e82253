"""Import paths that lead elsewhere: public names of modules, and where modules of 0.1.0 went.

Python asks :class:`Moved` for each module; of these names it answers with the module that is meant,
the same object under both names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

#: Names that klrl's pages use, and the modules behind them. ``python -m`` takes them too.
PUBLIC = {
    "klrl.kl.llm": "klrl.transforms.llm",
    "klrl.evaluate": "klrl.cli.evaluate",
    "klrl.diff": "klrl.cli.diff",
    "klrl.plan": "klrl.cli.plan",
    "klrl.report.__main__": "klrl.cli.report",
    "klrl.doctor.__main__": "klrl.cli.doctor",
}

#: Where the modules went that version 0.1.0's architecture page named.
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
    "klrl.kl.collector_policy": "klrl.transforms.collector_policy",
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


class Moved(MetaPathFinder, InspectLoader):
    """Finds the modules of :data:`PUBLIC` and :data:`MOVED` under their other names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for another name; None for every other module."""
        if fullname not in PUBLIC and fullname not in MOVED:
            return None
        meant = _meant(fullname)
        if fullname in MOVED:
            warnings.warn(
                f"{fullname} is {meant} since klrl 0.2; import that",
                DeprecationWarning,
                stacklevel=2,
            )
        found = importlib.util.find_spec(meant)
        return ModuleSpec(fullname, self, origin=None if found is None else found.origin)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that is meant."""
        module = importlib.import_module(_meant(spec.name))
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It is imported already; the import system wrote the other name's spec into it."""
        module.__spec__ = self._own

    def get_source(self, fullname: str) -> str | None:
        """The text of the module that is meant."""
        spec = importlib.util.find_spec(_meant(fullname))
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_source(spec.name)

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of the module that is meant, for ``python -m``."""
        spec = importlib.util.find_spec(_meant(fullname))
        assert spec is not None
        assert isinstance(spec.loader, InspectLoader)
        return spec.loader.get_code(spec.name)

    def is_package(self, fullname: str) -> bool:
        """Whether the module that is meant has submodules: none has."""
        return False


def _meant(fullname: str) -> str:
    return PUBLIC.get(fullname) or MOVED[fullname]


def install() -> None:
    """Ask :class:`Moved` before all other finders, once.

    Before: a folder of an old version that git left empty would be found as a package.
    """
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, Moved())
