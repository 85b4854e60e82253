"""Checks that the manifest, settings and rows in a folder have the same run id."""

from __future__ import annotations

import re
from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.files import ROWS, SMALL, read_plain
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
    run, own = files.path, run_id(files.path)
    rows = [p for name in ("metrics.jsonl", "samples.jsonl") if (p := run / name).exists()]
    if not files.exists and (left := [*rows, *run.glob("checkpoints/*/frames-*")]):
        raise ConfigError(
            f"{setting}: has {left[0].relative_to(run)} but no manifest.json; "
            "restore manifest.json, or move the folder away"
        )
    for path in (run / name for name in _SETTINGS):
        first = _lines(setting, path)[0].decode(errors="replace") if path.is_file() else ""
        theirs = first.removeprefix("# run ")
        if own is not None and theirs not in (first, own):
            raise other_run_error(f"{setting}: {path}", theirs, own)
    for path in rows:
        for number, line in enumerate(_lines(setting, path, ROWS), 1):
            if (named := run_named_in(line, own, own)) != own:
                raise other_run_error(f"{setting}: line {number} of {path}", named, own)


def _lines(setting: str, path: Path, most: int = SMALL) -> list[bytes]:
    try:
        return read_plain(path, most).split(b"\n")
    except OSError as error:
        told = str(error).removeprefix("it ")
        raise ConfigError(f"{setting}: {path} {told}; restore the original") from error


def forget_start(files: RunFolder) -> None:
    """Delete the rows and manifest of a run that did no iteration, so that it can start again."""
    link = files.checkpoints.is_symlink() and not files.checkpoints.exists()
    rows = read_plain(files.metrics, ROWS) if files.metrics.exists() else b""
    if link or re.search(rb'"iteration": [1-9]', rows):
        where = f" (a link to {files.checkpoints.readlink()}, which does not exist)" * link
        raise ConfigError(
            f"{files.path}: no checkpoint found in checkpoints{where}, so the run would start "
            "from 0; restore one, or move the folder away"
        )
    for path in (files.metrics, files.samples, files.path / "manifest.json"):
        path.unlink(missing_ok=True)
