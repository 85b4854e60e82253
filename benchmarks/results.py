"""Where figures go: ``benchmarks/results/<machine>.json``, and docs/developers/performance.md.

python -m benchmarks.results        # write the tables again from this machine's file
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.common import versions

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "developers" / "performance.md"
START = "<!-- measured: written by benchmarks/results.py -->"
END = "<!-- end of measured -->"


def environment() -> dict[str, str]:
    """Of a process to be measured: one thread, this checkout, nothing sent to wandb."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    fixed = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    return {**os.environ, **dict.fromkeys(threads, "1"), **fixed}


def cpu_name() -> str:
    """The processor's model, without marketing."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    name = found[1] if found else platform.processor() or platform.machine()
    return re.sub(r"\((R|TM|C)\)|@.*|CPU|Processor|\d+-Core", "", name, flags=re.I).strip()


def machine() -> str:
    """A short name for this kind of machine: its processor and how many cores may be used."""
    count = getattr(os, "process_cpu_count", None)
    cores = count() if count else len(os.sched_getaffinity(0))
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu_name()} {cores} cores".lower()).strip("-")


def commit() -> str | None:
    """The checkout's commit, with a + where files have changed; None outside git."""
    words = ("git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def save(section: str, data: dict[str, Any]) -> Path:
    """Put a section into this machine's file and write the page's tables from it."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{machine()}.json"
    whole = json.loads(path.read_text()) if path.exists() else {}
    whole["machine"] = {"cpu": cpu_name(), "name": machine(), "system": platform.system()}
    about = {"commit": commit(), "versions": versions(), "processor": cpu_name()}
    # A part that was not measured this time stays.
    whole[section] = {**whole.get(section, {}), **about, **data}
    path.write_text(json.dumps(whole, indent=1, sort_keys=False) + "\n")
    write_page(whole)
    return path


def write_page(whole: dict[str, Any]) -> None:
    """Replace what stands between the two marks of docs/developers/performance.md."""
    if not PAGE.exists():
        return
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{PAGE.name}: the marks {START} and {END} are missing")
    PAGE.write_text(f"{before}{START}\n\n{render(whole)}\n\n{END}{after}")


def render(whole: dict[str, Any]) -> str:
    """All sections that are there, as Markdown."""
    parts = [f"Machine: {whole['machine']['name']}."]
    for section, tell in (("throughput", throughput), ("language", language)):
        if section in whole:
            parts.append(tell(whole[section]))
    return "\n\n".join(parts)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def prose(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def spread(found: dict[str, float], digits: int = 0) -> str:
    """``median [least, most]``"""
    told = [f"{found[key]:,.{digits}f}" for key in ("median", "min", "max")]
    return f"{told[0]} [{told[1]}, {told[2]}]"


# ------------------------------------------------------------------------------------- sections


def throughput(data: dict[str, Any]) -> str:
    parts = [told_versions(data["versions"])]
    for name, contenders in data["workloads"].items():
        parts += [f"### {name}", speeds(contenders), phases(contenders)]
    if data.get("scaling"):
        parts += ["### Copies of the environment", scaling(data["scaling"])]
    if data.get("kl"):
        parts += ["### What the KL to a reference costs", kl_shares(data["kl"])]
    return "\n\n".join(parts)


def told_versions(found: dict[str, str]) -> str:
    return prose(f"Versions: {', '.join(f'{name} {number}' for name, number in found.items())}.")


def speeds(contenders: dict[str, Any]) -> str:
    against = sorted({name for row in contenders.values() for name in row.get("ratios", {})})
    header = ["", "frames per CPU-second", *(f"x {name}" for name in against), "compile, s"]
    rows = []
    for name, row in contenders.items():
        if "error" in row:
            rows.append([name, row["error"], *[""] * (len(against) + 1)])
            continue
        ratios = [spread(row["ratios"][x], 2) if x in row["ratios"] else "" for x in against]
        first, later = row["compile_seconds"]["first"], row["compile_seconds"]["median"]
        compiled = f"{later:.1f} (first {first:.1f})" if first else ""
        rows.append([name, spread(row["frames_per_cpu_second"]), *ratios, compiled])
    return table(header, rows)


def phases(contenders: dict[str, Any]) -> str:
    found = {name: row["phases"] for name, row in contenders.items() if row.get("phases")}
    names = list(dict.fromkeys(phase for row in found.values() for phase in row))
    rows = [
        [name, *(f"{row[phase]:.1f}" if phase in row else "" for phase in names)]
        for name, row in found.items()
    ]
    return table(["us of CPU per frame", *names], rows)


def scaling(rows: list[dict[str, Any]]) -> str:
    return table(
        ["copies x steps", "contender", "frames per CPU-second"],
        [
            [
                f"{r['n']} x {r['t']}",
                r["name"],
                r.get("error") or spread(r["frames_per_cpu_second"]),
            ]
            for r in rows
        ],
    )


def kl_shares(rows: list[dict[str, Any]]) -> str:
    return table(
        ["kl", "contender", "% of an iteration's CPU time"],
        [[r["kl"], r["name"], r.get("error") or spread(r["percent"], 1)] for r in rows],
    )


def language(data: dict[str, Any]) -> str:
    """Samples per CPU-second of language policies, a table for each workload."""
    parts = ["### Language policies", told_versions(data["versions"])]
    for name, contenders in data["workloads"].items():
        parts += [f"#### {name}, {data['epochs']} epoch(s)", samples(contenders, data["last"])]
        if phases_told := contenders["klrl"].get("phases"):
            told = ", ".join(f"{phase} {value:,.0f}" for phase, value in phases_told.items())
            parts.append(f"klrl, us of CPU per sample: {told}.")
    return "\n\n".join(parts)


def samples(contenders: dict[str, Any], last: int) -> str:
    last = contenders["klrl"].get("last", last)
    reward = f"reward at the start -> mean of the last {last} iterations"
    header = ["", "samples per CPU-second", "x TRL (target)", reward, "samples"]
    header += ["tokens per response", "peak MB"]
    rows = []
    for name, row in contenders.items():
        if "error" in row:
            rows.append([name, row["error"], *[""] * (len(header) - 2)])
            continue
        ratio = f"{spread(row['ratio'], 2)} ({row['target']:g})" if "ratio" in row else ""
        if "ratio_compact" in row:
            ratio += f"; with its head on response tokens alone {spread(row['ratio_compact'], 2)}"
        rewards = f"{spread(row['reward_first'], 2)} -> {spread(row['reward'], 2)}"
        name = f"{name} {row['versions'].get('trl', '')}".strip() if name == "TRL" else name
        speed = row["samples_per_cpu_second"]
        speed = spread(speed, 0 if speed["min"] >= 100 else 2)
        tokens = spread(row["tokens"], 1) if "tokens" in row else ""
        counts = [f"{row['samples']:,}", tokens, f"{row['peak_mb']:,}"]
        rows.append([name, speed, ratio, rewards, *counts])
    return table(header, rows)


if __name__ == "__main__":
    write_page(json.loads((FOLDER / f"{machine()}.json").read_text()))
