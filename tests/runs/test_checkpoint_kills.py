"""A save that is killed, or whose disk fails, at any file operation leaves a whole entry."""

import errno
import os
import shutil
import signal

import pytest

from tests.runs.operations import Operations
from tests.runs.saves import RUN, load, loaded_agent, save, steps


def operations_of_a_save() -> int:
    """How many there are, of the third save of a run."""
    save(0)
    save(64)
    shutil.copytree(RUN, "as_started")
    counted = Operations(-1, lambda name: None)
    with pytest.MonkeyPatch.context() as patch:
        counted.install(patch.setattr)
        save(128)
    return counted.done


def started() -> None:
    """A run with two entries and nothing else."""
    shutil.rmtree(RUN)
    shutil.copytree("as_started", RUN)


def kill(name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.integration
def test_a_kill_at_any_file_operation_leaves_a_whole_entry() -> None:
    total = operations_of_a_save()
    assert total > 20
    after = []
    for at in range(total):
        started()
        pid = os.fork()
        if not pid:
            Operations(at, kill).install()
            save(128)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, at
        after.append(load())
        assert loaded_agent() == after[-1]
        save(192)  # the run that goes on
        assert load() == 192
        assert not list(RUN.rglob(".staging-*")), at
        assert len(steps()) == 2
    assert after == sorted(after), "64 until the new entry has its name, 128 from then on"
    assert set(after) == {64, 128}


@pytest.mark.integration
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_write_is_an_error_and_loses_nothing(number) -> None:
    total, seen = operations_of_a_save(), set()

    def fail(name: str) -> None:
        seen.add(name)
        raise OSError(number, os.strerror(number))

    for at in range(total):
        started()
        told = ""
        with pytest.MonkeyPatch.context() as patch:
            Operations(at, fail).install(patch.setattr)
            try:
                save(128)
            except OSError as error:
                told = str(error)
        step = load()
        if step == 64:
            assert os.strerror(number) in told
        assert not told or "checkpoints/" in told, "which file"
        save(192)
        assert load() == 192
        assert not list(RUN.rglob(".staging-*")), at
    assert {"open", "write", "half a write", "fsync", "rename", "mkdir"} <= seen
