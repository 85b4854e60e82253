"""One job in a folder of its own, in this process."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from klrl.base.errors import ConfigError
from klrl.base.imports import collection_paused
from klrl.config import JobConfig
from klrl.runs.folder import RunFolder, new_folder

if TYPE_CHECKING:
    from klrl.train.callbacks import Callback


def run_in_folder(
    given: str | None,
    config: JobConfig,
    overrides: Sequence[str] | None,
    *,
    setting: str = "hydra.run.dir",
    argv: Sequence[str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Path:
    """Run a checked job in a folder, which is removed again if the job does not begin.

    Args:
        given: the folder; None for a new one below ``outputs/``.
        config: the job.
        overrides: as on the command line; None where the config was given directly.
        setting: the folder's name in error messages.
        argv: the command line that started it; default: that of the overrides.
        callbacks: hooks of the loop.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder cannot be written or holds a run, or the job is refused.
    """
    folder = Path(given) if given is not None else None
    try:
        if folder is not None and any(folder.glob("**/manifest.json")):
            raise ConfigError(
                f"{setting}={folder}: holds a run already; give another, or resume={folder}"
            )
        before = set(folder.iterdir()) if folder is not None and folder.is_dir() else None
        folder = folder or new_folder()
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}={given or 'outputs'}: cannot be written: {error}") from error
    try:
        with collection_paused():
            from klrl.train.loop import start
        start(config, RunFolder(folder, overrides, argv), callbacks=callbacks)
    except BaseException:
        remove_unstarted(folder, before, new)
        raise
    return folder


def remove_unstarted(folder: Path, before: set[Path] | None, new: Sequence[Path]) -> None:
    """Remove the files of a job or a sweep in which no run began.

    Args:
        folder: the job's or the sweep's.
        before: what the folder held already, and keeps; None where it is new.
        new: the folder and its parents, as far as they are new.
    """
    if any(folder.glob("**/manifest.json")):
        return
    for path in set(folder.iterdir()) - (before or set()):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    if before is None:
        for path in new or [folder]:
            if path.is_dir() and not any(path.iterdir()) and path.name != "outputs":
                path.rmdir()
