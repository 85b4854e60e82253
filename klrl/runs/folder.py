"""The folder of one run: its manifest, its settings, where its files are."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml
from omegaconf import OmegaConf

from klrl.base.errors import first_line
from klrl.base.files import replace_file
from klrl.base.version import __version__
from klrl.config import JobConfig
from klrl.config.identity import identity
from klrl.domains import DOMAINS

_PACKAGES = (
    "torch",
    "torchrl",
    "tensordict",
    "gymnasium",
    "mujoco",
    "hydra-core",
    "wandb",
    "numpy",
)
#: Of the extra ``language``, which an install may lack.
_LANGUAGE_PACKAGES = ("transformers", "tokenizers", "peft")


#: A run on another machine that wrote nothing for so many seconds counts as interrupted.
_SILENT = 600


class BrokenRun(ValueError):
    """A file of a run folder that cannot be read; the text says which and why."""


def read_manifest(run: Path) -> dict[str, Any]:
    """What the ``manifest.json`` of a run folder says.

    Raises:
        FileNotFoundError: there is none.
        BrokenRun: it is no run's, or of a klrl that this one cannot read.
    """
    try:
        manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise BrokenRun(f"its manifest.json is broken ({first_line(error)})") from error
    if not isinstance(manifest, dict) or "status" not in manifest:
        raise BrokenRun("its manifest.json is no run's (it has no status)")
    for name in ("pid", "numerics"):
        if not isinstance(manifest.get(name), int | None):
            value = manifest[name]
            raise BrokenRun(f"its manifest.json is broken ({name} {value!r} is no number)")
    if manifest.get("domain") not in (None, *DOMAINS):
        raise BrokenRun(
            f"its manifest.json names the domain {manifest['domain']!r}, which this klrl does not "
            "know"
        )
    return manifest


def read_settings(run: Path) -> dict[str, Any]:
    """The stored settings of a run folder as they stand, those of 0.1.0 too.

    Raises:
        BrokenRun: there are none, or they cannot be read.
    """
    try:
        text = (run / ".hydra" / "config.yaml").read_text(encoding="utf-8")
        settings = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError as error:
        raise BrokenRun("it has no .hydra/config.yaml") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BrokenRun(f"its .hydra/config.yaml is broken ({first_line(error)})") from error
    if not isinstance(settings, dict):
        raise BrokenRun("its .hydra/config.yaml holds no settings")
    return settings


class RunFolder:
    """Paths and manifest of a run.

    Args:
        path: the folder; made when missing.
        words: of the job.
        argv: what started it; default the command line that those words make.
    """

    def __init__(
        self, path: Path, words: Sequence[str] | None = None, argv: Sequence[str] | None = None
    ) -> None:
        self.path = path
        self._words, self._given_argv = words, argv
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.curves = path / "curves.png"
        self.checkpoints = path / "checkpoints"
        self._manifest = path / "manifest.json"

    @property
    def exists(self) -> bool:
        """Whether a run was opened here."""
        return self._manifest.exists()

    @property
    def manifest(self) -> dict[str, Any]:
        """What ``manifest.json`` says; see :func:`read_manifest`."""
        return read_manifest(self.path)

    @property
    def status(self) -> str:
        """As the manifest says; a run whose process is gone was interrupted.

        Of a process on another machine only its silence can be seen.
        """
        manifest = self.manifest
        status = str(manifest.get("status"))
        if status != "running":
            return status
        if lives_here(manifest):
            return "running"
        if manifest.get("host", platform.node()) == platform.node():
            return "interrupted"
        written = self.metrics if self.metrics.exists() else self._manifest
        return "running" if time.time() - written.stat().st_mtime < _SILENT else "interrupted"

    def open(self, config: JobConfig, **more: Any) -> dict[str, Any]:
        """Write the manifest of a run that starts, or of one that goes on; returns it.

        Args:
            config: the job.
            more: further entries, as the device that was found.
        """
        before = self.manifest if self._manifest.exists() else {}
        mine = identity(config)
        self.path.mkdir(parents=True, exist_ok=True)
        self._store_config(config)
        manifest = {
            "klrl": __version__,
            "status": "running",
            "pid": os.getpid(),
            "pid_started": process_start(os.getpid()),
            "seed": config.seed,
            "host": platform.node(),
            "argv": self._argv(),
            "config_hash": mine.settings,
            "numerics": mine.numerics,
            "domain": config.domain,
            "git_commit": _git_commit(),
            "python": platform.python_version(),
            "versions": _versions(),
            "wandb_id": before.get("wandb_id", uuid4().hex[:12]),
            "started": before.get("started", _now()),
            "resumed": [*before.get("resumed", []), _now()] if before else [],
            **more,
        }
        self._write(manifest)
        return manifest

    def close(self, status: str, **more: Any) -> None:
        """Say how the run ended: finished, interrupted or failed."""
        self._write({**self.manifest, "status": status, "ended": _now(), "pid": None, **more})

    def _argv(self) -> list[str]:
        if self._given_argv is not None:
            return list(self._given_argv)
        return sys.orig_argv if self._words is None else ["python", "-m", "klrl", *self._words]

    def _store_config(self, config: JobConfig) -> None:
        """``.hydra/config.yaml``, with what a resume changed, and the words of the job."""
        stored = self.path / ".hydra" / "config.yaml"
        stored.parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(dataclasses.asdict(config)), stored)
        if self._words is not None:
            words = OmegaConf.create(list(self._words))
            OmegaConf.save(words, stored.with_name("overrides.yaml"))

    def _write(self, manifest: dict[str, Any]) -> None:
        replace_file(self._manifest, json.dumps(manifest, indent=2) + "\n")


def by_dotted_key(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key; an empty mapping stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= by_dotted_key(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def new_folder(suffix: str = "") -> Path:
    """Create ``outputs/<now>``, exclusively: two runs never share one."""
    root = Path("outputs")
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = root / (datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f") + suffix)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def process_start(pid: int) -> str | None:
    """When a process of this machine started, in the kernel's clock; None where it is gone.

    A process id alone is used again after a reboot, or in a container at once.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return None


def lives_here(manifest: Mapping[str, Any]) -> bool:
    """Whether the process that a manifest names runs on this machine, and is still that one."""
    pid = manifest.get("pid")
    if pid is None or manifest.get("host", platform.node()) != platform.node():
        return False
    started = process_start(int(pid))
    return started is not None and started == manifest.get("pid_started")


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in _PACKAGES}
    for name in _LANGUAGE_PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git_commit() -> str | None:
    """The commit of the caller's tree, with a + where it was changed; None outside git."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.strip()
