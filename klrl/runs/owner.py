"""Lets only one process at a time write a run folder, by the file ``owner.json``.

The process locks the file (flock), but not every file system shares locks with other machines. So
the file also contains the process's id and the time of its last heartbeat.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import getstatusoutput
from typing import Any

from klrl.base.errors import ConfigError, OwnerError
from klrl.base.files import names, open_in_place, read_plain, refuse_link
from klrl.base.text import warn

OWNER_FILE = "owner.json"
#: Seconds between heartbeats; seconds of silence after which a remote owner counts as dead.
BEAT_SECONDS, SILENT_SECONDS = 20, 180
#: Files that klrl writes in place, and folders that it writes into; none of them may be a link.
_IN_PLACE = (OWNER_FILE, "metrics.jsonl", "samples.jsonl", "log.txt")
_FOLDERS = (".hydra", "tensorboard", "videos", "wandb", "checkpoints/last", "checkpoints/best")
#: Environment variables: the job's id in its queue; how often SLURM restarted the job.
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_RESTARTS = "SLURM_RESTART_COUNT"
_PROCESSES = Path("/proc")  # missing on macOS
#: Limit on the size of an owner file in bytes.
_LONGEST = 4096
#: Prefix of the names of temporary folders.
STAGING = ".staging-"
#: Temporary files and folders that a killed owner may leave.
_LEFTOVERS = (
    f"checkpoints/{STAGING}*",
    *("manifest.tmp", "metrics.tmp", "samples.tmp"),
    *(".hydra/config.tmp", ".hydra/overrides.tmp", ".curves.png-*"),
)


class OwnedElsewhere(ConfigError):
    """Another process owns the run folder; this process must not change it."""


@dataclass(frozen=True)
class Owner:
    """The process that writes a run folder."""

    host: str
    pid: int
    pid_started: str | None  # see process_start
    job: str | None  # the job's id in its queue; None outside a queue
    restarts: int  # how often the queue restarted the job
    heartbeat: int  # time of the last heartbeat, seconds since 1970

    @classmethod
    def this_process(cls) -> Owner:
        """Describe this process as the owner, with a heartbeat now."""
        job = next((os.environ[name] for name in _JOB_IDS if os.environ.get(name)), None)
        restarts = os.environ.get(_RESTARTS, "")
        return cls(
            platform.node(),
            os.getpid(),
            process_start(os.getpid()),
            job,
            int(restarts) if restarts.isdecimal() else 0,
            int(time.time()),
        )

    @property
    def alive(self) -> bool:
        """True if the process is still running, as far as this machine can tell."""
        this = Owner.this_process()
        if self.host == this.host:
            return lives_here(asdict(self))
        if self.job == this.job is not None and self.restarts < this.restarts:
            return False  # the queue restarted the job as this process
        return this.heartbeat - self.heartbeat < SILENT_SECONDS

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        seen = max(int(time.time()) - self.heartbeat, 0)
        return f"process {self.pid} ({job}on {self.host}, seen {seen} s ago)"


def read_owner(run: Path) -> Owner | None:
    """Return a run folder's owner, alive or dead; None without a readable owner file."""
    try:
        return _parsed(read_plain(run / OWNER_FILE, _LONGEST))
    except OSError:
        return None


def refuse_owned(run: Path, setting: str) -> None:
    """Refuse a run folder whose owner is alive, by an OwnedElsewhere."""
    owner = read_owner(run)
    if owner is not None and owner.alive:
        raise _refusal(run, setting, owner)


@contextmanager
def owning(run: Path) -> Iterator[Claim]:
    """Own a run folder: make it if it is missing, and remove a killed owner's temporary files.

    Raises:
        OwnedElsewhere: another process owns it.
    """
    new = not run.exists()
    try:
        run.mkdir(exist_ok=True)
        _refuse_links(run)
        claim = Claim(run)
    except OSError as error:
        raise ConfigError(f"folder={run}: cannot be written: {error}") from error
    try:
        remove_leftovers(run)
        yield claim
    finally:
        claim.release()
        if new:
            with suppress(OSError):  # not empty: a run began in it
                run.rmdir()


def _refuse_links(run: Path) -> None:
    for name in (*_IN_PLACE, *_FOLDERS):
        refuse_link(run / name, f"folder={run}: {name}")
    for name in _IN_PLACE:
        path = run / name
        if path.exists() and not path.is_file():
            raise ConfigError(f"folder={run}: {name} is not a regular file; move it away")
    checkpoints = run / "checkpoints"  # may be a link, for example to a larger disk
    elsewhere = checkpoints.resolve().parent
    if checkpoints.is_symlink() and (elsewhere / "metrics.jsonl").exists():
        raise ConfigError(
            f"folder={run}: checkpoints is a link into the run {elsewhere}, whose entries would be "
            "removed; replace it with a copy"
        )


class Claim:
    """A run folder that this process owns, until :meth:`release`.

    Raises:
        OwnedElsewhere: another process owns the folder.
        OSError: the folder cannot be written.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / OWNER_FILE
        self._file = _locked(run)
        self._lost, self._seen, self._text = False, 0, b""
        self._beating = threading.Lock()
        try:
            before = _parsed(os.pread(self._file, _LONGEST, 0))
            if before is not None and before.alive:
                raise _refusal(run, f"folder={run}", before)
            os.ftruncate(self._file, 0)
            self._write()
        except BaseException:
            _close(self._file)
            raise
        if before is not None:
            warn(f"{run}: taken over from {before}, which did not end cleanly")
        self._ended = threading.Event()
        threading.Thread(target=self._renew, daemon=True).start()

    def check(self) -> None:
        """Check that the folder still exists, and that no other process took it over.

        Raises:
            OwnerError: the check failed; this process must not write to the folder any more.
        """
        run = self._path.parent
        if time.time() - self._seen > SILENT_SECONDS / 2 or not names(
            self._path, os.fstat(self._file)
        ):
            self._beat()
        other = read_owner(run) if self._lost else None
        if other is not None and (other.host, other.pid) != (platform.node(), os.getpid()):
            raise OwnerError(f"{run}: {other} took the run over, since this process was silent")
        if self._lost or not run.is_dir():
            raise OwnerError(
                f"{run}: was moved or deleted during the run, or its {OWNER_FILE} was; resume the "
                "run where it is now"
            )

    def release(self) -> None:
        """Release the folder for other processes."""
        self._ended.set()
        if os.pread(self._file, _LONGEST, 0) == self._text:  # else another process took it over
            if names(self._path, os.fstat(self._file)):
                self._path.unlink(missing_ok=True)
            else:  # it was moved: name no owner
                os.ftruncate(self._file, 0)
        _close(self._file)

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._beat()

    def _beat(self) -> None:
        # Two threads may call this at once when a suspended process continues. Ignore disk errors:
        # if rows cannot be written, the run ends anyway.
        with self._beating, suppress(OSError):
            # Open the file again: otherwise, a network file system may hide other machines' writes.
            try:
                # A copy in the place of the moved folder has the same text in another file.
                self._lost = (
                    self._lost
                    or read_plain(self._path, _LONGEST) != self._text
                    or not names(self._path, os.fstat(self._file))
                )
            except OSError as error:  # None: it is no regular file
                self._lost = error.errno in (None, errno.ENOENT, errno.ENOTDIR)
            if not self._lost:
                self._write()

    def _write(self) -> None:
        owner = Owner.this_process()
        self._seen, self._text = owner.heartbeat, json.dumps(asdict(owner)).encode()
        os.pwrite(self._file, self._text, 0)  # the text's length never changes


#: Descriptors of locked files; a forked child closes them, since it may outlive the owner.
_open: set[int] = set()


def _close(descriptor: int) -> None:
    _open.discard(descriptor)
    os.close(descriptor)


def _close_all() -> None:
    for descriptor in list(_open):
        _close(descriptor)


os.register_at_fork(after_in_child=_close_all)


def _locked(run: Path) -> int:
    path = run / OWNER_FILE
    while True:
        descriptor = open_in_place(path, os.O_RDWR)
        _open.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _close(descriptor)
            raise _refusal(run, f"folder={run}", read_owner(run)) from None
        except OSError:
            return descriptor  # a file system without locks: the file's contents decide
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        _close(descriptor)  # an earlier owner has just removed this file; open the new one


def _parsed(content: bytes) -> Owner | None:
    try:
        owner = Owner(**json.loads(content))
        pid, restarts, heartbeat = int(owner.pid), int(owner.restarts), int(owner.heartbeat)
        return replace(owner, pid=pid, restarts=restarts, heartbeat=heartbeat)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _refusal(run: Path, setting: str, owner: Owner | None) -> OwnedElsewhere:
    return OwnedElsewhere(
        f"{setting}: {owner or 'another process'} is still running it; wait, or stop it (or, if "
        f"there is none, delete {run / OWNER_FILE})"
    )


def remove_leftovers(run: Path) -> None:
    """Remove the temporary files of a killed process; only the owner may call this."""
    for pattern in _LEFTOVERS:
        for path in run.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------- processes


def process_start(pid: int) -> str | None:
    """Return when a process of this machine started; None if it has ended.

    On Linux, the unit is kernel clock ticks; on macOS, it is a date. The start time distinguishes
    processes of the same id: after a reboot, or in a container, ids are reused.
    """
    try:
        stat = (_PROCESSES / f"{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None if _PROCESSES.exists() else _start_by_ps(pid)
    return None if stat[0] in "ZX" else stat[19]  # Z, X: ended, but not yet reaped by its parent


def _start_by_ps(pid: int) -> str | None:
    """Return when a process started, to the second; for macOS, which has no ``/proc``."""
    # The output must not depend on the user's language and time zone.
    status, output = getstatusoutput(f"LC_ALL=C TZ=UTC ps -o stat= -o lstart= -p {pid}")
    state, _, started = output.partition(" ")
    return None if status or state.startswith("Z") else started.strip()


def lives_here(process: Mapping[str, Any]) -> bool:
    """Return True if the process of a manifest or an owner file still runs on this machine."""
    pid = process.get("pid")
    if pid is None or process.get("host", platform.node()) != platform.node():
        return False
    started = process_start(int(pid))
    return started is not None and started == process.get("pid_started")
