"""Checks that the manifest, settings and rows in a folder have the same run id."""

from __future__ import annotations

import re

from klrl.base.errors import ConfigError
from klrl.base.files import read_plain
from klrl.runs.folder import RunFolder, run_id
from klrl.runs.rows import run_named_in

#: Files whose first line is a comment with the run's id.
_SETTINGS = (".hydra/config.yaml", ".hydra/overrides.yaml")


def other_run_error(what: str, theirs: object, run: str | None) -> ConfigError:
    """Make the error for a file that belongs to a different run than ``manifest.json``."""
    return ConfigError(
        f"{what}: belongs to run {str(theirs)[:8]}, manifest.json to run {str(run)[:8]}; "
        "restore the files of one run"
    )


def check_one_run(files: RunFolder, setting: str) -> None:
    """Refuse settings or rows of a different run; checkpoints are checked when they are loaded."""
    own, rows = run_id(files.path), [p for p in (files.metrics, files.samples) if p.exists()]
    if not files.exists and (left := [*rows, *files.checkpoints.glob("*/frames-*")]):
        raise ConfigError(
            f"{setting}: has {left[0].relative_to(files.path)} but no manifest.json; "
            "restore manifest.json, or move the folder away"
        )
    for path in (files.path / name for name in _SETTINGS):
        first = path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else ""
        theirs = first.removeprefix("# run ")
        if own is not None and theirs not in (first, own):
            raise other_run_error(f"{setting}: {path}", theirs, own)
    for path in rows:
        if not path.is_file():
            raise ConfigError(f"{setting}: {path} is not a regular file; restore the original")
        for number, line in enumerate(read_plain(path).split(b"\n"), 1):
            if (named := run_named_in(line, own, own)) != own:
                raise other_run_error(f"{setting}: line {number} of {path}", named, own)


def forget_start(files: RunFolder) -> None:
    """Delete the rows and manifest of a run that did no iteration, so that it can start again."""
    link = files.checkpoints.is_symlink() and not files.checkpoints.exists()
    rows = files.metrics.read_bytes() if files.metrics.exists() else b""
    if link or re.search(rb'"iteration": [1-9]', rows):
        where = f" (a link to {files.checkpoints.readlink()}, which does not exist)" * link
        raise ConfigError(
            f"{files.path}: no checkpoint found in checkpoints{where}, so the run would start "
            "from 0; restore one, or move the folder away"
        )
    for path in (files.metrics, files.samples, files.path / "manifest.json"):
        path.unlink(missing_ok=True)
