"""Calls SLURM's commands and parses their output, without its accounting, which is often off."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

#: Seconds for one command; a busy controller takes many.
_TIMEOUT = 60
#: Limit on an array if SLURM does not report its own: SLURM's default.
_MAX_ARRAY = 1001
#: States of a job that SLURM ended but that could continue.
CUT_SHORT = frozenset({"TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL"})


def here() -> bool:
    """Whether this machine can submit jobs to SLURM."""
    return all(shutil.which(command) for command in ("sbatch", "srun", "squeue"))


def in_queue(submissions: Path) -> dict[str, str] | None:
    """List the queued jobs whose batch file is below a folder: ``{"12_3": "RUNNING"}``.

    None if SLURM does not answer.
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
    """Return how many jobs an array may have, at least 1."""
    told = _ask("scontrol", "show", "config") or ""
    size = re.search(r"^MaxArraySize\s*=\s*(\d+)", told, re.MULTILINE)
    return max(int(size[1]) if size else _MAX_ARRAY, 1)


def requeue(job: str) -> str | None:
    """Requeue a job under its id; return the reason if SLURM refuses."""
    try:
        _run("scontrol", "requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        return " ".join(str(getattr(error, "stderr", None) or error).split())
    return None


def cancel(jobs: Iterable[str], *flags: str) -> None:
    """Cancel jobs, running ones too."""
    jobs = list(jobs)
    for start in range(0, len(jobs), 500):  # the length of a command line is limited
        _ask("scancel", "--quiet", *flags, *jobs[start : start + 500])


def why_stopped(job: str, restarts: str) -> str:
    """Return why SLURM signalled a job to stop; ``restarts`` is the job's SLURM_RESTART_COUNT.

    ``warned``: the job still runs, or its time is over, or it is preempted; it may requeue itself.
    ``requeued``: SLURM has already requeued the job. ``cancelled``: a person cancelled it.
    """
    told = about(job)
    if told.get("JobState") in ("RUNNING", "SUSPENDED", None):
        return "warned"
    if told.get("Restarts", restarts) != restarts:
        return "requeued"
    over = told.get("Reason") == "TimeLimit" or told["JobState"] in CUT_SHORT
    # While SLURM ends a job, its state does not say why.
    return "warned" if over or told.get("PreemptTime", "None") != "None" else "cancelled"


def refusal(error: BaseException) -> str:
    """Return the message of sbatch in one line."""
    lines = [line for line in str(error).splitlines() if not line.startswith("Try ")]
    said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines]
    return "; ".join(dict.fromkeys(filter(None, map(str.strip, said)))) or type(error).__name__


def _ask(*command: str) -> str | None:
    """Run a command; return what it prints, None if it fails."""
    try:
        return _run(*command)
    except (OSError, subprocess.SubprocessError):
        return None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True)
    return done.stdout
