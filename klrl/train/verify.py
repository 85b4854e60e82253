"""Verifies a run: its rows against themselves, its checkpoints and its closing evaluations."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from klrl.base.errors import ConfigError, EnvError, NonFiniteError, RewardError, first_line
from klrl.base.text import counted
from klrl.config import JobConfig, LegacyKLConfig, RetrieveKLConfig
from klrl.config.placement import OWN
from klrl.domains import LANGUAGE, domain_of
from klrl.runs.entry import CheckpointEntry, DamagedEntry
from klrl.runs.folder import RunFolder, versions
from klrl.runs.machine import device_of
from klrl.runs.metrics import Row
from klrl.runs.resume import edited_settings
from klrl.runs.rows import read_rows
from klrl.train.schedule import schedule
from klrl.train.scores import CLOSING, EvaluationPlan

#: Allowed relative difference of a repeated evaluation on the run's machine and versions. Rounding
#: differs on other machines and versions, so there the allowed difference is one standard error.
_SAME = 1e-3
#: Rounding errors: of a mean reward; of a mean KL in nats, and relative.
_REWARD, _NATS, _SHARE = 1e-4, 1e-5, 1e-3
#: Metrics that have a closed form, and so are never negative.
_CLOSED = ("kl/ref/exact", "kl/ref/forward", "kl/old/exact")
#: Largest difference of the exact KL and k1 over all rows, in standard errors.
_ERRORS = 5
#: A log-ratio, nats, that is so rare that no rollout may have it; it counts in the standard error.
_RARE = 30.0


@dataclass
class Record:
    """The result of verifying a run folder, as lines of text."""

    problems: list[str] = field(default_factory=list)  # what is false in the folder
    looked: list[str] = field(default_factory=list)  # what was checked
    unseen: list[str] = field(default_factory=list)  # what was not checked

    @property
    def lines(self) -> list[str]:
        """The report, a line each: what is wrong, what was checked and what was not."""
        seen = [f"checked: {each}" for each in self.looked]
        return [*self.problems, *seen, *(f"not checked: {each}" for each in self.unseen)]


def verify_record(folder: Path, config: JobConfig, device: str, record: Record) -> list[Row]:
    """Check settings, checkpoints, rows and closing evaluations of a run; return its rows."""
    files = RunFolder(folder)
    if edited := edited_settings(folder):
        record.problems.append(edited)
    entries = sorted(folder.glob("checkpoints/*/frames-*"))
    for path in entries:
        place = path.relative_to(folder / "checkpoints")
        try:
            (entry := CheckpointEntry(path)).check()
            if entry.metadata.get("run") != files.manifest.get("id"):
                record.problems.append(f"checkpoint {place} belongs to another run")
        except DamagedEntry as error:
            record.problems.append(f"checkpoint {place} is damaged ({error})")
    rows = read_rows(files.metrics, record.problems.append) if files.metrics.is_file() else []
    rows = [{k: v for k, v in row.items() if v is not None and math.isfinite(v)} for row in rows]
    for row in rows:
        for name, reason in _contradictions(row, config):
            at = f"metrics.jsonl: iteration {row.get('iteration')}"
            record.problems.append(f"{at}: {name} is {row[name]:.6g}, but {reason}")
    record.problems += [*_lost(files, rows, config), *_exact_kl(rows, config)]
    record.looked += [f"settings and {counted(len(entries), 'checkpoint')} against digests"]
    record.looked.append(f"{counted(len(rows), 'row')}, each against itself")
    if other := sum(_of_others(row) for row in rows):
        told = f"kl/ref/k1 of {counted(other, 'row')}, whose samples another policy drew"
        record.unseen.append(told)
    _evaluations(folder, config, rows, device, record)
    return rows


# ---------------------------------------------------------------------- rows against themselves


def _contradictions(row: Row, config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield each metric that contradicts others in its row, with the reason."""
    for name in _CLOSED:
        if row.get(name, 0.0) < -_NATS:
            yield name, "a KL is at least 0"
    for name in row:
        whole, length = f"{name}_seq", row.get("reward/episode_length", 0.0)
        if whole in row and _differ(row[whole], row[name] * length, _NATS * length):
            yield whole, f"{name} * reward/episode_length is {row[name] * length:.6g}"
    if not {"reward/raw", "reward/shaped", "kl/ref/penalty", "kl/ref/coef"} <= row.keys():
        return  # an evaluation before the first iteration
    raw, coef = row["reward/raw"], row["kl/ref/coef"]
    shaped = raw - row["kl/ref/penalty"]
    if abs(row["reward/shaped"] - shaped) > _REWARD * max(1.0, abs(raw)):
        yield "reward/shaped", f"reward/raw - kl/ref/penalty is {shaped:.6g}"
    kl = _charged(config)
    # In the environment the KL is charged before the log-probs of the sampled tokens are rescored.
    early = isinstance(config.kl, LegacyKLConfig) and config.kl.apply == "step"
    rounding = _NATS + (row.get("policy/gap", 0.0) if early else 0.0)
    if kl in row and _differ(row["kl/ref/penalty"], coef * row[kl], coef * rounding):
        yield "kl/ref/penalty", f"kl/ref/coef * {kl} is {coef * row[kl]:.6g}"


def _lost(files: RunFolder, rows: Sequence[Row], config: JobConfig) -> Iterator[str]:
    """Yield a problem if rows, or the last checkpoint of a finished run, are missing."""
    found = [row["iteration"] for row in rows if "reward/raw" in row]
    if found != [*range(1, len(found) + 1)]:
        yield "metrics.jsonl: its iterations are not 1, 2, 3 and so on"
    if files.status != "finished":
        return
    axis, early = domain_of(config).axis, config.collector.patience is not None
    if not rows or (rows[-1].get(axis, 0) < config.frames and not early):
        yield f"metrics.jsonl: the run is finished, but no row has {axis}={config.frames} or more"
    if not any(files.checkpoints.glob("last/frames-*")):
        yield "checkpoints/last: the run is finished, but has none"


def _charged(config: JobConfig) -> str:
    """Return the metric that is charged to the reward; empty if none, or a custom estimator, is."""
    kl = config.kl
    if not isinstance(kl, RetrieveKLConfig):
        return "kl/ref/k1" if isinstance(kl, LegacyKLConfig) else ""
    if kl.placement == "loss" or kl.estimator == OWN:
        return ""
    return f"kl/ref/{kl.estimator}" if kl.divergence == "reverse" else "div/ref/charged"


def _of_others(row: Row) -> bool:
    """Return whether a policy that differs from the one before the update drew the samples."""
    return row.get("kl/sampler/max", 0.0) > 0


def _differ(one: float, other: float, rounding: float) -> bool:
    return abs(one - other) > rounding + _SHARE * abs(other)


def _exact_kl(rows: Sequence[Row], config: JobConfig) -> Iterator[str]:
    """Yield a problem if the exact KL of all rows contradicts k1, its estimate in the same states.

    k1 is the mean of r = log pi - log pi_ref at the N sampled actions, and has the mean KL and at
    most the variance E[r^2] / N = 2 k2 / N. In 16 bits the actions come from a rounded policy mu,
    with KL(mu||pi) = ``kl/ref/floor``. This changes the mean of r by at most 2 sqrt(floor k2), by
    Cauchy-Schwarz and to second order in the rounding.
    """
    exact = k1 = rounding = 0.0  # nats in all rows
    variance = _RARE**2
    read = {"kl/ref/exact", "kl/ref/k1", "kl/ref/k2"}
    # Weights of other policies' samples have no bound.
    for row in (row for row in rows if read <= row.keys() and not _of_others(row)):
        count = config.frames_per_iteration * 1.0
        if config.domain == LANGUAGE.name:
            count *= row["reward/episode_length"]
        exact, k1 = exact + count * row["kl/ref/exact"], k1 + count * row["kl/ref/k1"]
        variance += 2 * count * row["kl/ref/k2"]
        of_mu = 2 * math.sqrt(max(row.get("kl/ref/floor", 0.0), 0.0) * row["kl/ref/k2"])
        rounding += count * (of_mu + _NATS)
    allowed = _ERRORS * math.sqrt(variance) + rounding
    if abs(exact - k1) > allowed:
        told = f"{exact:.6g} nats, but kl/ref/k1 to {k1:.6g} (at most {allowed:.3g} apart)"
        yield f"metrics.jsonl: over all frames kl/ref/exact sums to {told}"


# ------------------------------------------------------------------------- closing evaluations


def _evaluations(
    folder: Path, config: JobConfig, rows: Sequence[Row], device: str, record: Record
) -> None:
    """Repeat the closing evaluations of the last and best checkpoint; compare with the last row."""
    files, last = RunFolder(folder), rows[-1] if rows else Row()
    manifest = files.manifest
    if not (config.eval.final and files.status == "finished" and "eval/return" in last):
        record.unseen.append("closing evaluations of the checkpoints: there are none")
        return
    if manifest.get("repeatable") == "no":
        record.unseen.append("closing evaluations: the manifest says repeatable: no")
        return
    here = (manifest.get("host"), manifest.get("versions")) == (platform.node(), versions())
    if not here:
        why = "the manifest names a different host or versions"
        record.unseen.append(f"differences smaller than a standard error: {why}")
    domain = domain_of(config)
    size = schedule(config, domain.function("longest")(config)).closing
    plan = EvaluationPlan(CLOSING, size, config.eval.sampled, device_of(device))
    for which, prefix in (("last", "eval/"), ("best", "eval/best_")):
        if f"{prefix}return" not in last:
            continue
        try:
            played: Row = domain.function("evaluate")(folder, config, plan, which).row
        except (ConfigError, EnvError, RewardError, NonFiniteError) as error:
            record.unseen.append(f"evaluation of the {which} checkpoint ({first_line(error)})")
            continue
        compared = {name.replace("eval/", prefix): name for name in played}
        compared = {label: name for label, name in compared.items() if label in last}
        record.looked.append(f"{', '.join(compared)}, computed again")
        for label, name in compared.items():
            now, allowed = played[name], 1e-6 + _SAME * abs(played[name])
            if not here:
                allowed = max(allowed, played.get(f"{name}_se", 0.5 * abs(now)))
            if not abs(last[label] - now) <= allowed:
                told = f"recorded {last[label]:.6g}, but the {which} checkpoint has {now:.6g}"
                record.problems.append(f"{label}: {told}")
