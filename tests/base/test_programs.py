"""No program or module of the current folder is started, whatever PATH and libraries name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import klrl
from klrl.base.programs import protect
from klrl.runs.folder import _git_commit
from tests.conftest import QUICK
from tests.runs.commands import last_choices


@pytest.mark.parametrize("path", [".:{}", ":{}", "{}:", "bin:{}", "{}:./bin:."])
def test_a_program_of_the_current_folder_is_not_called_by_its_name(path: str, monkeypatch) -> None:
    Path("bin").mkdir()
    for folder in (Path(), Path("bin")):
        (folder / "git").write_text("#!/bin/sh\ntouch ran\n")
        (folder / "git").chmod(0o700)
    monkeypatch.setenv("PATH", path.format(before := os.environ["PATH"]))
    protect()
    _git_commit()
    assert not Path("ran").exists()
    assert os.environ["PATH"] == before


@pytest.mark.parametrize("session", ["x11", "wayland"])
def test_glfw_need_not_search_its_library(session: str, monkeypatch) -> None:
    pytest.importorskip("glfw")
    monkeypatch.delenv("PYGLFW_LIBRARY", raising=False)
    monkeypatch.setenv("XDG_SESSION_TYPE", session)
    protect()
    library = Path(os.environ["PYGLFW_LIBRARY"])
    assert library.is_absolute() == library.is_file() == (library.parent.name != "")


MINE = """
import os, sys, gymnasium, numpy as np
class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    def __init__(self):
        assert not os.environ.get("PYTHONSAFEPATH"), "a program of the environment would need it"
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return np.zeros(1, np.float32), {}
    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), float(action[0]), self.left == 0, False, {}
"""
SWEEP = ("-m", "sweep=s", "seed=0,1")


@pytest.mark.integration
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [
        (*SWEEP, "launcher=joblib", "launcher.n_jobs=2"),
        (*SWEEP, "launcher=submitit", "launcher.cluster=local"),
        pytest.param(("hydra.run.dir=run", "learner.compile=aot"), marks=pytest.mark.slow),
    ],
    ids=["joblib", "submitit", "aot"],
)
def test_no_module_of_the_current_folder_starts_in_a_child(words, tmp_path, monkeypatch) -> None:
    """By the way of the installed command, which does not search the current folder."""
    script, ran, here = tmp_path / "klrl", tmp_path / "ran", tmp_path / "hostile"
    script.write_text("import sys\nfrom klrl.__main__ import main\nsys.exit(main())\n")
    here.mkdir()
    (here / "mine.py").write_text(MINE)
    for name in ("multiprocessing", "joblib", "submitit", "textwrap", "torch", "klrl", "numpy"):
        (here / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write('{name}\\n')\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(Path(klrl.__file__).parents[1]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = ("env=custom", "env.target=mine:Env", "frames=64")
    command = (sys.executable, script, *last_choices((*QUICK, *own, *words)))
    done = subprocess.run(command, capture_output=True, text=True)
    assert not ran.exists(), ran.read_text()
    assert done.returncode == 0, done.stdout + done.stderr
