"""The progress line of a slow run: seconds per iteration and the phase, never 0/s."""

import io
import time

from klrl.domains import CONTROL, LANGUAGE
from klrl.runs.progress import Phases, Progress, duration
from tests.base.test_text import Terminal


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


def test_at_80_columns_the_kl_is_whole_and_comes_before_the_evaluation(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    live = Terminal()
    with Progress(204_800, CONTROL, stream=live) as progress:
        now = time.monotonic()
        progress._first = now - 4.0, 0
        monkeypatch.setattr("klrl.runs.progress.time.monotonic", lambda: now)
        progress.show(
            {
                **{"frames": 12_288, "reward/episode": -1203.4, "eval/return": -1100.2},
                **{"kl/ref/exact": 0.1282, "kl/old/exact": 0.0101, "kl/old/beta": 1.0},
            }
        )
    shown = live.getvalue().rpartition("\x1b[2K")[2].strip()
    assert len(shown) < 80
    fields = shown.split(" | ")
    assert fields[2:4] == ["return -1203.4", "KL ref 0.1282"]
    assert "evaluation" not in progress.line()[: progress.line().index("KL old 0.0101")]
    assert all(field in progress.line().split(" | ") for field in fields)


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
