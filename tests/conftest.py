"""Shared fixtures. Warnings are errors (pyproject.toml); exceptions stand here with a reason."""

import fcntl
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

LIBRARY_WARNINGS = (
    # gymnasium 1.4 says so of every -v4 MuJoCo id and of ids with a newer version.
    "ignore:.*The environment .* is out of date:DeprecationWarning",
)


def marked(mark: str, cases: Iterable[object], *plain: object) -> list[object]:
    """Cases of a parameter (tuples: of several), all but the ``plain`` ones marked, as ``slow``."""
    marks = getattr(pytest.mark, mark)
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*v, marks=() if {v, v[0]} & {*plain} else marks) for v in values]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for line in LIBRARY_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(line))


def pytest_collection_finish() -> None:
    """The imported libraries stay: not looking at them again saves a sixth of Hydra's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever the user's cache holds, the tests are the same; each worker has its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test writes below a folder of its own, with one thread and a seeded generator.

    Modules that it imported from there are forgotten: the next test may have others of their names.
    """
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # not CUDA's, which keeps a traceback of each call
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _own_processes() -> Iterator[None]:
    """A test that fails before it has stopped its runs leaves none of them."""
    yield
    commands = sys.modules.get("tests.runs.commands")
    for process in () if commands is None else commands.CHILDREN:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if commands is not None:
        commands.CHILDREN.clear()


@pytest.fixture(autouse=True, scope="session")
def _small_runs() -> Iterator[None]:
    """Small runs leave out what takes most of their time.

    That is drawing ``curves.png``, and parsing all of tests/ for the digest of a toy in it.
    """
    from klrl.base.files import replacing
    from klrl.base.sources import _digest

    def write(rows: object, path: Path, title: str, domain: object) -> None:
        with replacing(path) as partial:
            partial.write_bytes(b"curves")

    def digest(top: str, folders: Sequence[str]) -> str:
        return "of tests" if top == "tests" else _digest(top, folders)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("klrl.runs.record.draw_curves", write)
        patch.setattr("klrl.base.sources._digest", digest)
        yield


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw their curves, as for users."""
    from klrl.runs.curves import draw_curves

    monkeypatch.setattr("klrl.runs.record.draw_curves", draw_curves)


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have no charts, which take most of the time."""
    monkeypatch.setattr("klrl.report.write.draw_charts", lambda *_: [])


@pytest.fixture
def settings() -> Callable[..., object]:
    """Compose a typed config from words as on the command line."""
    from klrl.config.checks import to_config
    from klrl.config.compose import Composer
    from klrl.config.overrides import parse

    return lambda *words: to_config(Composer().composed(parse([*QUICK, *words])))


def name_of(descriptor: int) -> str:
    """The name of an open file; macOS has no /proc."""
    if sys.platform != "darwin":
        return Path(f"/proc/self/fd/{descriptor}").readlink().name
    path: bytes = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024))
    return Path(path.rstrip(b"\0").decode()).name


#: A run of a second: two iterations of Pendulum, no wandb.
QUICK = (
    *("env=pendulum", "frames=128", "env.num_envs=2", "env.normalize_observation=true"),
    *("collector.steps=32", "learner.minibatches=2", "learner.epochs=2", "optim.lr_floor=0"),
    *("actor.hidden=[8]", "eval.every=0", "logger=none"),
)
