"""The progress line of a slow run: seconds per iteration and the phase, never 0/s."""

import io
import re
import time

import pytest

from klrl.domains import CONTROL, LANGUAGE
from klrl.runs.progress import Phases, Progress, duration
from tests.base.test_screen import Terminal


def shown(row: dict[str, float], total: int = 2560, passed: float = 100.0) -> str:
    """The line after a row that came some seconds after the start."""
    progress = Progress(total, LANGUAGE, stream=io.StringIO())
    progress._first = time.monotonic() - passed, 0
    progress.show(row)
    return progress.line()


def test_a_slow_run_shows_seconds_per_iteration() -> None:
    line = shown({"samples": 16, "iteration": 2, "time/iteration": 48.44})
    assert line.startswith("16/2,560 samples | 48.4 s/iteration | ")
    assert "/s " not in line
    assert "4:25:00 left" in line  # 2,544 samples at 16 in 100 s


def test_the_first_iteration_which_compiles_says_nothing_of_the_time_that_is_left(
    monkeypatch,
) -> None:
    """1,024 frames took 90 s, the next take 0.2 s each."""
    now = 0.0
    monkeypatch.setattr("klrl.runs.progress.time.monotonic", lambda: now)
    for done in (0, 4096):  # 4,096: a resumed run
        progress, lines = Progress(200_704, CONTROL, done, io.StringIO()), []
        for now, frames in ((0.1, 0), (90.0, 1024), (90.2, 2048), (90.4, 3072)):  # noqa: B007
            progress.show({"frames": done + frames, **({"time/iteration": 90.0} if frames else {})})
            lines.append(progress.line())
        assert lines[0] == f"{done:,}/200,704 frames"
        assert lines[1] == f"{done + 1024:,}/200,704 frames | 90 s/iteration"
        assert lines[3] == f"{done + 3072:,}/200,704 frames | 5,120/s | 0:{(39, 38)[done > 0]} left"


def on_terminal(monkeypatch, columns: int, *lines: str, verbose: bool = False) -> str:
    """What a terminal gets of lines and a row."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(Progress, "verbose", verbose)
    live, phases = Terminal(), Phases()
    with Progress(204_800, CONTROL, stream=live, phases=phases) as progress:
        for line in lines:
            progress.say(line)
        now = time.monotonic()
        progress._first = now - 4.0, 0
        phases("update")
        with monkeypatch.context() as patch:
            patch.setattr("klrl.runs.progress.time.monotonic", lambda: now)
            progress.show(
                {
                    **{"frames": 12_288, "reward/episode": -1203.4, "eval/return": -1100.2},
                    **{"kl/ref/exact": 0.1282, "kl/old/exact": 0.0101, "kl/old/beta": 1.0},
                }
            )
            progress._show_phase()
    return re.sub(r"\x1b\[[\d;]*m", "", live.getvalue())  # without colours


def last_lines(text: str) -> list[str]:
    """The lines that the last update of the display has left."""
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text.rpartition("\x1b[2K")[2]).splitlines()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_terminal_has_a_bar_with_phase_and_time_left_and_breaks_no_field(
    monkeypatch, columns: int
) -> None:
    bar, *below = last_lines(on_terminal(monkeypatch, columns))
    # 3,072 frames a second, so 192,512 take 1:03.
    assert bar.rstrip().endswith("12,288/204,800 frames  3,072/s  1:03 left  update 0 s")
    assert bar.startswith("━")
    assert max(map(len, (bar, *below))) <= columns
    told = [each for line in below for each in re.split(r" {2,}", line.strip()) if each]
    assert told == [
        *("return -1203.4", "KL ref 0.1282", "KL old 0.0101", "beta 1", "evaluation -1100.2"),
    ]


def test_a_terminal_shows_routine_lines_in_one_and_others_whole(monkeypatch) -> None:
    lines = (
        "preflight: KL(policy||reference) at the start, nats/frame: 0 (at most 1e-05) ok",
        "preflight: KL(policy||reference) at the start, nats/frame: 0.3; not where it starts",
        "evaluations: 10 during the run",
        "update: package 1234 found in the cache",
        "compiling the update, once for these settings",
    )
    short = on_terminal(monkeypatch, 120, *lines)
    assert "checked: preflight, evaluations, update; -v shows them\n" in short
    assert [line in short for line in lines] == [False, True, False, False, True]
    full = on_terminal(monkeypatch, 120, *lines, verbose=True)
    assert all(line in full for line in lines)
    assert "checked:" not in full


def test_the_cursor_is_shown_and_a_log_has_no_escape(monkeypatch) -> None:
    before, hidden, after = on_terminal(monkeypatch, 80).partition("\x1b[?25l")
    assert not before
    assert hidden, "rich hides it"
    assert after.startswith("\x1b[?25h"), "at once, since a killed process could not"
    assert "\x1b[?25l" not in after
    log = io.StringIO()
    with Progress(100, CONTROL, stream=log) as progress:
        progress.say("preflight: 0 (at most 1) ok")
        progress.show({"frames": 10})
    assert log.getvalue() == "preflight: 0 (at most 1) ok\n10/100 frames\n"


def test_a_phase_that_lasts_is_shown_once_in_a_log() -> None:
    log, phases = io.StringIO(), Phases()
    with Progress(100, LANGUAGE, stream=log, every=0.05, phases=phases) as progress:
        for phase in ("sampling", "update"):
            phases(phase)
            time.sleep(0.3)
        phases.take()
        progress.show({"samples": 10, "time/iteration": 0.6})
        time.sleep(0.1)
    lines = log.getvalue().splitlines()
    assert lines[0] == "0/100 samples"
    assert lines[1].startswith("0/100 samples | sampling 0")
    assert lines[2].startswith("0/100 samples | update 0")
    assert lines[3].startswith("10/100 samples | ")
    assert len(lines) == 4


def test_the_seconds_of_phases_add_up_to_the_iteration(monkeypatch) -> None:
    phases, now = Phases(), 10.0
    monkeypatch.setattr("klrl.runs.progress.time.perf_counter", lambda: now)
    for name, seconds in (("sampling", 1.0), ("reward", 2.0), ("sampling", 4.0), ("update", 8.0)):
        phases(name)
        now += seconds
    assert phases.take() == {"sampling": 5.0, "reward": 2.0, "update": 8.0}
    assert phases.take() == {}


def test_a_duration_has_no_hours_that_are_none() -> None:
    assert [duration(x) for x in (73.2, 4000, 0)] == ["1:13", "1:06:40", "0:00"]
