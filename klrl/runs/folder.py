"""Reads and writes the folder of one run: manifest, settings, paths of files."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import yaml
from omegaconf import OmegaConf

from klrl import __version__
from klrl.base import ranks
from klrl.base.errors import ConfigError, first_line
from klrl.base.files import make_folder, read_plain, refuse_link, replace_file, to_update
from klrl.base.processor import processor
from klrl.base.tables import LOADER, yaml_text
from klrl.config import JobConfig
from klrl.config.identity import identity
from klrl.config.own.trust import record_code
from klrl.domains import DOMAINS
from klrl.runs.guard import Guard
from klrl.runs.owner import OWNER_FILE, Claim, living_owner, owning

#: Files that klrl writes in place, and folders that it writes into; none of them may be a link.
_IN_PLACE = (OWNER_FILE, "metrics.jsonl", "samples.jsonl", "log.txt")
_FOLDERS = (".hydra", "tensorboard", "videos", "wandb", "checkpoints/last", "checkpoints/best")
#: Prefix of the names of temporary folders.
STAGING = ".staging-"
#: Temporary files and folders that a killed owner may leave.
_LEFTOVERS = (
    f"checkpoints/{STAGING}*",
    *("manifest.tmp", "metrics.tmp", "samples.tmp"),
    *(".hydra/config.tmp", ".hydra/overrides.tmp", ".curves.png-*"),
)
#: Packages whose versions a manifest records; the last three belong to the extra ``language``.
_PACKAGES = (
    *("torch", "torchrl", "tensordict", "gymnasium", "mujoco", "hydra-core", "wandb", "numpy"),
    *("transformers", "tokenizers", "peft"),
)

#: Entry of the manifest -> its type, and the type's name in messages.
_KINDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("pid", "numerics"), (int, "number")),
    **dict.fromkeys(("status", "started", "klrl", "resume", "id"), (str, "string")),
    **dict.fromkeys(("domain", "git_commit"), (str, "string")),
    **dict.fromkeys(("argv", "resumed", "planned", "side_failures"), (list, "list")),
    "versions": (dict, "table"),
}

#: The contents of ``manifest.json``: name -> JSON value.
Manifest: TypeAlias = dict[str, Any]


class BrokenRun(ValueError):
    """A file of a run folder cannot be read; the message names the file and the reason."""


#: Exceptions that reading a run folder may raise. In a stranger's folder, values may have any type.
UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def why_unreadable(error: BaseException) -> str:
    """Say in one line why a run folder cannot be read."""
    line = first_line(error)
    known = isinstance(error, OSError | BrokenRun)
    return line if known else f"its settings or rows are broken ({line})"


def read_manifest(run: Path) -> dict[str, Any]:
    """Read and check a run folder's ``manifest.json``.

    Raises:
        FileNotFoundError: the folder has no manifest.
        BrokenRun: the manifest cannot be read; the message does not name the folder.
    """
    try:
        manifest = json.loads(read_plain(run / "manifest.json"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenRun(f"its manifest.json is broken ({first_line(error)})") from error
    if not isinstance(manifest, dict) or "status" not in manifest:
        raise BrokenRun("its manifest.json does not belong to a run (no status)")
    for name, (kind, what) in _KINDS.items():
        if not isinstance(manifest.get(name), kind | None):
            value = manifest[name]
            raise BrokenRun(f"its manifest.json is broken ({name} {value!r} is not a {what})")
    if manifest.get("domain") not in DOMAINS:
        raise BrokenRun(
            f"its manifest.json names the domain {manifest.get('domain')!r}, unknown to this "
            "version of klrl"
        )
    return manifest


def planned_frames(manifest: Manifest) -> str:
    """Format the values that ``frames`` had, if a resume changed it: ``frames=64, then 128``."""
    planned = manifest.get("planned") or []
    return f"frames={', then '.join(map(str, planned))}" if len(planned) > 1 else ""


def run_id(run: Path) -> str | None:
    """Return the id in a run folder's manifest; None if the manifest or the id cannot be read."""
    try:
        return read_manifest(run).get("id")
    except (OSError, BrokenRun):
        return None


def read_settings(run: Path) -> dict[str, Any]:
    """Read the stored settings of a run folder as plain values, without checking them.

    Raises:
        BrokenRun: the folder has no settings, or they cannot be read.
    """
    try:
        settings = yaml.load(yaml_text(run / ".hydra" / "config.yaml"), LOADER)
    except FileNotFoundError as error:
        raise BrokenRun("it has no .hydra/config.yaml") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BrokenRun(f"its .hydra/config.yaml is broken ({first_line(error)})") from error
    if not isinstance(settings, dict):
        raise BrokenRun("its .hydra/config.yaml has no settings")
    return settings


class RunFolder:
    """The paths and the manifest of a run; :meth:`open` makes the folder."""

    def __init__(
        self, path: Path, overrides: Sequence[str] | None = None, argv: Sequence[str] | None = None
    ) -> None:
        #: The path as given, for messages; and absolute, since user code may change the folder.
        self.path, self.place = path, path.absolute()
        self._overrides, self._argv = overrides, argv or sys.orig_argv
        self.metrics = self.place / "metrics.jsonl"
        self.samples = self.place / "samples.jsonl"
        self.curves = self.place / "curves.png"
        self.checkpoints = self.place / "checkpoints"
        self._manifest = self.place / "manifest.json"
        self._settings = self.place / ".hydra" / "config.yaml"
        self._claim: Claim | None = None
        self._last_written: Manifest | None = None
        self.guard = Guard(self._note_failure)

    @property
    def exists(self) -> bool:
        """True if the folder has a ``manifest.json``; False also if the folder cannot be read."""
        return os.path.exists(self._manifest)  # noqa: PTH110

    @property
    def manifest(self) -> Manifest:
        """The contents of ``manifest.json``; see :func:`read_manifest`."""
        return read_manifest(self.place)

    @property
    def _written(self) -> Manifest:
        """The manifest that this process wrote last or, if it wrote none, the file's contents."""
        return self.manifest if self._last_written is None else self._last_written

    @property
    def status(self) -> str:
        """The manifest's status, but ``interrupted`` if a running run's process has died."""
        status = str(self.manifest.get("status"))
        if status != "running":
            return status
        return "running" if living_owner(self.place) else "interrupted"

    @property
    def checkpointed(self) -> int:
        """Number of frames or samples at the newest checkpoint; 0 without a checkpoint."""
        entries = self.checkpoints.glob("last/frames-*")
        numbers = (entry.name.removeprefix("frames-") for entry in entries)
        return max((int(number) for number in numbers if number.isdecimal()), default=0)

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Own the folder by :func:`klrl.runs.owner.owning`, unless this object already owns it.

        Removes the temporary files that a killed owner left.
        """
        if self._claim is not None:
            yield
            return
        setting = f"folder={self.path}"
        try:
            _refuse_links(self.place, setting)
        except OSError as error:
            raise ConfigError(f"{setting}: cannot be written: {error}") from error
        with owning(self.place, setting) as self._claim:
            remove_leftovers(self.place)
            try:
                yield
            except OSError:
                self.check_owned()  # a moved folder has a clearer error
                self.check_stored()
                raise
            finally:
                self._claim = None

    def check_owned(self) -> None:
        """Check the folder by :meth:`klrl.runs.owner.Claim.check`, if this object owns it."""
        if self._claim is not None:
            self._claim.check()

    def check_stored(self) -> None:
        """Check, by an OSError, that manifest, settings and checkpoints are still there."""
        stored = (self._manifest, self._settings, self.checkpoints)
        for path in stored if self._last_written is not None else ():
            if not path.exists():
                raise OSError(
                    f"{path}: was removed during the run; put it back, then resume the run"
                )

    def open(self, config: JobConfig, **more: object) -> Manifest:
        """Write and return the manifest of a run that starts or resumes; ``more`` adds entries.

        A resume keeps ``klrl``, ``numerics``, ``argv`` and ``started`` of the first start, and adds
        itself to ``resumed``.
        """
        self.check_owned()
        before = self.manifest if self._manifest.exists() else {}
        key = identity(config)
        if self._claim is None:
            self.place.mkdir(parents=True, exist_ok=True)
        run = before.get("id") or uuid4().hex
        if before and before.get("config_hash") != key.settings:
            # If klrl is killed below, ``config_hash`` or ``next_hash`` is still the settings' hash.
            self._write({**before, "next_hash": key.settings})
        self._store_config(config, f"# run {run}\n")
        planned = before.get("planned") or []
        start = {
            "time": _now(),
            "klrl": __version__,
            "argv": list(self._argv),
        }
        manifest = {
            "id": run,
            "klrl": before.get("klrl", __version__),
            "status": "running",
            "pid": os.getpid(),
            "seed": config.seed,
            "host": platform.node(),
            "argv": before.get("argv", start["argv"]),
            "config_hash": key.settings,
            # The version of klrl's arithmetic; a resumed run keeps the version of its first start.
            "numerics": before.get("numerics", 1) if before else key.numerics,
            "domain": config.domain,
            "git_commit": _git_commit(),
            "python": platform.python_version(),
            "versions": versions(),
            "processor": processor(),
            "wandb_id": before.get("wandb_id", uuid4().hex[:12]),
            "started": before.get("started", start["time"]),
            "resumed": [*(before.get("resumed") or []), start] if before else [],
            # All values of ``frames`` so far; the learning rate decayed over them in turn.
            "planned": planned + [config.frames] * (planned[-1:] != [config.frames]),
            # The number of processes of each start; with another number, rows differ by rounding.
            "ranks": [*(before.get("ranks") or []), ranks.world()],
            # Of the kernel that took the last steps, until a step says otherwise.
            **{key: before[key] for key in ("library",) if key in before},
            **more,
        }
        self._write(manifest)
        self.guard.call("code that you ran", record_code, self.place, config)
        return manifest

    def close(self, status: str, **more: object) -> None:
        """Record how the run ended: finished, interrupted or failed."""
        ended = {**self._written, "status": status, "ended": _now(), "pid": None, **more}
        try:
            self._write(ended)
        except OSError:
            # A full disk has no room for a second file; so overwrite the old file in place.
            with to_update(self._manifest) as file:
                file.write(_as_text(ended).encode())
                file.truncate()

    def update(self, **entries: object) -> None:
        """Change entries of the manifest."""
        self._write({**self._written, **entries})

    def _note_failure(self, part: str, error: str) -> None:
        failure = {"part": part, "error": error, "when": _now()}
        self.update(side_failures=[*self._written.get("side_failures", []), failure])

    def _store_config(self, config: JobConfig, head: str) -> None:
        make_folder(self._settings.parent)
        settings = OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))
        replace_file(self._settings, head + settings)
        if self._overrides is not None:
            overrides = OmegaConf.to_yaml(OmegaConf.create([str(each) for each in self._overrides]))
            replace_file(self._settings.with_name("overrides.yaml"), head + overrides)

    def _write(self, manifest: Manifest) -> None:
        self.check_owned()
        replace_file(self._manifest, _as_text(manifest))
        self._last_written = manifest


def _refuse_links(run: Path, setting: str) -> None:
    for name in (*_IN_PLACE, *_FOLDERS):
        refuse_link(run / name, f"{setting}: {name}")
    for name in _IN_PLACE:
        path = run / name
        if path.exists() and not path.is_file():
            raise ConfigError(f"{setting}: {name} is not a regular file; move it away")
    checkpoints = run / "checkpoints"  # may be a link, for example to a larger disk
    elsewhere = checkpoints.resolve().parent
    if checkpoints.is_symlink() and (elsewhere / "metrics.jsonl").exists():
        raise ConfigError(
            f"{setting}: checkpoints is a link into the run {elsewhere}, whose entries would be "
            "removed; replace it with a copy"
        )


def remove_leftovers(run: Path) -> None:
    """Remove the temporary files of a killed process; only the owner may call this."""
    for pattern in _LEFTOVERS:
        for path in run.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _as_text(manifest: Manifest) -> str:
    return json.dumps(manifest, indent=2) + "\n"


def new_path(suffix: str = "") -> Path:
    """Return the path ``outputs/<now>`` + ``suffix``; do not make the folder."""
    return Path("outputs") / (datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f") + suffix)


def versions() -> dict[str, str]:
    """Return package -> version, for each of :data:`_PACKAGES` that is installed."""
    found = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


#: Arguments of git that skip files within submodules, whose git settings may run programs.
_STATUS = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty")


def _git_commit() -> str | None:
    """Return the working directory's commit, with a + if files have changed; None outside git."""
    # The repository may be a stranger's; switch off its settings that can run programs. Do so by
    # environment variables: after ``git -c``, git would cut a setting's name at its first =.
    off = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null"}
    try:
        for scope in ("--local", "--worktree"):
            words = ("config", scope, "--includes", "-z", "--name-only", "--get-regexp")
            for name in filter(None, _git(*words, r"^filter\.", check=False).split("\0")):
                off[name] = "false" if name.endswith(".required") else ""
        switches = {"GIT_CONFIG_COUNT": str(len(off))}
        for i, (name, value) in enumerate(off.items()):
            switches |= {f"GIT_CONFIG_KEY_{i}": name, f"GIT_CONFIG_VALUE_{i}": value}
        commit = _git("rev-parse", "HEAD", switches=switches)
        return commit + "+" * bool(_git("--no-optional-locks", *_STATUS, switches=switches))
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None


def _git(*words: str, check: bool = True, switches: dict[str, str] | None = None) -> str:
    # In a partial clone, git would fetch missing objects by a command that the repository names.
    env = {**os.environ, "GIT_ALLOW_PROTOCOL": "none", **(switches or {})}
    command = ("git", *words)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=check, timeout=5)
    return done.stdout.strip()
