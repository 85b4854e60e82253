"""``metrics.jsonl`` keeps every row: it is cut at a checkpoint, never rewritten; bad lines stay."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from klrl.report.listing import entries
from klrl.report.runs import find_runs, read_run
from klrl.runs.rows import RowFile, read_rows
from tests.report.toys import write_run

PATH = Path("metrics.jsonl")
BAD = (b"", b"{", b"\xff\xfe", b"[1]", b"7", b'"frames"', b'{"frames": "x"}', b"[" * 100_000)


def lines(*frames: int) -> list[bytes]:
    return [json.dumps({"frames": each, "reward/raw": each / 7}).encode() for each in frames]


def write(*content: bytes, end: bytes = b"\n") -> dict:
    """The file of some lines; what a checkpoint holds of it."""
    whole = b"\n".join(content) + (end if content else b"")
    PATH.write_bytes(whole)
    return {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}


def resumed(after: int, mark: dict | None) -> list[bytes]:
    """The lines after a resume that adds the row of frame 99."""
    file = RowFile(PATH, "frames", after, mark)
    file.log({"frames": 99})
    file.close()
    *written, nothing = PATH.read_bytes().split(b"\n")
    assert nothing == b""
    assert written.pop() == b'{"frames": 99}'
    return written


@pytest.mark.parametrize("bytes_are_known", [True, False])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_line_is_kept_and_told_and_costs_no_row(bad, bytes_are_known, capsys) -> None:
    """Row 2 was overwritten by something of another length, after the checkpoint of frame 4."""
    mark = write(*lines(1, 2, 3, 4)) if bytes_are_known else None
    first, _, *others = lines(1, 2, 3, 4, 5, 6)
    write(first, bad, *others)
    assert resumed(4, mark) == [first, bad, *others[:2]]
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == f"{PATH}: skipped line 2: not a row" or bad == b'{"frames": "x"}'
    assert len(told) <= 2


@pytest.mark.parametrize("inserted", [b"", b"garbage", b" " * 200])
def test_a_line_that_was_added_by_hand_shifts_no_cut(inserted) -> None:
    mark = write(*lines(1, 2, 3, 4))
    first, *others = lines(1, 2, 3, 4, 5, 6)
    write(first, inserted, *others)
    assert resumed(4, mark) == [first, inserted, *others[:3]]


def test_the_cut_is_at_the_checkpoints_bytes_whatever_follows() -> None:
    mark = write(*lines(1, 2, 3))
    write(*lines(1, 2, 3), b"no row", *lines(4), b'{"fra', end=b"")
    assert resumed(3, mark) == lines(1, 2, 3)


def test_a_garbled_last_row_of_the_checkpoint_stays() -> None:
    good = lines(1, 2, 3)
    mark = write(*good)
    bad = b"#" * len(good[-1])
    write(*good[:2], bad, *lines(4))
    assert resumed(3, mark) == [*good[:2], bad]


def test_the_first_checkpoint_has_no_rows() -> None:
    write(*lines(1, 2))
    assert resumed(0, {"bytes": 0}) == []
    write(*lines(1, 2))
    assert resumed(0, None) == []


def test_nothing_is_rewritten(monkeypatch) -> None:
    mark = write(*lines(1, 2, 3))
    write(*lines(1, 2, 3), *lines(4))
    before = PATH.stat()
    resumed(3, mark)
    assert (PATH.stat().st_ino, PATH.read_bytes()[: mark["bytes"]]) == (
        before.st_ino,
        b"".join(line + b"\n" for line in lines(1, 2, 3)),
    )


@pytest.mark.parametrize("cut", [1, 30, 10**6])
def test_a_file_that_was_cut_is_told_and_no_row_is_glued_to_it(cut: int, capsys) -> None:
    mark = write(*lines(1, 2, 3))
    length = mark["bytes"]
    left = PATH.read_bytes()[: max(length - cut, 0)]
    PATH.write_bytes(left)
    assert b"\n".join(resumed(3, mark)) == left.removesuffix(b"\n")
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        f"{PATH}: has {len(left):,} bytes, but had {length:,} at the checkpoint: rows before 3 "
        "frames are missing"
    )


def test_a_file_that_is_gone_is_told(capsys) -> None:
    assert resumed(3, {"bytes": 100}) == []
    assert "has 0 bytes, but had 100" in capsys.readouterr().err


def test_readers_leave_out_what_is_no_row_and_say_so_once(capsys) -> None:
    write(*lines(1), *BAD, *lines(2), b'{"fra', end=b"")
    assert [row["frames"] for row in read_rows(PATH)] == [1, 2]
    (told,) = capsys.readouterr().err.splitlines()
    assert told == f"{PATH}: skipped lines 2, 3, 4, 5, 6, ...: not a row"


@pytest.mark.parametrize("bad", BAD)
def test_report_diff_and_ls_skip_a_bad_line_and_say_so(bad, tmp_path, capsys) -> None:
    folder = write_run(tmp_path / "a")
    metrics = folder / "metrics.jsonl"
    whole = metrics.read_bytes().splitlines()
    metrics.write_bytes(b"\n".join([*whole[:-1], bad, whole[-1], b""]))
    (run,) = find_runs([str(tmp_path)]).runs
    assert run.rows == len(whole)
    assert read_run(folder).rows == len(whole)
    told = f"{metrics}: skipped line {len(whole)}: not a row"
    assert capsys.readouterr().err.splitlines() == [told] * 2
    metrics.write_bytes(b"\n".join([*whole, bad, b""]))  # ls reads the end of the file alone
    (entry,) = entries(tmp_path)
    assert entry.done == json.loads(whole[-1])["frames"]
    assert entry.note == "metrics.jsonl: bad rows near its end were skipped"


def test_a_row_is_written_whole_or_not_at_all(monkeypatch) -> None:
    file = RowFile(PATH, "frames")
    file.log({"frames": 1})

    class Filling:
        """A disk that takes ten more bytes."""

        def __init__(self, inner) -> None:
            self._inner, self._room = inner, 10

        def write(self, content: bytes) -> int:
            if not self._room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._room = 0
            return self._inner.write(content[:10])

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    monkeypatch.setattr(file, "_file", Filling(file._file))
    with pytest.raises(OSError, match=r"No space left on device: 'metrics.jsonl'"):
        file.log({"frames": 2})
    file.close()
    assert PATH.read_text() == '{"frames": 1}\n'


LOSSES = {
    "removed": Path.unlink,
    "moved": lambda path: path.rename("elsewhere"),
    "replaced": lambda path: path.write_bytes(path.rename("elsewhere").read_bytes()),
    "emptied": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("resume", [False, True])
def test_rows_that_are_lost_are_noticed(loss: str, resume: bool) -> None:
    mark = write(*lines(1, 2)) if resume else None
    file = RowFile(PATH, "frames", 2 if resume else None, mark)
    if not resume:
        file.check()  # no row yet, so no file
        file.log({"frames": 1})
    file.check()
    LOSSES[loss](PATH)
    with pytest.raises(OSError, match="removed, replaced or cut"):
        file.check()
    file.close()
