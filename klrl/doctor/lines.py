"""A checked number, and the table of checked numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from klrl.base.text import text_table


@dataclass(frozen=True)
class KnownNumber:
    """A known number, and the number that this install computes."""

    section: str  # the title of its table
    name: str
    expected: float
    found: float
    tolerance: float  # largest allowed absolute difference of the two
    source: str  # where the known number comes from

    @property
    def ok(self) -> bool:
        """Whether the two agree."""
        return abs(self.found - self.expected) <= self.tolerance


def table(lines: Sequence[KnownNumber]) -> str:
    """Format the lines as text, a block per section."""
    blocks = []
    for section in dict.fromkeys(line.section for line in lines):
        members = [line for line in lines if line.section == section]
        rows = [
            (x.name, f"expected {x.expected:>9.4g}", f"found {x.found:>9.4g}",
             f"+-{x.tolerance:<7.2g} {'ok' if x.ok else 'OFF'}")
            for x in members
        ]  # fmt: skip
        blocks.append(f"{section}   [{members[0].source}]\n{text_table(rows, indent=2)}")
    return "\n\n".join(blocks)
