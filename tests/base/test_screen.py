"""What a terminal shows of tables and blocks, and that a pipe gets plain text."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from klrl.base.screen import show, show_block, show_table
from klrl.base.text import escaped, text_table
from tests.conftest import QUICK

ROWS = [
    ["", "state", "progress", "return", "best", "note"],
    ["outputs/a-long-name", "finished", "16,384/16,384 frames", "-190 +- 11", "", ""],
    ["b", "failed", "1,024/16,384 frames", "", "", "a loss\x1b[2J was not a number, see the log"],
]
BLOCK = """finished 16,384 frames in 0:03
  return -398 +- 28 (standard error)
  best checkpoint, by the evaluations during the run: the same return
  training: KL(policy||reference) 0.28 nats per frame
  run folder: outputs/run"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of some width in place of stdout."""

    def of(columns: int) -> Terminal:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "stdout", screen := Terminal())
        return screen

    return of


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_a_pipe_gets_plain_text(capsys) -> None:
    show("finished")
    show_table(ROWS, right=(3, 4), indent=2)
    show_block(BLOCK)
    assert capsys.readouterr().out == f"finished\n{text_table(ROWS, (3, 4), 2)}\n{BLOCK}\n"


def test_a_wide_terminal_gets_a_table_in_colour_without_empty_columns(terminal) -> None:
    screen = terminal(120)
    show_table(ROWS, right=(3,))
    assert "\x1b[32mfinished\x1b[0m" in screen.getvalue()
    assert "\x1b[31mfailed\x1b[0m" in screen.getvalue()
    heads, first, second = (line.split() for line in plain(screen.getvalue()).splitlines())
    assert heads == ["state", "progress", "return", "note"]
    assert first[:4] == ["outputs/a-long-name", "finished", "16,384/16,384", "frames"]
    assert r"loss\x1b[2J" in second


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_narrow_terminal_breaks_no_word(terminal, columns: int) -> None:
    screen = terminal(columns)
    show_table(ROWS, right=(3,))
    show_block(BLOCK)
    lines = plain(screen.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    words = {
        word
        for text in (*ROWS[1], *ROWS[2][:4], escaped(ROWS[2][5]), BLOCK)
        for word in re.split(r"[\s:,]+", text)
    }
    shown = {word for line in lines for word in re.split(r"[\s:,]+", line)}
    assert words <= shown


def test_a_closing_block_is_a_table_of_labels(terminal) -> None:
    screen = terminal(80)
    show_block(BLOCK)
    head, *rows = plain(screen.getvalue()).splitlines()
    assert head == "finished 16,384 frames in 0:03"
    assert [re.split(r" {2,}", row.strip()) for row in rows] == [
        ["return", "-398 +- 28 (standard error)"],
        ["best checkpoint", "by the evaluations during the run: the same return"],
        ["training", "KL(policy||reference) 0.28 nats per frame"],
        ["run folder", "outputs/run"],
    ]


def test_no_color_is_respected(terminal, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = terminal(120)
    show_table(ROWS)
    assert "\x1b[3" not in screen.getvalue()


def read(descriptor: int, until: bytes, seconds: float) -> bytes:
    """Read a terminal until some bytes, or for some seconds."""
    found, end = b"", time.monotonic() + seconds
    while until not in found and time.monotonic() < end:
        if select.select([descriptor], [], [], 1)[0]:
            found += os.read(descriptor, 4096)
    return found


@pytest.mark.integration
@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_stopped_run_leaves_the_terminal_clean(signum: int) -> None:
    ours, theirs = pty.openpty()
    words = [*QUICK, "frames=10000000", "learner.compile=false", "hydra.run.dir=run"]
    run = subprocess.Popen([sys.executable, "-m", "klrl", *words], stdout=theirs, stderr=theirs)
    try:
        assert b"left" in (before := read(ours, b"left", 60.0))
        assert b"checked: preflight, reference, rollouts" in before
        assert before.rfind(b"\x1b[?25h") > before.rfind(b"\x1b[?25l") >= 0
        run.send_signal(signum)
        # Both ends stay open: once the last one is closed, Linux may drop what was not read yet.
        after = read(ours, b"klrl resume=run\r\n", 30.0)
        assert run.wait(20) == 128 + signum
    finally:
        run.kill()
        run.wait()
    assert b"\x1b[?25l" not in after
    assert re.search(
        r"\r\n\x1b\[\?25hinterrupted at [\d,]+ frames; continue with: klrl resume=run\r\n$",
        plain(after.decode()),
    )
    os.close(theirs)
    os.close(ours)


@pytest.mark.integration
def test_a_pipe_needs_no_rich() -> None:
    code = (
        "import sys\nfrom klrl.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "try: main(['ls', '.'])\nexcept SystemExit: print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
    assert done.stdout.splitlines()[-1] == b"False"
