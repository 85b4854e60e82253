"""A disk without room: one line, ``failed``, and the last good checkpoint, which is resumed."""

import errno
import os
from pathlib import Path

import pytest

from klrl.base import files
from klrl.runs.checkpoint import Checkpoints
from klrl.runs.folder import RunFolder
from klrl.runs.rows import RowFile
from tests.conftest import QUICK
from tests.runs.commands import exits, manifest_of, rows_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
RUN = Path("run")
WORDS = (*QUICK, "frames=640", "hydra.run.dir=run", "checkpoint.every=1", "learner.compile=false")


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def whole_rows() -> list[float]:
    """The frames of the rows; every line is whole."""
    assert (RUN / "metrics.jsonl").read_bytes().endswith(b"\n")
    return [row["frames"] for row in rows_of(RUN)]


def fill(patch: pytest.MonkeyPatch, what: str, rest: bool) -> None:
    """The disk is full from the fourth row on, or from its checkpoint."""
    owner, name = {"row": (RowFile, "log_all"), "checkpoint": (Checkpoints, "save")}[what]
    function, calls = getattr(owner, name), []

    def filled(self, *args, **options):
        calls.append(1)
        if len(calls) > 4:
            patch.setattr(os, "fsync", full)
            if rest:
                patch.setattr(files, "writing", full)
            if what == "row":
                full()
        return function(self, *args, **options)

    patch.setattr(owner, name, filled)


@pytest.mark.parametrize("rest", [False, True], ids=["a byte is left", "nothing is left"])
@pytest.mark.parametrize("what", ["row", "checkpoint"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_from_its_checkpoint(
    what, rest, capfd, monkeypatch
) -> None:
    with monkeypatch.context() as patch:
        fill(patch, what, rest)
        assert exits(*WORDS) == 1
    told = capfd.readouterr().err.splitlines()
    assert told[-1].startswith("klrl: failed: [Errno 28] No space left on device")
    assert len(told) == 1
    manifest = manifest_of(RUN)
    assert manifest["status"] == "failed"
    assert "No space left" in manifest["error"]
    before = rows_of(RUN)
    assert exits("resume=run") == 0
    assert "checkpoint" not in capfd.readouterr().err, "none is damaged"
    assert manifest_of(RUN)["status"] == "finished"
    assert whole_rows() == list(range(64, 641, 64))
    assert rows_of(RUN)[:3] == before[:3]


def test_settings_are_never_half_written(settings, monkeypatch) -> None:
    run = RunFolder(RUN, ["frames=128"])
    run.open(settings())
    stored = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run.open(settings("frames=256"))
    assert {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()} == stored
