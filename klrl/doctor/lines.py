"""One checked number, and a table of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A known number, beside the one that this install computes.

    Attributes:
        section: the title of its table.
        name: what is computed.
        expected: the known number.
        found: this install's number; the name is a key of ``klrl doctor --json``.
        tolerance: largest absolute difference of the two.
        source: where the known number comes from.
        own: whether it checks klrl; else it reports a fault of another library.
    """

    section: str
    name: str
    expected: float
    found: float
    tolerance: float
    source: str
    own: bool = True

    @property
    def ok(self) -> bool:
        """Whether the two agree."""
        return abs(self.found - self.expected) <= self.tolerance

    @property
    def verdict(self) -> str:
        """ok or OFF; for another library's fault, whether it is as known or changed."""
        if self.own:
            return "ok" if self.ok else "OFF"
        return "as known" if self.ok else "changed"


def table(lines: Sequence[Line]) -> str:
    """The lines as text, a block per section."""
    out = []
    for section in dict.fromkeys(line.section for line in lines):
        rows = [line for line in lines if line.section == section]
        width = max(len(row.name) for row in rows)
        out.append(f"\n{section}   [{rows[0].source}]")
        out += [
            f"  {row.name:<{width}}  expected {row.expected:>9.4g}  found {row.found:>9.4g}"
            f"  +-{row.tolerance:<7.2g} {row.verdict}"
            for row in rows
        ]
    return "\n".join(out).lstrip("\n")


def off(lines: Iterable[Line]) -> list[Line]:
    """klrl's own lines whose numbers do not agree."""
    return [line for line in lines if line.own and not line.ok]
