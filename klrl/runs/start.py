"""Starts a run in its own folder, and removes the folder again if no run begins in it."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.imports import collection_paused
from klrl.config import JobConfig
from klrl.runs.folder import RunFolder, new_path
from klrl.runs.owner import OwnedElsewhere


class OwnFolder:
    """The folder of a run or of a sweep, made if it is missing.

    Args:
        given: its path; None for a new one below ``outputs/``.
        setting: where the path was given, for error messages.
        suffix: the end of a new folder's name.
    """

    def __init__(self, given: str | None, setting: str, suffix: str = "") -> None:
        self._given, self._setting = given, setting
        self.path = Path(given) if given is not None else new_path(suffix)
        try:
            self.holds_run = given is not None and any(self.path.glob("**/manifest.json"))
            # Entries that the folder had before, which stay; None for a new folder.
            self._before = set(self.path.iterdir()) if self.path.is_dir() else None
        except OSError as error:
            raise ConfigError(f"{setting}: cannot be read: {error}") from error
        self._new = [each for each in (self.path, *self.path.parents) if not each.exists()]

    def make(self) -> None:
        """Make the folder; ``remove_unstarted`` removes it, even after a signal in ``make``."""
        try:
            # Two runs never share a new folder, whose name has the microsecond.
            self.path.mkdir(parents=True, exist_ok=self._given is not None)
        except OSError as error:
            raise ConfigError(f"{self._setting}: cannot be written: {error}") from error

    def remove_unstarted(self) -> None:
        """Remove new files and folders, unless a run began."""
        if not self.path.is_dir() or any(self.path.glob("**/manifest.json")):
            return
        for path in set(self.path.iterdir()) - (self._before or set()):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        if self._before is None:
            for path in dict.fromkeys((self.path, *self._new)):
                if path.is_dir() and not any(path.iterdir()) and path.name != "outputs":
                    path.rmdir()


def run_in_folder(
    given: str | None,
    config: JobConfig,
    overrides: Sequence[str] | None,
    *,
    setting: str = "hydra.run.dir",
    argv: Sequence[str] | None = None,
    callbacks: Sequence[object] = (),
) -> Path:
    """Run a checked job in a folder, which is removed again if the job does not begin.

    Args:
        given: the folder; None for a new one below ``outputs/``.
        config: the job.
        overrides: as on the command line; None where the config was given directly.
        setting: the folder's name in error messages.
        argv: the command line that started the job; by default built from the overrides.
        callbacks: hooks of the loop, :class:`klrl.train.callbacks.Callback`.
    """
    folder = OwnFolder(given, f"{setting}={given or 'outputs'}")
    if folder.holds_run:
        raise ConfigError(
            f"{setting}={given}: already has a run; give a different folder, or resume={given}"
        )
    try:
        folder.make()
        with collection_paused():
            loop = importlib.import_module("klrl.train.loop")  # klrl.train imports klrl.runs
        loop.start(config, RunFolder(folder.path, overrides, argv), callbacks=callbacks)
    except OwnedElsewhere:
        raise  # the files in the folder belong to another process
    except BaseException:
        folder.remove_unstarted()
        raise
    return folder.path
