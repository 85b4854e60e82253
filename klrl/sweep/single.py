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
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{setting}={given or 'outputs'}: cannot be written: {error}") from error
    try:
        with collection_paused():
            from klrl.train.loop import start
        start(config, RunFolder(folder, words, argv), callbacks=callbacks)
    except BaseException:
        remove_unstarted(folder, before, made)
        raise
    return folder


def remove_unstarted(folder: Path, before: set[Path] | None, made: Sequence[Path]) -> None:
    """Leave nothing of a job, or of a sweep, of which nothing began.

    Args:
        folder: where it was to be.
        before: what was in it already, and stays; None where it was made for this command.
        made: the folder and its parents, as far as they are new.
    """
    if any(folder.glob("**/manifest.json")):
        return
    for path in set(folder.iterdir()) - (before or set()):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    if before is None:
        for path in made or [folder]:
            if path.is_dir() and not any(path.iterdir()) and path.name != "outputs":
                path.rmdir()
