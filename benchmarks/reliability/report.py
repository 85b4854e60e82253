"""The table of ``make faults``, and what was wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.reliability.ended import Ended


@dataclass
class Line:
    """A line of the table."""

    fault: str  # what was done, and to what
    places: int = 0  # how many places were tried
    # how the command ended -> in how many places
    ended: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)  # what was kept -> in how many places

    def cells(self) -> tuple[str, ...]:
        return (self.fault, str(self.places), _counted(self.ended), _counted(self.kept))


def _counted(texts: Counter[str]) -> str:
    return "; ".join(f"{count}x {text}" for text, count in texts.most_common())


@dataclass
class Report:
    """The table, and what was wrong with the command that does it again."""

    lines: dict[str, Line] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def line(self, fault: str) -> Line:
        return self.lines.setdefault(fault, Line(fault))

    def wrong(self, faults: Iterable[str], words: str) -> None:
        """What was wrong; the words of the command line that does it again."""
        again = f"python -m benchmarks.reliability.faults {words}"
        self.violations += [f"{fault}\n    {again}" for fault in faults]


def said(ended: Ended) -> str:
    """The first words of what it said on stderr, without the run's own numbers."""
    return ended.lines[-1].replace("klrl: ", "", 1)[:90] if ended.lines else ""


def show(report: Report) -> None:
    """Print the table and every violation."""
    from klrl.base.text import text_table

    head = ("fault", "places", "what happened", "what was kept")
    print(text_table([head, *(line.cells() for line in report.lines.values())], right=(1,)))
    for violation in report.violations:
        print(f"WRONG: {violation}")
    tried = sum(line.places for line in report.lines.values())
    print(f"{tried} places, {len(report.violations)} violations")
