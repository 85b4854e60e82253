"""One job in a folder of its own, in this process."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from klrl.base.imports import collection_paused
from klrl.config import JobConfig
from klrl.errors import ConfigError, Interrupted
from klrl.run_folder import RunFolder, new_folder

if TYPE_CHECKING:
    from klrl.callbacks import Callback


def run_in_folder(
    given: str | None,
    config: JobConfig,
    words: Sequence[str] | None,
    *,
    setting: str = "hydra.run.dir",
    argv: Sequence[str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Run a checked job in a folder; nothing stays of one that did not begin.

    Args:
        given: the folder; None for a new one below ``outputs/``.
        config: the job.
        words: as on the command line; None where it was not made from words.
        setting: what the folder is called where it is refused.
        argv: what started it; default the command line of the words.
        callbacks: hooks of the loop.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder cannot be written or holds a run, or the job is refused.
    """
    folder = Path(given) if given is not None else None
    if folder is not None and any(folder.glob("**/manifest.json")):
        raise ConfigError(
            f"{setting}={folder}: holds a run already; give another, or resume={folder}"
        )
    before = set(folder.iterdir()) if folder is not None and folder.is_dir() else None
    try:
        folder = folder or new_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}={given or 'outputs'}: cannot be written: {error}") from error
    try:
        with collection_paused():
            from klrl.training import start
        start(config, RunFolder(folder, words, argv), callbacks=callbacks)
    except (ConfigError, KeyboardInterrupt, Interrupted):
        _remove_unstarted(folder, before)
        raise
    return folder


def _remove_unstarted(folder: Path, before: set[Path] | None) -> None:
    """Leave nothing of a job that was refused or stopped before it began.

    Args:
        folder: the run's.
        before: what was in it already, and stays; None where it was made for this command.
    """
    if any(folder.glob("**/manifest.json")):
        return
    if before is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in set(folder.iterdir()) - before:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
