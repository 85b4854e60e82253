"""What a Ray cluster has room for, as its list of machines tells; how long klrl waits for it."""

from types import SimpleNamespace

import pytest

from klrl.base.errors import ConfigError, Interrupted, WorkerError
from klrl.config import RayLauncherConfig
from klrl.sweep import cluster
from klrl.sweep.cluster import check_cluster

NODES = [
    {"Alive": True, "Resources": {"CPU": 3.0, "GPU": 1.0, "memory": 1e9}},
    {"Alive": True, "Resources": {"CPU": 0.3}},
    {"Alive": True, "Resources": {"memory": 1e9}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
]
RAY = SimpleNamespace(nodes=lambda: NODES)


@pytest.mark.parametrize(
    ("cpus", "gpus", "processes"),
    [(1, 0, 3), (2, 0, 1), (4, 0, 0), (0.1, 0, 33), (1, 0.5, 2), (1, 0.25, 3), (1, 2, 0)],
)
def test_room_is_for_whole_processes_on_living_machines(cpus, gpus, processes) -> None:
    assert cluster._room(RAY, cpus, gpus) == processes


def tasks_of(**ray: object) -> cluster._Tasks:
    """One job of a CPU on a cluster that answers as ``ray`` says."""
    ray["remote"] = lambda **_: lambda run: SimpleNamespace(remote=lambda job: "handle")
    config = RayLauncherConfig("somewhere:1", None, 1, 1, 60, name="ray")
    tasks = cluster._Tasks(config, SimpleNamespace(**ray), 0.0)
    tasks.submit([SimpleNamespace(placed=False)], ())
    return tasks


def test_a_shortage_is_told_once_lasts_its_time_and_begins_anew(monkeypatch) -> None:
    clock, nodes = SimpleNamespace(now=100.0), []
    monkeypatch.setattr(cluster.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(cluster, "_headless", lambda ray: clock.away)
    tasks = tasks_of(nodes=lambda: nodes, wait=lambda *_, **__: ([], []))
    said: list[str] = []

    def look(now: float, cpus: float, away: str | None = None) -> None:
        clock.now, clock.away = now, away
        nodes[:] = [{"Alive": True, "Resources": {"CPU": cpus}}]
        said.extend(each.line for each in tasks.poll())

    room = "no machine of the Ray cluster has launcher.cpus_per_job=1"
    for now, cpus in ((110, 1), (200, 0.5), (259, 0.5), (262, 1), (300, 0.5), (359, 0.5)):
        look(now, cpus)
    with pytest.raises(WorkerError, match=f"^launcher=ray: {room}; "):
        look(362, 0.5)
    assert said == [f"{room}: waiting up to 60 s"] * 2
    look(366, 1)
    look(370, 1, "no head")
    look(399, 1, "no head")
    with pytest.raises(WorkerError, match="^launcher=ray: no head; "):
        look(402, 1, "no head")
    assert said[2:] == ["no head: waiting up to 30 s"], "Ray ends klrl after 60 s"


def test_a_ray_that_does_not_start_in_time_is_told_in_a_line(monkeypatch) -> None:
    """Ray 2.60 raises a bare Exception after 30 s, as on a machine that is busy."""
    pytest.importorskip("ray")

    def start(*_: object, **__: object) -> None:
        raise Exception("Ray 2.60.\nThe current node timed out during startup.")

    monkeypatch.setattr(cluster, "start_ray", start)
    told = "^launcher=ray: Ray does not start: The current node timed out during startup.$"
    with pytest.raises(WorkerError, match=told), cluster._quiet_ray(None):
        pass


def test_what_a_signals_handler_raises_while_ray_waits_is_not_wrapped() -> None:
    """Ray 2.60 raises SystemError, caused by it; a SystemError without a cause is Ray's own."""

    def waits(cause: BaseException | None) -> cluster._Tasks:
        def wait(*_: object, **__: object) -> None:
            raise SystemError("returned a result with an exception set") from cause

        return tasks_of(wait=wait)

    with pytest.raises(Interrupted) as stop:
        list(waits(Interrupted(2)).poll())
    assert stop.value.signum == 2
    with pytest.raises(SystemError, match="returned a result"):
        list(waits(None).poll())


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", "launcher.address=127.0.0.1:1: no Ray cluster answers there"),
        ("somewhere", "launcher.address=somewhere: give HOST:PORT"),
        ("ray://127.0.0.1:1", "launcher.address=ray://127.0.0.1:1: give HOST:PORT"),
        (":6379", "launcher.address=:6379: give HOST:PORT"),
    ],
)
def test_an_address_where_nobody_answers_is_refused_in_one_line(
    address, reason, monkeypatch
) -> None:
    def check(given: str | None) -> None:
        check_cluster(RayLauncherConfig(given, None, 1, 1, 60, name="ray"))

    with pytest.raises(ConfigError) as found:
        check(address)
    assert str(found.value).startswith(reason)
    assert "\n" not in str(found.value)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"^RAY_ADDRESS={address}: "):
        check(None)
    monkeypatch.delenv("RAY_ADDRESS")
    for nothing in (None, "", "auto"):
        check(nothing)
