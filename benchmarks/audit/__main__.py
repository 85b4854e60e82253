"""``make audit``: the KL terms of seven systems, judged; the table, the picture, the checks.

``rows.py`` judges ``systems/`` and ``names/``. Each row of the systems is compared with
by_hand.py, each line of source that docs/audit/README.md cites with the installed file; then the
table is printed and written to docs/audit/.
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import matplotlib

from benchmarks.audit.by_hand import COEFFICIENTS, cells
from benchmarks.audit.rows import LENGTHS, STALE, Row, audit_text

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "audit"
#: `path/in/the/wheel.py:12` (`a part of that line`)
CITED = re.compile(r"`(\w+/[\w/]+\.py):(\d+)`\s\(`([^`]+)`\)")
NAMES = re.compile(r"(?<=<!-- names -->\n).*(?=<!-- end of names -->)", re.DOTALL)
#: In the order of the table; the last two publish no wheel, so their formulas are ours.
SYSTEMS = (
    *("TRL 1.16.0", "verl 0.9.1", "OpenRLHF 0.11.2", "SkyRL 0.4.0", "TorchRL 0.14.1"),
    *("NeMo-RL 006907a9", "prime-rl 2026"),
)


def judged() -> list[Row]:
    """The rows of both folders, side by side in two processes."""
    command = [sys.executable, "-m", "benchmarks.audit.rows"]
    runs = [
        subprocess.Popen([*command, str(HERE / name)], stdout=subprocess.PIPE, text=True)
        for name in ("systems", "names")
    ]
    rows = []
    for run in runs:
        out, _ = run.communicate()
        if run.returncode:
            sys.exit(run.returncode)
        rows += [Row(**row) for row in json.loads(out)]
    return sorted(rows, key=lambda row: SYSTEMS.index(row.system) if row.system in SYSTEMS else 9)


def off_by_hand(rows: list[Row]) -> list[str]:
    """The rows whose cosine or errors are not those of the formulas; float32 costs 1e-7."""
    wrong = []
    for row in rows:
        if row.option in COEFFICIENTS:
            by_hand = cells(row.option, row.length, row.stale)
            found = (row.cosine, row.error, row.token_error)
            if max(abs(x - y) for x, y in zip(by_hand, found, strict=True)) > 1e-5:
                wrong.append(f"{row.option}, {row.stale}, {row.length}: {found}, by hand {by_hand}")
    return wrong


def off_in_source(page: str) -> list[str]:
    """Cited lines that the installed files do not have there."""
    wrong = []
    for path, number, text in CITED.findall(page):
        package, _, inner = path.partition("/")
        file = Path(find_spec(package).origin).parent / inner
        if text not in file.read_text("utf-8").splitlines()[int(number) - 1]:
            wrong.append(f"{path}:{number} is not {text}")
    return wrong


#: What the codes of klrl/doctor/faults.yaml say, in short.
WORDS = {
    "own_step": "each token's own KL",
    "forward_kl": "the forward KL",
    "no_kl": "no gradient",
    "k1_in_loss": "no KL",
    "kl_weight_none": "no weight",
    "kl_weight_token": "each token's weight",
    "stale_kl": "pi_old's KL",
    "k2_value": "of E[k2], no KL",
    "k2_in_reward": "no KL",
    "k3_in_reward": "no KL",
    "mixture": "no KL",
    "unknown": "no KL",
}


def names(rows: list[Row]) -> str:
    """The table of names, with the verdicts for 4 tokens."""
    lines = [
        "| term | pi = pi_old | error | variance | after 4 updates | error |",
        "|---" * 6 + "|",
    ]
    of = {(row.option, row.stale): row for row in rows if row.length == 4}
    for option in dict.fromkeys(row.option for row in rows if row.system == "names"):
        now, moved = of[option, 0], of[option, 4]
        lines.append(
            f"| {option} | {_told(now)} | {now.error:.2f} | {now.variance:.2g} | {_told(moved)} | "
            f"{moved.error:.2f} |"
        )
    return "\n".join(lines)


def _told(row: Row) -> str:
    if not row.fault or not row.token_fault:
        return f"**right** for {'each token' if row.fault else 'responses'}"
    return ", ".join(dict.fromkeys(WORDS.get(code, code) for code in row.fault.split(", ")))


def picture(rows: list[Row], path: Path) -> None:
    """A cell per option, length and distance from pi_old: its error from either KL."""
    rows = [row for row in rows if row.system in SYSTEMS]
    options = list(dict.fromkeys((row.system, row.option) for row in rows))
    columns = [(stale, length) for stale in STALE for length in LENGTHS]
    figure, axes = plt.subplots(figsize=(11, 0.3 * len(options) + 1.6))
    for row in rows:
        x, y = columns.index((row.stale, row.length)), options.index((row.system, row.option))
        colour = "#2a9d4a" if not row.fault else "#5fa8d3" if not row.token_fault else None
        colour = "#c9c9c9" if row.fault == "factor" else colour
        colour = colour or plt.cm.YlOrRd(0.15 + 0.65 * min(row.error, 1.0))
        axes.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", lw=2))
        told = f"{100 * row.error:.0f} %" if row.fault else "right"
        told = "token" if row.fault and not row.token_fault else told
        told = "factor" if row.fault == "factor" else told
        axes.text(x + 0.5, y + 0.52, told, ha="center", va="center", fontsize=8)
    for edge in [i for i, (system, _) in enumerate(options) if i and options[i - 1][0] != system]:
        axes.axhline(edge, color="black", lw=1)
    for edge in (len(LENGTHS), 2 * len(LENGTHS)):
        axes.axvline(edge, color="black", lw=1)
    names = [f"{system.split()[0]}  {option}" for system, option in options]
    axes.set(
        xlim=(0, len(columns)), ylim=(len(options), 0),
        xticks=[x + 0.5 for x in range(len(columns))], xticklabels=[n for _, n in columns],
        yticks=[y + 0.5 for y in range(len(options))], yticklabels=names,
    )  # fmt: skip
    axes.tick_params(length=0, labelsize=8, labeltop=True, labelbottom=False)
    for at, stale in enumerate(STALE):
        told = "pi = pi_old" if not stale else f"{stale} update{'s' * (stale > 1)} from pi_old"
        axes.text(3 * at + 1.5, -1.3, f"{told}; tokens:", ha="center", fontsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel(
        "green: the gradient of KL(pi||ref) of whole responses (KLPEN: of its KL; dppo: of the "
        "return)\nblue: that of each token's own; grey: but for a factor; else the error from the "
        "whole's, in percent",
        fontsize=9,
    )
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    rows = judged()
    (DOCS / "table.txt").write_text(audit_text(rows) + "\n", encoding="utf-8")
    picture(rows, DOCS / "audit.png")
    page = (DOCS / "README.md").read_text("utf-8")
    page = NAMES.sub(lambda _: f"\n{names(rows)}\n\n", page)
    (DOCS / "README.md").write_text(page, encoding="utf-8")
    print(audit_text(rows))
    wrong = [*off_by_hand(rows), *off_in_source(page)]
    told = "every row of a system is what by_hand.py sums, every cited line is there"
    print("\n" + ("\n".join(wrong) or told))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
