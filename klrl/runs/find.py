"""Finds the run folders in settings such as ``actor.init``, and refuses unusable folders."""

from __future__ import annotations

from pathlib import Path

from klrl.base.errors import ConfigError
from klrl.base.files import expanded
from klrl.config import CheckpointReferenceConfig, JobConfig
from klrl.runs.folder import BrokenRun, read_manifest


def find_run(path: str, setting: str) -> Path:
    """Return the absolute path of a run; refuse it without manifest, settings or checkpoint."""
    run = find_manifest(path, setting).absolute()
    if not (run / ".hydra" / "config.yaml").is_file():
        raise ConfigError(f"{setting}={path}: no .hydra/config.yaml in it; give another run")
    if not (_has_checkpoint(run, "last") or _has_checkpoint(run, "best")):
        raise ConfigError(f"{setting}={path}: the run wrote no checkpoint; give another run")
    return run


def is_model(path: str | Path) -> bool:
    """Return whether a folder has a language model, or adapters, that are not a run of klrl."""
    folder = expanded(path)
    files = (folder / name for name in ("config.json", "adapter_config.json"))
    return any(file.is_file() for file in files) and not (folder / "manifest.json").is_file()


def find_policy(path: str | Path, setting: str) -> Path:
    """Return the absolute path of a run, or of a model's folder."""
    return expanded(path).absolute() if is_model(path) else find_run(str(path), setting)


def _has_checkpoint(run: Path, which: str) -> bool:
    # Do not glob checkpoints/*: a temporary folder of a running run may vanish during the search.
    return any(run.glob(f"checkpoints/{which}/*/manifest.json"))


def no_checkpoint(what: str, which: str) -> ConfigError:
    """Make the error for a run without the checkpoint ``which``."""
    others = " or ".join(name for name in ("last", "best") if name != which)
    return ConfigError(f"{what}: has no checkpoint '{which}'; choose {others}")


def find_manifest(path: str, setting: str) -> Path:
    """Return the run folder at ``path``; refuse a folder without a readable manifest."""
    run = expanded(path)
    if run.is_file():
        remedy = "give FILE.py:function, which loads it (docs/your_policy.md), or a run folder"
        raise ConfigError(f"{setting}={path}: is a file; {remedy}")
    if not run.is_dir():
        raise ConfigError(f"{setting}={path}: no such folder; give a run folder below outputs/")
    try:
        read_manifest(run)
    except FileNotFoundError as error:
        what = "no manifest.json in it; give a run folder"
        if (run / "sweep.json").is_file():
            what = "is a sweep's folder; give one of its runs, or start its command again"
        raise ConfigError(f"{setting}={path}: {what}") from error
    except BrokenRun as error:
        raise ConfigError(f"{setting}={path}: {error}; give another run") from error
    return run


def other_runs(config: JobConfig) -> list[tuple[str, str, Path]]:
    """List the runs whose policies a job loads, each as (setting, its value, folder)."""
    sources, runs = [], []
    if isinstance(config.reference, CheckpointReferenceConfig) and config.has_reference:
        sources.append(("reference.path", config.reference.path, config.reference.which))
    if config.actor.init is not None:
        sources.append(("actor.init", config.actor.init, config.actor.init_which))
    for setting, path, which in sources:
        run = find_run(path, setting)
        if not _has_checkpoint(run, which):
            raise no_checkpoint(f"{setting}={path}", which)
        runs.append((setting, path, run))
    return runs
