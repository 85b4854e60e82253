"""Verifies the settings, metrics, samples and closing evaluations that a run stored."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from klrl.base.errors import EnvError, NonFiniteError, RewardError, first_line
from klrl.base.files import ROWS, read_plain
from klrl.base.text import counted
from klrl.config import JobConfig
from klrl.domains import domain_of
from klrl.runs.checkpoint import digests
from klrl.runs.entry import CheckpointEntry, DamagedEntry, whole_entries
from klrl.runs.folder import RunFolder, versions
from klrl.runs.machine import device_of
from klrl.runs.metrics import Row
from klrl.runs.resume import edited_settings
from klrl.runs.rows import rows_so_far
from klrl.train.evaluate import CLOSING, EvaluationPlan
from klrl.train.schedule import schedule

#: Allowed relative difference of a repeated evaluation on the run's machine and versions. Rounding
#: differs on other machines and versions, so there the allowed difference is one standard error.
_SAME = 1e-3
#: Entries of any run that are never checked.
_UNSEEN = (
    *("times", "losses and other training metrics, beyond their digests"),
    *("evaluations before the closing one", "components of the samples' rewards"),
    *("the seed of a control run", "command, machine and versions of the manifest"),
    *("pictures and loggers' files", "digests that were recomputed after a change"),
)


@dataclass
class Record:
    """The result of verifying a run folder, as lines of text."""

    problems: list[str] = field(default_factory=list)  # what is false in the folder
    looked: list[str] = field(default_factory=list)  # what was checked
    unseen: list[str] = field(default_factory=list)  # what was not checked

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def lines(self) -> list[str]:
        """The report; its last line names what was not checked."""
        looked, unseen = "; ".join(self.looked), "; ".join(self.unseen)
        return [*self.problems, f"checked: {looked}", f"not checked: {unseen}"]


def verify_record(folder: Path, config: JobConfig, device: str, record: Record) -> None:
    """Compare settings, metrics and samples with stored digests; repeat closing evaluations."""
    files = RunFolder(folder)
    if edited := edited_settings(folder):
        record.problems.append(edited)
    record.looked.append("settings against the manifest's digest")

    def damaged(path: Path, error: DamagedEntry) -> None:
        record.problems.append(f"checkpoint {path} is damaged ({error})")

    entries = list(whole_entries(folder, damaged))
    for file in (files.metrics, files.samples):
        _compare(file, entries, record)
    rows = whole_rows(folder, config, record)
    _check_rows(rows, config, files.status, record)
    _evaluations(folder, config, rows, device, record)
    record.unseen += _UNSEEN


def whole_rows(folder: Path, config: JobConfig, record: Record) -> list[Row]:
    """Return finite values of rows with iteration and frames; report others as problems."""
    rows, needed = [], {"iteration", domain_of(config).axis}
    for number, read in enumerate(rows_so_far(folder), 1):
        row = {k: v for k, v in read.items() if v is not None and math.isfinite(v)}
        for name in sorted({*needed, *read} - {*row}):
            record.problems.append(f"metrics.jsonl: row {number} has no finite {name}")
        rows += [row] * (needed <= {*row})
    return rows


def _compare(file: Path, entries: list[CheckpointEntry], record: Record) -> None:
    """Compare a file with each checkpoint's digest of the lines written before the checkpoint."""
    content, seen = read_plain(file, ROWS) if file.is_file() else b"", 0
    for entry in entries:
        mark = entry.metadata.get("rows", {}).get(file.name, {})
        length, place = int(mark.get("bytes", 0)), f"checkpoint {entry.path.name}"
        if len(content) < length:
            record.problems.append(
                f"{file.name}: has {len(content):,} bytes, but had {length:,} at {place}"
            )
        elif length and hashlib.sha256(content[:length]).hexdigest() != mark.get("sha256"):
            record.problems.append(f"{file.name}: its lines before {place} were changed")
        seen = max(seen, length)
    lines, later = (counted(x.count(b"\n"), "line") for x in (content[:seen], content[seen:]))
    if seen:
        record.looked.append(f"{lines} of {file.name} against digests")
    if content[seen:]:
        record.unseen.append(f"{later} of {file.name}, written after the last checkpoint")


def _check_rows(rows: Sequence[Row], config: JobConfig, status: object, record: Record) -> None:
    """Check iterations and frames of the metrics; a finished run must have all iterations."""
    done = [int(row["iteration"]) for row in rows]
    axis, size = domain_of(config).axis, config.frames_per_iteration
    if any(i != min(done[0], 1) + number for number, i in enumerate(done)):
        record.problems.append("metrics.jsonl: rows of some iterations are missing")
    for row in rows:
        if row.get(axis) != row["iteration"] * size:
            told = f"has {axis}={row.get(axis)}, but each iteration has {size}"
            record.problems.append(f"metrics.jsonl: iteration {row['iteration']} {told}")
    last = done[-1] if done else 0
    # collector.patience may end a run before its last iteration.
    short = last < config.iterations and status == "finished" and config.collector.patience is None
    if last > config.iterations or short:
        told = f"ends with iteration {last}, but the run has {config.iterations}"
        record.problems.append(f"metrics.jsonl: {told}")


def _evaluations(
    folder: Path, config: JobConfig, rows: Sequence[Row], device: str, record: Record
) -> None:
    """Repeat the closing evaluations of the last and best checkpoint; compare with ``rows``."""
    end = rows[-1]["iteration"] if rows and config.collector.patience else config.iterations
    last = next((row for row in rows if row["iteration"] == end), Row())
    if not (config.eval.final and "eval/return" in last):
        record.unseen.append("evaluations: the run has no closing evaluation")
        return
    manifest = RunFolder(folder).manifest
    here = (manifest.get("host"), manifest.get("versions")) == (platform.node(), versions())
    if not here:
        why = "the manifest names a different host or versions"
        record.unseen.append(f"differences smaller than a standard error: {why}")
    wrong = record.unseen if manifest.get("repeatable") == "no" else record.problems
    if wrong is record.unseen:
        record.unseen.append("closing evaluations that differ: the manifest says repeatable: no")
    domain = domain_of(config)
    size = schedule(config, domain.function("longest")(config)).closing
    plan = EvaluationPlan(CLOSING, size, config.eval.sampled, device_of(device))
    for which, prefix in (("last", "eval/"), ("best", "eval/best_")):
        if f"{prefix}return" not in last:
            if (folder / "checkpoints" / which).exists():
                record.unseen.append("the best checkpoint, whose evaluation is not recorded")
            continue
        if digests(folder, which, ()) is None:
            record.problems.append(f"checkpoint {which}: no intact entry is left")
            continue
        try:
            played: Row = domain.function("evaluate")(folder, config, plan, which).row
        except (EnvError, RewardError, NonFiniteError) as error:
            record.unseen.append(f"evaluation of the {which} checkpoint ({first_line(error)})")
            continue
        names = list(played) if which == "last" else ["eval/return", "eval/return_se"]
        compared = {name.replace("eval/", prefix): name for name in names if name in played}
        record.looked.append(f"{', '.join(compared)}, computed again")
        for label, name in compared.items():
            now = played[name]
            told = f"but the {which} checkpoint has {now:.6g}"
            allowed = 1e-6 + _SAME * abs(now)
            if not here:
                allowed = max(allowed, played.get(f"{name}_se", 0.5 * abs(now)))
            if label not in last:
                missing = wrong if here else record.unseen
                missing.append(f"{label}: not recorded, {told}")
            elif not abs(last[label] - now) <= allowed:
                wrong.append(f"{label}: recorded {last[label]:.6g}, {told}")
