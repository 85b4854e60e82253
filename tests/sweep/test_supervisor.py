"""What all launchers share: a job that was stopped goes on while its checkpoints advance."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from klrl.base.errors import WorkerError
from klrl.runs.folder import RunFolder
from klrl.runs.owner import OWNER_FILE
from klrl.sweep.jobs import Job, Notice, Outcome, make_jobs
from klrl.sweep.supervisor import Backend, Event, Lost, Supervisor, why_failed
from klrl.sweep.worker import STOP_FILE
from tests.runs.commands import live_elsewhere

FOLDER = Path("outputs/a")


def reach(job: Job, frames: int) -> None:
    if not (run := RunFolder(job.folder)).exists:
        run.open(job.config)
    (job.folder / "checkpoints" / "last" / f"frames-{frames:012d}").mkdir(
        parents=True, exist_ok=True
    )


class Scripted(Backend):
    """Each start of a job reaches a checkpoint, then ends as its script says."""

    def __init__(self, **scripts: list[tuple[int, str]]) -> None:
        self.scripts = scripts
        self.starts: list[list[str]] = []
        self.suspects: list[set[str]] = []
        self.stops = self.closed = 0
        self._running: list[Job] = []

    def submit(self, jobs: Sequence[Job], suspects: Collection[str]) -> Sequence[Event]:
        self.starts.append([job.name for job in jobs])
        self.suspects.append(set(suspects))
        self._running += jobs
        return ()

    def poll(self) -> Iterator[Event | Lost]:
        running, self._running = self._running, []
        for job in running:
            frames, how = self.scripts[job.name].pop(0)
            reach(job, frames)
            if how == "no machine":
                raise WorkerError("no machine")
            yield Lost(job) if how == "lost" else Outcome(job.name, how, signum=15)

    def stop(self) -> Sequence[Event]:
        self.stops += 1
        return ()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def jobs(settings) -> list[Job]:
    return make_jobs(FOLDER, [(name, [name], settings(f"seed={i}")) for i, name in enumerate("ab")])


def outcomes(events: Sequence[Event]) -> dict[str, tuple[str, int | None]]:
    return {e.name: (e.status, e.signum) for e in events if isinstance(e, Outcome)}


def test_a_lost_job_goes_on_while_its_checkpoints_advance_and_fails_where_they_do_not(jobs) -> None:
    advances = [(64, "lost"), (64, "lost"), (128, "lost"), (128, "lost"), (192, "finished")]
    backend = Scripted(a=advances, b=[(0, "lost"), (0, "lost"), (0, "lost")])
    events = list(Supervisor(backend, FOLDER).run(jobs))
    assert outcomes(events) == {"a": ("finished", None), "b": ("failed", None)}
    assert backend.starts == [["a", "b"], ["a", "b"], ["a", "b"], ["a"], ["a"]]
    assert backend.suspects == [set(), set(), {"b"}, set(), set()]
    lines = [event.line for event in events if isinstance(event, Notice)]
    assert lines[0].endswith("a (at 64 frames), b (at 0 frames)")
    assert [line.rpartition(": ")[2] for line in lines[2:]] == [
        "a (at 128 frames)",
        "a (at 128 frames)",
    ]
    assert backend.closed == 1


def test_nothing_is_started_again_while_a_sweep_stops(jobs) -> None:
    backend = Scripted(a=[(64, "lost")], b=[(0, "waiting")])
    FOLDER.mkdir(parents=True)
    (FOLDER / STOP_FILE).touch()
    events = list(Supervisor(backend, FOLDER).run(jobs))
    assert outcomes(events) == {"a": ("interrupted", None), "b": ("waiting", None)}
    assert backend.starts == [["a", "b"]]
    assert (backend.stops, backend.closed) == (1, 1)


def test_a_lost_job_is_held_while_its_old_process_may_live(jobs) -> None:
    script = [(64, "lost"), *[(64, "running elsewhere")] * 3, (64, "lost"), (128, "finished")]
    backend = Scripted(a=script)
    held = 0
    for event in Supervisor(backend, FOLDER).run(jobs[:1]):
        reach(jobs[0], 64)
        if isinstance(event, Notice) and "lost" in event.line:
            live_elsewhere(jobs[0].folder)
        elif isinstance(event, Notice):
            held += "waits until process" in event.line
            assert len(backend.starts) == 2
            (jobs[0].folder / OWNER_FILE).unlink()
        else:
            assert outcomes([event]) == {"a": ("finished", None)}
    assert held == 1
    assert not script


def test_a_job_that_another_process_runs_from_the_beginning_is_not_waited_for(jobs) -> None:
    backend = Scripted(a=[(0, "running elsewhere")])
    assert outcomes(list(Supervisor(backend, FOLDER).run(jobs[:1]))) == {
        "a": ("running elsewhere", None)
    }


def test_where_no_machine_is_left_every_open_job_has_an_outcome(jobs) -> None:
    backend = Scripted(a=[(64, "no machine")], b=[])
    events: list[Event] = []
    with pytest.raises(WorkerError):
        events.extend(Supervisor(backend, FOLDER).run(jobs))
    assert outcomes(events) == {"a": ("interrupted", None), "b": ("waiting", None)}
    assert backend.closed == 1


@pytest.mark.parametrize(
    ("starts", "frames", "at_limit", "ends"),
    [
        ([0], 64, True, False),
        ([0, 64, 128] * 9, 192, False, False),
        ([0], 0, True, True),
        ([0, 64], 64, True, True),
        ([0, 64, 64], 64, False, False),
        ([0, 64, 64, 64], 64, False, True),
        ([64, 64, 0, 64], 64, False, False),
        ([], 0, False, False),
    ],
)
def test_starts_in_vain_are_counted_from_the_last_one(
    starts, frames, at_limit, ends, jobs: list[Job]
) -> None:
    """Three in a row end a job; of those that its time limit stopped, one."""
    reach(jobs[0], frames)
    assert (why_failed(jobs[0], starts, at_limit) is not None) == ends
