"""Where figures go: ``benchmarks/results/<machine>.json``, and tables of three pages.

python -m benchmarks.results        # write the tables again from this machine's file
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.common import versions

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "developers" / "performance.md"
SUMMARY = ROOT / "docs" / "performance.md"
SCALING = ROOT / "docs" / "scaling.md"
START = "<!-- measured: written by benchmarks/results.py -->"
#: The mark of the second table of a page.
LANGUAGE = "<!-- language: written by benchmarks/results.py -->"
END = "<!-- end of measured -->"
SB3, KERNEL = "Stable-Baselines3", "klrl kernel"
#: Columns of the summary: its title -> the workload.
CONTROL = {
    "pendulum 8 x 256": "Pendulum-v1, 8 x 256",
    "half_cheetah 1 x 2048": "HalfCheetah-v5, 1 x 2048",
    "hopper 8 x 256": "Hopper-v5, 8 x 256",
    "cartpole 8 x 256": "CartPole-v1, 8 x 256",
    "pendulum, other rounds": "Pendulum-v1, 8 x 256, robotics",
}
#: What an iteration is measured by in the table of several processes.
SECONDS = ("wall", "CPU", "sampling", "scoring", "update")
#: Of gpu.json, for the first two.
GPU_JOBS = ("Pendulum 8 x 256, 64-64", "HalfCheetah 1 x 2,048, 64-64")


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


def commit(tree: Path = ROOT) -> str | None:
    """A checkout's commit, with a + where code has changed; None outside git."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ("git", *words), cwd=tree, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    # Not results and pages, which the measurement before this one wrote.
    changed = git("status", "--porcelain", "--", "klrl", "benchmarks", ":!benchmarks/results")
    return git("rev-parse", "HEAD") + "+" * bool(changed) or None


def short_commit(told: str | None) -> str:
    """Shorten the commits in a text to eight digits; keep the + of changed files."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{32}", r"\1", told or "not recorded")


def about() -> dict[str, Any]:
    """What decides a figure: the commit, versions and the processor."""
    return {"commit": commit(), "versions": versions(), "processor": cpu_name()}


def save(section: str, data: dict[str, Any]) -> Path:
    """Put a section into this machine's file and write the page's tables from it."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{machine()}.json"
    whole = json.loads(path.read_text()) if path.exists() else {}
    whole["machine"] = {"cpu": cpu_name(), "name": machine(), "system": platform.system()}
    # A part that was not measured this time stays.
    whole[section] = {**whole.get(section, {}), **data}
    path.write_text(json.dumps(whole, indent=1, sort_keys=False) + "\n")
    write_page(whole)
    return path


def write_page(whole: dict[str, Any]) -> None:
    """Replace what stands between the marks of each page with figures."""
    for page, start, make in tables():
        if page.exists():
            page.write_text(page_of(page, start, make(whole)))


def tables() -> tuple[tuple[Path, str, Callable[[dict[str, Any]], str]], ...]:
    """Page, mark and maker of each table."""
    summary = ((SUMMARY, START, control), (SUMMARY, LANGUAGE, ratios))
    return ((PAGE, START, render), *summary, (SCALING, START, ranks))


def page_of(page: Path, start: str, made: str) -> str:
    """Return a page's text with something else between its marks."""
    before, _, rest = page.read_text().partition(start)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{page.name}: the marks {start} and {END} are missing")
    return f"{before}{start}\n\n{made}\n\n{END}{after}"


def control(whole: dict[str, Any]) -> str:
    """Each workload's us of CPU per frame, and an H100's share of a core's speed."""
    found = {title: idle(whole, name) for title, name in CONTROL.items()}
    found = {title: part for title, part in found.items() if part["contenders"]}
    names = list(dict.fromkeys(name for part in found.values() for name in part["contenders"]))

    def row(name: str, values: Iterable[float | None]) -> list[str]:
        return [name, *("" if x is None else f"{x:.3g}" for x in values)]

    rows = [row(name, (us(part, name) for part in found.values())) for name in names]
    both = [[us(part, name) for name in (SB3, KERNEL)] for part in found.values()]
    rows.append(row("Stable-Baselines3 / klrl kernel", (a and b and a / b for a, b in both)))
    bounds = (part.get("limit", {}).get("us") for part in found.values())
    rows.append(row("the limit of the processor", bounds))
    told: dict[str, list[str]] = {}
    for title, part in found.items():
        told.setdefault(told_about(part, short=True), []).append(title)
    each = "; ".join(f"{', '.join(titles)}: {about}" for about, titles in told.items())
    gpu = json.loads((FOLDER / "gpu.json").read_text())["frames_per_second"]
    of = [
        f"{1e-6 * gpu[f'{job}, captured'] * (us(found[title], KERNEL) or 0):.2f} ({title})"
        for title, job in zip(found, GPU_JOBS, strict=False)
    ]
    shares = f"An H100 has {' and '.join(of)} times the speed of one such core: see CUDA below."
    return "\n\n".join([table(["", *found], rows), prose(f"{each}."), prose(shares)])


def idle(whole: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a workload's newest cells that are not loaded."""
    newest = whole.get("throughput", {}).get(name, {})
    _, most, cores = newest.get("load") or (0, 1, 0)
    return newest if most <= cores else whole.get("idle", {}).get(name, {"contenders": {}})


def us(part: dict[str, Any], name: str) -> float | None:
    """Median of the us of CPU per frame; None if it was not measured."""
    speed = part["contenders"].get(name, {}).get("frames_per_cpu_second")
    return 1e6 / speed["median"] if speed else None


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


def throughput(data: dict[str, Any]) -> str:
    parts = []
    for name, part in data.items():
        tables = [speeds(part["contenders"]), phases(part["contenders"])]
        parts += [f"### {name}", told_about(part), *tables]
    return "\n\n".join(parts)


def told_about(part: dict[str, Any], short: bool = False) -> str:
    """Commit, load and versions of a table, and the processor's limit; ``short``: the first two."""
    told = [f"commit: {short_commit(part.get('commit'))}"]
    told += [f"before: {short_commit(part['before'])}"] if "before" in part else []
    if part.get("load"):
        least, most, cores = part["load"]
        marked = "; LOADED" * (most > cores)
        told.append(f"load {least:g} to {most:g} on {cores} cores{marked}")
    else:
        told.append("load not recorded")
    if short:
        return ", ".join(told).replace(";", ",")
    if "limit" in part:
        bound = part["limit"]
        rates = f"{bound['gflops']:.0f} GFLOP/s, {bound['gb_per_second']:.0f} GB/s"
        told.append(f"the limit is {bound['us']:.1f} us a frame ({rates})")
    return prose("C" + "; ".join(told)[1:] + ". " + told_versions(part["versions"]))


def told_versions(found: dict[str, str]) -> str:
    return prose(f"Versions: {', '.join(f'{name} {number}' for name, number in found.items())}.")


def speeds(contenders: dict[str, Any]) -> str:
    against = sorted({name for row in contenders.values() for name in row.get("ratios", {})})
    header = ["", "frames per CPU-second", *(f"x {name}" for name in against)]
    rows = []
    for name, row in contenders.items():
        if "error" in row:
            rows.append([name, row["error"], *[""] * len(against)])
            continue
        ratios = [spread(row["ratios"][x], 2) if x in row["ratios"] else "" for x in against]
        rows.append([name, spread(row["frames_per_cpu_second"]), *ratios])
    return table(header, rows)


def phases(contenders: dict[str, Any]) -> str:
    found = {name: row["phases"] for name, row in contenders.items() if row.get("phases")}
    names = list(dict.fromkeys(phase for row in found.values() for phase in row))
    rows = [
        [name, *(f"{row[phase]:.1f}" if phase in row else "" for phase in names)]
        for name, row in found.items()
    ]
    return table(["us of CPU per frame", *names], rows)


def language(data: dict[str, Any]) -> str:
    """Samples per CPU-second of language policies, a table for each workload."""
    parts = ["### Language policies"]
    for name, part in data.items():
        parts += [f"#### {name}, {part['epochs']} epoch(s)", told_about(part), samples(part)]
        for each, row in part["contenders"].items():
            if us := row.get("phases"):
                told = ", ".join(f"{phase} {value:,.0f}" for phase, value in us.items())
                parts.append(prose(f"{each}, us of CPU per sample: {told}."))
    return "\n\n".join(parts)


def samples(part: dict[str, Any]) -> str:
    contenders, klrl = part["contenders"], part["contenders"]["klrl"]
    against = list(klrl.get("ratios", {}))
    header = ["", "samples per CPU-second", *(f"klrl / {name}" for name in against)]
    header += [f"reward at the start -> mean of the last {klrl.get('last', part['last'])}"]
    header += ["samples", "tokens per response", "peak MB"]
    rows = []
    for name, row in contenders.items():
        if "error" in row:
            rows.append([name, row["error"], *[""] * (len(header) - 2)])
            continue
        rewards = f"{spread(row['reward_first'], 2)} -> {spread(row['reward'], 2)}"
        speed = row["samples_per_cpu_second"]
        speed = spread(speed, 0 if speed["min"] >= 100 else 2)
        tokens = spread(row["tokens"], 1) if "tokens" in row else ""
        counts = [f"{row['samples']:,}", tokens, f"{row['peak_mb']:,}"]
        told = [spread(row["ratios"][x], 2) if "ratios" in row else "" for x in against]
        name = f"{name} {row['versions'].get('trl', '')}".strip() if name == "TRL" else name
        rows.append([name, speed, *told, rewards, *counts])
    return table(header, rows)


def ratios(whole: dict[str, Any]) -> str:
    """Samples per CPU-second of klrl over those of each other contender, by workload."""
    rows, told = [], []
    for name, part in whole["language"].items():
        found = part["contenders"]
        rows += [[name, x, spread(y, 2)] for x, y in found["klrl"]["ratios"].items()]
        peaks = ", ".join(f"{x} {y['peak_mb']:,}" for x, y in found.items())
        trl = found["TRL"]["versions"]["trl"]
        told.append(f"{name}: {told_about(part, short=True)}, TRL {trl}; peak MB: {peaks}.")
    return "\n\n".join([table(["", "klrl /", ""], rows), *map(prose, told)])


def ranks(whole: dict[str, Any]) -> str:
    """Seconds of an iteration by one process and by two, and the efficiency of two."""
    rows, told = [], []
    for name, part in whole.get("ranks", {}).items():
        for count, row in part["contenders"].items():
            rows.append([f"{name}, {count}", *(spread(row[x], 1) for x in SECONDS)])
        efficiency = f"efficiency {spread(part['efficiency'], 2)}"
        told.append(prose(f"{name}: {efficiency}; {told_about(part, short=True)}."))
    return "\n\n".join([table(["seconds of an iteration", *SECONDS], rows), *told])


if __name__ == "__main__":
    write_page(json.loads((FOLDER / f"{machine()}.json").read_text()))
