"""Calls SLURM's commands and parses their output; needs no accounting, which is often off."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

#: Time limit for a command in seconds; a busy controller answers slowly.
_TIMEOUT = 60
#: Maximum size of an array, if SLURM does not report it: SLURM's default.
_MAX_ARRAY = 1001
#: States of jobs that SLURM ended too early, and that may continue.
CUT_SHORT = frozenset({"TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL"})


def here() -> bool:
    """Return True if this machine can submit jobs to SLURM."""
    return all(shutil.which(command) for command in ("sbatch", "srun", "squeue"))


def in_queue(submissions: Path) -> dict[str, str] | None:
    """Return id -> state ("12_3" -> "RUNNING") of queued jobs whose batch files are in a folder.

    Returns None if SLURM does not answer.
    """
    user = f"--user={getpass.getuser()}"
    # The batch file comes last, since its name may contain the separator.
    told = _ask("squeue", "--noheader", "--array", user, "--format=%i|%T|%o")
    if told is None:
        return None
    jobs = [line.split("|", 2) for line in told.splitlines() if line.count("|") >= 2]
    files = {file.strip() for *_, file in jobs}
    own = {file for file in files if Path(file).resolve().is_relative_to(submissions.resolve())}
    return {job.strip(): state.strip() for job, state, file in jobs if file.strip() in own}


def about(job: str) -> dict[str, str]:
    """Return SLURM's fields for a job that is, or recently was, in the queue; empty if unknown."""
    told = _ask("scontrol", "--oneliner", "show", "job", job) or ""
    return dict(re.findall(r"(?:^|\s)([A-Za-z:]+)=(\S*)", told))


def max_array_size() -> int:
    """Return the maximum number of jobs in an array, at least 1."""
    told = _ask("scontrol", "show", "config") or ""
    size = re.search(r"^MaxArraySize\s*=\s*(\d+)", told, re.MULTILINE)
    return max(int(size[1]) if size else _MAX_ARRAY, 1)


def requeue(job: str) -> str | None:
    """Requeue a job under its id; return the reason if SLURM refuses, else None."""
    try:
        _run("scontrol", "requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        return " ".join(str(getattr(error, "stderr", None) or error).split())
    return None


def cancel(jobs: Iterable[str], *flags: str) -> None:
    """Cancel or signal jobs by ``scancel``; ``flags`` are its options."""
    jobs = list(jobs)
    for start in range(0, len(jobs), 500):  # the length of a command line is limited
        _ask("scancel", "--quiet", *flags, *jobs[start : start + 500])


def why_stopped(job: str, restarts: str) -> str:
    """Return why SLURM signalled a job to stop; ``restarts`` is the job's SLURM_RESTART_COUNT.

    ``warned``: the job still runs, its time is over, or it is preempted; it may requeue itself.
    ``requeued``: SLURM has already requeued the job. ``cancelled``: a person cancelled the job.
    """
    told = about(job)
    if told.get("JobState") in ("RUNNING", "SUSPENDED", None):
        return "warned"
    if told.get("Restarts", restarts) != restarts:
        return "requeued"
    over = told.get("Reason") == "TimeLimit" or told["JobState"] in CUT_SHORT
    # While SLURM ends a job, the state alone does not show the reason.
    return "warned" if over or told.get("PreemptTime", "None") != "None" else "cancelled"


def refusal(error: BaseException) -> str:
    """Return the message of sbatch in one line."""
    lines = [line for line in str(error).splitlines() if not line.startswith("Try ")]
    said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines]
    return "; ".join(dict.fromkeys(filter(None, map(str.strip, said)))) or type(error).__name__


def _ask(*command: str) -> str | None:
    """Run a command; return its output, None if it fails."""
    try:
        return _run(*command)
    except (OSError, subprocess.SubprocessError):
        return None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    return done.stdout
