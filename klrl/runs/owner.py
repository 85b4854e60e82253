"""Lets only one process at a time write the folder of a run or a sweep, by the file ``owner.json``.

The owner holds a lock on the file (flock), and renews a heartbeat in it. On this machine, the lock
shows whether an owner is alive. But not every file system shares locks with other machines, and
some have none: there, an owner is alive as long as its heartbeat is.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from klrl.base.errors import ConfigError, OwnerError
from klrl.base.files import names, read_plain, to_update
from klrl.base.text import warn

OWNER_FILE = "owner.json"
#: Seconds between heartbeats; seconds of silence after which a remote owner counts as dead.
BEAT_SECONDS, SILENT_SECONDS = 20, 180
#: Seconds to try the lock, which a process that asks for the owner holds for an instant.
_PATIENCE = 0.5
#: Environment variables: the job's id in its queue; how often SLURM restarted the job.
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")
_RESTARTS = "SLURM_RESTART_COUNT"
#: Limit on the size of an owner file in bytes.
_LONGEST = 4096


class OwnedElsewhere(ConfigError):
    """Another process owns the folder; this process must not change it."""


@dataclass(frozen=True)
class Owner:
    """The process that writes a folder."""

    host: str
    pid: int
    job: str | None  # the job's id in its queue; None outside a queue
    restarts: int  # how often the queue restarted the job
    heartbeat: int  # time of the last heartbeat, seconds since 1970

    @classmethod
    def this_process(cls) -> Owner:
        """Describe this process as the owner, with a heartbeat now."""
        job = next((os.environ[name] for name in _JOB_IDS if os.environ.get(name)), None)
        restarts = os.environ.get(_RESTARTS, "")
        count = int(restarts) if restarts.isdecimal() else 0
        return cls(platform.node(), os.getpid(), job, count, int(time.time()))

    def alive(self, *, unlocked: bool) -> bool:
        """Return True if the process is still running, as far as this machine can tell.

        ``unlocked``: the lock is free, so that no process of this machine is the owner.
        """
        this = Owner.this_process()
        if unlocked and self.host == this.host:
            return False
        if self.job == this.job is not None and self.restarts < this.restarts:
            return False  # the queue restarted the job as this process
        return this.heartbeat - self.heartbeat < SILENT_SECONDS

    def __str__(self) -> str:
        job = f"job {self.job}, " if self.job else ""
        seen = max(int(time.time()) - self.heartbeat, 0)
        return f"process {self.pid} ({job}on {self.host}, seen {seen} s ago)"


def read_owner(folder: Path) -> Owner | None:
    """Return a folder's owner, alive or dead; None without a readable owner file."""
    try:
        owner = Owner(**json.loads(read_plain(folder / OWNER_FILE, _LONGEST)))
        pid, restarts, heartbeat = int(owner.pid), int(owner.restarts), int(owner.heartbeat)
        return replace(owner, pid=pid, restarts=restarts, heartbeat=heartbeat)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None


def living_owner(folder: Path) -> Owner | None:
    """Return a folder's owner if it is alive; needs no permission to write."""
    owner, lock = read_owner(folder), None
    if owner is None:
        return None
    try:
        lock = _locked(folder, 0.0)
    except Timeout:
        return owner
    except OSError:
        pass  # a folder that cannot be written
    if lock is not None:
        lock.release()
    return owner if owner.alive(unlocked=lock is not None) else None


def refuse_owned(folder: Path, setting: str) -> None:
    """Refuse a folder whose owner is alive, by an OwnedElsewhere."""
    owner = living_owner(folder)
    if owner is not None:
        raise _refusal(folder, setting, owner)


@contextmanager
def owning(folder: Path, setting: str) -> Iterator[Claim]:
    """Own a folder; make it if it is missing. ``setting`` names the folder in error messages.

    Raises:
        OwnedElsewhere: another process owns it.
    """
    new = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        claim = Claim(folder, setting)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot be written: {error}") from error
    try:
        yield claim
    finally:
        claim.release()
        if new:
            with suppress(OSError):  # not empty: a run began in it
                folder.rmdir()


class Claim:
    """A folder that this process owns, until :meth:`release`.

    Raises:
        OwnedElsewhere: another process owns the folder.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, setting: str) -> None:
        self._path = folder / OWNER_FILE
        to_update(self._path).close()  # refuses a link; replaces a hard link by a copy
        try:
            self._lock = _locked(folder, _PATIENCE)
        except Timeout:
            raise _refusal(folder, setting, read_owner(folder)) from None
        try:
            before = read_owner(folder)
            if before is not None and before.alive(unlocked=self._lock is not None):
                raise _refusal(folder, setting, before)
            self._write()
            self._file = self._path.stat()
        except BaseException:
            self._unlock()
            raise
        if before is not None:
            warn(f"{folder}: taken over from {before}, which did not end cleanly")
        self._ended, self._writing = threading.Event(), threading.Lock()
        threading.Thread(target=self._renew, daemon=True).start()

    def check(self) -> None:
        """Check that the folder still exists, and that no other process took it over.

        Raises:
            OwnerError: the check failed; this process must not write to the folder any more.
        """
        with self._writing:
            if self._is_ours():
                return
        folder = self._path.parent
        other = read_owner(folder)
        if other is not None and (other.host, other.pid) != (platform.node(), os.getpid()):
            raise OwnerError(f"{folder}: {other} took the run over, since this process was silent")
        raise OwnerError(
            f"{folder}: was moved or deleted during the run, or its {OWNER_FILE} was; resume the "
            "run where it is now"
        )

    def release(self) -> None:
        """Release the folder for other processes."""
        self._ended.set()
        with self._writing:
            if self._is_ours():
                self._path.unlink(missing_ok=True)
        self._unlock()

    def _is_ours(self) -> bool:
        """Return whether the file still has this process's text, and is no copy of its file."""
        try:
            text = read_plain(self._path, _LONGEST)
        except OSError as error:  # None: it is no regular file; others may pass
            return error.errno not in (None, errno.ENOENT, errno.ENOTDIR)
        return text == self._text and names(self._path, self._file)

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            # Ignore disk errors: if rows cannot be written, the run ends anyway.
            with self._writing, suppress(OSError, ConfigError):
                if self._is_ours() and not self._ended.is_set():
                    self._write()

    def _write(self) -> None:
        self._text = json.dumps(asdict(Owner.this_process())).encode()
        with to_update(self._path) as file:  # in place, which a full disk allows
            file.write(self._text)
            file.truncate()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _locked(folder: Path, seconds: float) -> FileLock | None:
    """Lock the owner file; None on a file system without locks. Raises Timeout, an OSError."""
    path = folder / OWNER_FILE
    lock = FileLock(path, timeout=seconds, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(poll_interval=0.05)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        return None
    return lock


def _refusal(folder: Path, setting: str, owner: Owner | None) -> OwnedElsewhere:
    return OwnedElsewhere(
        f"{setting}: {owner or 'another process'} is still running it; wait, or stop it (or, if "
        f"there is none, delete {folder / OWNER_FILE})"
    )
