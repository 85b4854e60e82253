"""``make faults``, small: some file operations of each kind, a bit of some files."""

from pathlib import Path

import pytest

from benchmarks.reliability import bits
from benchmarks.reliability.bits import COMMANDS, flip_bits
from benchmarks.reliability.places import Bench
from benchmarks.reliability.report import Report
from benchmarks.reliability.small_run import import_all
from tests.conftest import marked

#: The parts whose every operation is safe, and files with a bit of which nothing is lost.
SAFE_PARTS = ("save", "metrics", "manifest", "settings", "curves")
SAFE_FILES = (
    "last/frames-000000000192/agent",
    "last/frames-000000000192/state.json",
    "metrics.jsonl",
    "curves.png",
)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    import_all()
    return Bench(tmp_path_factory.mktemp("faults").resolve())


@pytest.mark.parametrize("part", marked("slow", SAFE_PARTS, "save"))
def test_a_run_outlives_a_fault_anywhere(bench, part) -> None:
    report, places = Report(), bench.places(part)
    chosen = {places[0], places[len(places) // 2], places[-1]}
    for number, at in enumerate(sorted(chosen)):
        bench.place(at, ("kill", "disk full", "EIO")[number % 3], report)
    assert report.violations == []
    assert sum(line.places for line in report.lines.values()) == len(chosen)


@pytest.mark.parametrize("file", marked("slow", SAFE_FILES, SAFE_FILES[0], "metrics.jsonl"))
def test_a_bit_of_a_file_is_answered_by_every_command(bench, file) -> None:
    report = Report()
    flip_bits(bench, [0], report, file)
    assert report.violations == []
    (*_, line) = report.lines.values()
    assert {f"{name} 0" for name in COMMANDS} <= {*line.ended}


def test_a_bit_of_the_end_of_a_line_costs_its_two_rows_at_most(bench, monkeypatch) -> None:
    def flip_the_first_end(path: Path, seed: int) -> int:
        content = path.read_bytes()
        place = 8 * content.index(b"\n") + 1
        path.write_bytes(content.replace(b"\n", b"\x08", 1))
        return place

    monkeypatch.setattr(bits, "flip", flip_the_first_end)
    report = Report()
    flip_bits(bench, [0], report, "metrics.jsonl")
    assert report.violations == []
