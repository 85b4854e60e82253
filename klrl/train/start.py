"""Starts a run in its own folder, and cleans the folder up if no run begins in it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from klrl.base import ranks
from klrl.base.errors import ConfigError, OwnerError
from klrl.base.files import expanded
from klrl.base.imports import collection_paused
from klrl.base.streams import NullStream
from klrl.config import JobConfig, LoggerConfig
from klrl.config.identity import settings_hash
from klrl.runs.folder import RunFolder, new_path, versions
from klrl.runs.owner import OwnedElsewhere

if TYPE_CHECKING:
    from klrl.train.callbacks import Callback


class OutputFolder:
    """The folder of a run or of a sweep; :meth:`make` makes it if it is missing.

    ``setting`` names the setting that gave the path in messages; ``suffix`` ends a new folder's
    name.
    """

    def __init__(self, given: str | None, setting: str, suffix: str = "") -> None:
        self._given, self._setting = given, setting
        self.path = new_path(suffix) if given is None else expanded(given)
        try:
            self.holds_run = given is not None and any(self.path.glob("**/manifest.json"))
            # Files and folders that ``remove_unstarted`` keeps; None if the folder is new.
            self._before = set(self.path.iterdir()) if self.path.is_dir() else None
        except OSError as error:
            raise ConfigError(f"{setting}: cannot be read: {error}") from error
        self._new = [each for each in (self.path, *self.path.parents) if not each.exists()]

    def make(self) -> None:
        """Make the folder; ``remove_unstarted`` works even if a signal interrupts this method."""
        try:
            # A new folder's name contains the microsecond; if it exists, another run made it.
            self.path.mkdir(parents=True, exist_ok=self._given is not None)
        except OSError as error:
            raise ConfigError(f"{self._setting}: cannot be written: {error}") from error

    def remove_unstarted(self) -> None:
        """If no run began, remove the files and folders that are new since ``__init__``."""
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


def train(
    config: JobConfig,
    files: RunFolder,
    *,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train a checked job, by :func:`klrl.train.loop.start`, in all processes of torchrun.

    Only rank 0 writes into the run's folder; a copy of another rank's record goes to a temporary
    folder.
    """
    with collection_paused():
        from klrl.train import loop  # imports torch
    if ranks.world() == 1:
        loop.start(config, files, resume=resume, callbacks=callbacks)
        return
    with ExitStack() as stack:
        stack.enter_context(ranks.joined())
        stack.enter_context(ranks.waiting(config.rank_timeout))
        ranks.require_equal("versions", versions())
        ranks.require_equal("settings", settings_hash(config))
        if ranks.rank():
            aside = stack.enter_context(TemporaryDirectory())
            stack.enter_context(redirect_stdout(NullStream()))
            config = replace(config, logger=LoggerConfig(name="none"))
            files = RunFolder(Path(aside) / "run")
        loop.start(config, files, resume=resume, callbacks=callbacks)


def run_in_folder(
    given: str | None,
    config: JobConfig,
    overrides: Sequence[str] | None,
    *,
    setting: str = "hydra.run.dir",
    argv: Sequence[str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Run a checked job in a folder; clean the folder up if no run begins.

    ``given`` is the folder, None for a new one below ``outputs/``, and ``setting`` names its
    setting. ``overrides``: None if ``config`` was not made from overrides. ``argv``: the command
    line that starts the job; by default that of this process.
    """
    with ranks.joined():
        folder = ranks.first(lambda: OutputFolder(given, f"{setting}={given or 'outputs'}"))
        if folder.holds_run:
            raise ConfigError(
                f"{setting}={given}: already has a run; give a different folder, or resume={given}"
            )
        try:
            ranks.first(folder.make)
            train(config, RunFolder(folder.path, overrides, argv), callbacks=callbacks)
        except (OwnedElsewhere, OwnerError):
            raise  # another process owns the files in the folder, or it is not this run's any more
        except BaseException:
            if not ranks.rank():
                folder.remove_unstarted()
            raise
        return folder.path
