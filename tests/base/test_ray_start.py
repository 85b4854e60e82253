"""What a Ray cluster has room for, as its list of machines tells; how long klrl waits for it."""

from types import SimpleNamespace

import pytest

from klrl.base import ray_start
from klrl.base.errors import ConfigError, Interrupted
from klrl.base.ray_start import Shortage, check_address, machines, room, wait

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
    assert room(RAY, cpus, gpus) == processes
    assert machines(RAY) == 3


def test_a_shortage_is_told_once_lasts_its_time_and_begins_anew(monkeypatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(ray_start.time, "monotonic", lambda: clock.now)
    said: list[str] = []
    shortage = Shortage(60, said.append)

    def lasts(now: float, missing: str | None) -> bool:
        clock.now = now
        return shortage.lasts(missing)

    assert not lasts(100, None)
    assert not lasts(200, "no CPU")
    assert not lasts(259, "no CPU")
    assert not lasts(259.5, None)
    assert not lasts(300, "no CPU")
    assert not lasts(359, "no CPU")
    assert lasts(360, "no CPU")
    assert said == ["no CPU: waiting 60 s for it to change"] * 2


def test_what_a_signals_handler_raises_while_ray_waits_is_not_wrapped() -> None:
    """Ray 2.60 raises SystemError, caused by it; a SystemError without a cause is Ray's own."""

    def waits(cause: BaseException | None) -> SimpleNamespace:
        def wait(*_: object, **__: object) -> None:
            raise SystemError("returned a result with an exception set") from cause

        return SimpleNamespace(wait=wait)

    with pytest.raises(Interrupted) as stop:
        wait(waits(Interrupted(2)), ["handle"], 1.0)
    assert stop.value.signum == 2
    with pytest.raises(SystemError, match="returned a result"):
        wait(waits(None), ["handle"], 1.0)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:1", "launcher.address=127.0.0.1:1: no Ray cluster answers there"),
        ("somewhere", "launcher.address=somewhere: give HOST:PORT"),
        ("ray://127.0.0.1:1", "launcher.address=ray://127.0.0.1:1: give HOST:PORT"),
        (":6379", "launcher.address=:6379: give HOST:PORT"),
    ],
)
def test_an_address_where_nobody_answers_is_refused_in_one_line(address, reason) -> None:
    with pytest.raises(ConfigError) as found:
        check_address(address, "launcher.address")
    assert str(found.value).startswith(reason)
    assert "\n" not in str(found.value)
    for nothing in (None, "", "auto"):
        check_address(nothing, "launcher.address")
