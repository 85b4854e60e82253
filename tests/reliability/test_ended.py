"""What counts as a wrong end of a command, and that a hang is ended."""

import signal

import pytest

from tests.reliability.ended import Ended, in_fork

TRACEBACK = "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n"


def ended(code: int, err: str = "", out: str = "") -> Ended:
    return Ended(code, out, err, 1.0)


@pytest.mark.parametrize(
    ("answer", "codes", "fault"),
    [
        (ended(1, "klrl: failed: x\n"), [0, 2], "exit 1, not 0 or 2: klrl: failed: x"),
        (ended(-signal.SIGSEGV), [0, 1, 2], "exit -11, not 0 or 1 or 2"),
        (ended(2, TRACEBACK), [2], "traceback: KeyError: 'a'"),
        (ended(0, out=TRACEBACK), [0], "traceback"),
        (ended(0, "x.py:3: FutureWarning: no\n"), [0], "warns: x.py:3: FutureWarning: no"),
        (ended(2, "klrl: a\nklrl: b\n"), [2], "2 lines on stderr"),
        (ended(2), [2], "exit 2 without a word"),
        (Ended(-9, "", "", 3.0, hung=True), [-9], "hangs: not done in 3 s"),
    ],
)
def test_wrong_ends(answer, codes, fault) -> None:
    assert answer.faults(codes)[0].startswith(fault)


def test_what_hangs_is_killed(tmp_path) -> None:
    answer = in_fork(signal.pause, tmp_path, limit=0.2)
    assert (answer.code, answer.hung) == (-signal.SIGKILL, True)
    assert answer.faults([0, 1, 2, -9]) == [f"hangs: not done in {answer.seconds:.0f} s"]
