"""Code behind ``env.id`` and ``env.reward``, and installed code: its digest is a job's identity."""

import importlib
import sys
from pathlib import Path

import pytest

import klrl
from klrl.base.errors import ConfigError
from klrl.base.sources import source_of
from klrl.config.compose import job_config
from klrl.config.identity import settings_hash
from klrl.config.own import changed_sources, check_sources
from tests.conftest import QUICK
from tests.runs.commands import exits

ENV = """
import gymnasium
from gymnasium.envs.classic_control import PendulumEnv

class Mine(PendulumEnv):
    def step(self, action):
        state, reward, *rest = super().step(action)
        return state, 1 * reward, *rest

if "Mine-v0" not in gymnasium.registry:
    gymnasium.register("Mine-v0", entry_point=Mine, max_episode_steps=200)
"""
REWARD = "def score(prompts, responses, rows): return [1.0 * len(r) for r in responses]\n"


def write(path: Path, text: str) -> None:
    """Write a module, as before the start of a new process."""
    path.write_text(text, encoding="utf-8")
    sys.modules.pop(path.stem, None)
    importlib.invalidate_caches()


@pytest.mark.integration
def test_five_times_the_reward_behind_an_id_is_another_job(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path / "mine.py", ENV)
    words = ("env=gym", "env.id=mine:Mine-v0", *QUICK[1:])
    sweep = ("-m", "sweep=s", *words, "frames=64")
    run = tmp_path / "outputs" / "s" / "job"
    assert exits(*sweep) == 0
    sources = klrl.load_run(run).config.env.sources
    assert sources == {"mine:Mine-v0": f"source {source_of('mine').digest}"}
    capsys.readouterr()
    assert exits(*sweep) == 0
    assert "1 finished before" in capsys.readouterr().out
    assert exits("evaluate", str(run), "--episodes", "1") == 0
    assert capsys.readouterr().err == ""

    write(tmp_path / "mine.py", ENV.replace("1 * reward", "5 * reward"))
    assert exits("evaluate", str(run), "--episodes", "1") == 0
    assert "mine:Mine-v0: has changed since this run began (it had s" in capsys.readouterr().err
    write(tmp_path / "mine.py", ENV.replace("1 * reward", "5 * reward"))
    assert exits(f"resume={run}", "frames=128") == 2
    assert "mine:Mine-v0: has changed since this run began" in capsys.readouterr().err
    write(tmp_path / "mine.py", ENV.replace("1 * reward", "5 * reward"))
    assert exits(*sweep) == 0
    assert "1 job, 1 to start" in capsys.readouterr().out


@pytest.mark.parametrize("reward", ["mine:score", "[exact,mine:score]", "mine.py:score"])
def test_the_source_of_a_reward_counts(tmp_path: Path, reward: str) -> None:
    name = reward.strip("[]").rpartition(",")[2]
    words = ["experiment=sort_digits", f"env.reward={reward}", "logger=none"]
    write(tmp_path / "mine.py", REWARD)
    first = job_config(words)
    assert settings_hash(first) == settings_hash(job_config(words))
    source = f"source {source_of(name.partition(':')[0], [str(tmp_path)]).digest}"
    assert first.env.sources == {name: source}
    check_sources(first)
    write(tmp_path / "mine.py", REWARD.replace("1.0", "5.0"))
    assert settings_hash(job_config(words)) != settings_hash(first)
    assert changed_sources(first)[0].startswith(f"{name}: has changed since this run began")
    with pytest.raises(ConfigError, match="restore it, or start a new run"):
        check_sources(first)
    write(tmp_path / "mine.py", REWARD)
    assert settings_hash(job_config(words)) == settings_hash(first)


#: What is in its ``dist-info`` -> whether its files count.
INSTALLED = {
    "no metadata": (None, True),
    "from an index": ({}, False),
    "from a folder": ({"direct_url.json": '{"url": "file:///lab", "dir_info": {}}'}, True),
}


@pytest.mark.parametrize("how", INSTALLED)
def test_an_installed_package_that_no_index_names(tmp_path: Path, monkeypatch, how: str) -> None:
    packages = tmp_path / "site-packages"
    (packages / "labtask").mkdir(parents=True)
    (packages / "labtask" / "__init__.py").write_text("FACTOR = 1\n", encoding="utf-8")
    metadata, counts = INSTALLED[how]
    if metadata is not None:
        info = packages / "labtask-0.1.0.dist-info"
        info.mkdir()
        for name, text in {"METADATA": "Name: labtask\nVersion: 0.1.0\n", **metadata}.items():
            (info / name).write_text(text, encoding="utf-8")
    (tmp_path / "mine.py").write_text("import labtask\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = source_of("labtask"), source_of("mine")
    (packages / "labtask" / "__init__.py").write_text("FACTOR = 5\n", encoding="utf-8")
    after = source_of("labtask"), source_of("mine")
    assert (before[0] != after[0]) is counts
    assert (before[1] != after[1]) is counts, "what imports it has changed too"
    assert before[0].version == (None if metadata is None else "0.1.0")


def test_what_a_registration_names_in_a_text_counts(tmp_path: Path, monkeypatch) -> None:
    """Gymnasium imports ``entry_point="dynamics.pole:Mine"`` when it makes the environment."""
    register = 'import gymnasium\ngymnasium.register("Mine-v0", entry_point="dynamics.pole:Mine")\n'
    (tmp_path / "registered.py").write_text(register, encoding="utf-8")
    (tmp_path / "dynamics").mkdir()
    (tmp_path / "dynamics" / "pole.py").write_text("FACTOR = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = source_of("registered")
    (tmp_path / "dynamics" / "pole.py").write_text("FACTOR = 5\n", encoding="utf-8")
    assert source_of("registered") != before
