"""One line that moves on a terminal; a line now and then in a log."""

import io
from contextlib import closing

import pytest

from klrl.base.text import LiveLine, escaped, text_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def three_updates(stream: io.StringIO) -> str:
    with closing(LiveLine(stream)) as line:
        for step in range(1, 4):
            line.show(f"{step} updates")
    return stream.getvalue()


def test_a_terminal_shows_every_text_in_the_place_of_the_last() -> None:
    shown = three_updates(Terminal())
    assert shown == "\r\x1b[2K1 updates\r\x1b[2K2 updates\r\x1b[2K3 updates\n"


def test_a_log_gets_every_text() -> None:
    assert three_updates(io.StringIO()) == "1 updates\n2 updates\n3 updates\n"


def test_what_is_said_stays_above_the_live_line() -> None:
    screen = Terminal()
    with closing(LiveLine(screen)) as line:
        line.show("1 of 2")
        line.say("a word")
    assert screen.getvalue() == "\r\x1b[2K1 of 2\r\x1b[2Ka word\n\r\x1b[2K1 of 2\n"


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "1,024/2,048 frames | KL ref 0.1282 | score -150.3 | 0:07 left"),
        (62, "1,024/2,048 frames | KL ref 0.1282 | score -150.3 | 0:07 left"),
        (61, "1,024/2,048 frames | KL ref 0.1282 | score -150.3"),
        (49, "1,024/2,048 frames | KL ref 0.1282 | 0:07 left"),
        (32, "1,024/2,048 frames | 0:07 left"),
        (10, "1,024/2,0"),
    ],
)
def test_a_terminal_shows_fields_whole_or_not_at_all(monkeypatch, columns: int, shown: str) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Terminal()
    with closing(LiveLine(screen)) as line:
        line.show("1,024/2,048 frames | KL ref 0.1282 | score -150.3 | 0:07 left")
    assert screen.getvalue() == f"\r\x1b[2K{shown}\n"


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
    with closing(LiveLine(screen := io.StringIO())) as line:
        line.say(f"one{chr(number)}\ntwo")
    code = chr(number).encode("unicode_escape").decode()
    assert screen.getvalue() == f"one{code}\ntwo\n"
    assert escaped("ä \U0001f600 é") == "ä \U0001f600 é"
