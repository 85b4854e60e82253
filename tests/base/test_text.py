"""Text for people: tables, and lines that nothing turns or breaks."""

import pytest

from klrl.base.text import escaped, escaped_lines, text_table


def test_a_cell_moves_no_cursor() -> None:
    """A status from a run folder of somebody else, on its way to a terminal."""
    assert text_table([["state", "±"], ["fin\x1b[2J\nished\x9b", "é"]]) == (
        "state                  ±\n" + r"fin\x1b[2J\nished\x9b  é"
    )


def test_an_error_stays_one_line_whatever_was_typed() -> None:
    assert escaped("a\nb\r\u2028\x1b[2J\u2029 ä 日") == r"a\nb\r\u2028\x1b[2J\u2029 ä 日"


@pytest.mark.parametrize(
    "number", [0x9B, 0xAD, 0x61C, 0x200B, 0x202E, 0x2066, 0xD800, 0xFEFF, 0xFFF9, 0xE0041]
)
def test_no_character_turns_hides_or_breaks_a_line(number: int) -> None:
    """Bidi overrides, zero widths, tags: a status `finished` that reads as another."""
    code = chr(number).encode("unicode_escape").decode()
    assert escaped_lines(f"one{chr(number)}\ntwo") == f"one{code}\ntwo"
    assert escaped("ä \U0001f600 é") == "ä \U0001f600 é"
