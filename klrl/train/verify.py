"""Verify the record of a run of any domain; report problems, and what was not checked."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass, field
from pathlib import Path

from klrl.base.errors import EnvError, NonFiniteError, RewardError, first_line
from klrl.base.files import read_plain
from klrl.config import JobConfig
from klrl.domains import domain_of
from klrl.runs.entry import CheckpointEntry, DamagedEntry, whole_entries
from klrl.runs.folder import RunFolder, versions
from klrl.runs.machine import device_of
from klrl.runs.metrics import Row
from klrl.runs.resume import edited_settings
from klrl.runs.rows import read_rows
from klrl.train.evaluate import CLOSING
from klrl.train.schedule import schedule

#: Allowed relative difference of a repeated evaluation, on the run's machine and versions. On
#: others rounding may differ, so the standard error is allowed there.
_SAME = 1e-3


@dataclass
class Record:
    """The result of verifying a run folder, in lines of text.

    Attributes:
        problems: false entries of the record.
        looked: what was compared.
        unseen: what was not checked.
    """

    problems: list[str] = field(default_factory=list)
    looked: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        """The report; its last line names what was not checked."""
        looked, unseen = "; ".join(self.looked), "; ".join(self.unseen)
        return [*self.problems, f"looked at: {looked}", f"not looked at: {unseen}"]


def verify_record(folder: Path, config: JobConfig, device: str = "cpu") -> Record:
    """Compare settings, rows and samples with their digests; repeat the closing evaluations."""
    record, files = Record(), RunFolder(folder)
    if edited := edited_settings(folder):
        record.problems.append(edited)
    record.looked.append("settings against the manifest's digest")

    def damaged(path: Path, error: DamagedEntry) -> None:
        record.problems.append(f"checkpoint {path} is damaged ({error})")

    entries = list(whole_entries(folder, damaged))
    for file in (files.metrics, files.samples):
        _compare(file, entries, record)
    _evaluations(folder, config, device, record)
    record.unseen += ["times", "losses and other numbers of training beyond these digests"]
    return record


def _compare(file: Path, entries: list[CheckpointEntry], record: Record) -> None:
    """Compare a file with each checkpoint's digest; no digest covers lines after the last one."""
    content, seen = read_plain(file) if file.is_file() else b"", 0
    for entry in entries:
        mark = entry.metadata.get("rows", {}).get(file.name, {})
        length, place = int(mark.get("bytes", 0)), f"checkpoint {entry.path.name}"
        if len(content) < length:
            record.problems.append(
                f"{file.name}: has {len(content):,} bytes, and had {length:,} at {place}"
            )
        elif length and hashlib.sha256(content[:length]).hexdigest() != mark.get("sha256"):
            record.problems.append(f"{file.name}: its lines before {place} were changed")
        seen = max(seen, length)
    lines, behind = (part.count(b"\n") for part in (content[:seen], content[seen:]))
    if lines:
        record.looked.append(f"{lines} lines of {file.name} against digests")
    if behind:
        record.unseen.append(f"digests of {behind} lines of {file.name} behind the last checkpoint")


def _evaluations(folder: Path, config: JobConfig, device: str, record: Record) -> None:
    """Repeat the closing evaluations of the last and the best checkpoint, and compare."""
    file = RunFolder(folder).metrics
    rows = read_rows(file, say=lambda line: None) if file.is_file() else []
    last = rows[-1] if rows else {}
    done = rows and last.get("iteration") == config.iterations
    if not (done and config.eval.final and "eval/return" in last):
        record.unseen.append("evaluations: the run has no closing one")
        return
    manifest = RunFolder(folder).manifest
    here = (manifest.get("host"), manifest.get("versions")) == (platform.node(), versions())
    domain = domain_of(config)
    longest = domain.function("longest")(config)
    for which, names in (
        ("last", ("eval/return", "eval/kl_ref", "eval/kl_ref_forward")),
        ("best", ("eval/best_return",)),
    ):
        if not any(name in last for name in names):
            continue
        try:
            played: Row = domain.function("evaluate")(
                folder,
                config,
                starts=CLOSING,
                size=schedule(config, longest).closing,
                sampled=config.eval.sampled,
                which=which,
                device=device_of(device),
            ).row
        except (EnvError, RewardError, NonFiniteError) as error:
            record.unseen.append(f"evaluation of the {which} checkpoint ({first_line(error)})")
            continue
        for name in names:
            if name not in last:
                continue
            now = played[name.replace("best_", "")]
            allowed = 1e-6 + _SAME * abs(now)
            if not here:
                allowed = max(allowed, last.get(f"{name}_se", 0.0))
            record.looked.append(f"{name}, played again")
            if not abs(last[name] - now) <= allowed:
                record.problems.append(
                    f"{name}: {last[name]:.6g} is recorded, the {which} checkpoint has {now:.6g}"
                )
