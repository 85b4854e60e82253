"""What a user sees who gets something wrong: one line, exit 2, nothing written."""

import resource
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

from klrl.base.errors import ConfigError
from klrl.runs.rows import read_rows
from tests.conftest import QUICK
from tests.runs.commands import exits


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run the command line in this process; returns what it said on its way out with 2."""
    left = exits(*words)
    said = capsys.readouterr()
    assert (left, said.out, len(said.err.splitlines())) == (2, "", 1), said
    assert not any(Path("outputs").glob("*"))
    return said.err


@pytest.mark.parametrize(
    ("words", "package", "says"),
    [
        ([], "wandb", "logger=wandb: the package wandb is not installed; pip install wandb"),
        (  # ``make run`` installs no extra
            ["experiment=sort_digits"],
            "transformers",
            "klrl: env=sort_digits: the package transformers is not installed; "
            "pip install 'klrl[language]'\n",
        ),
    ],
)
def test_a_missing_optional_package_is_named(words, package, says, capsys, monkeypatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == package else find(n, *a)
    )
    assert says in refused(capsys, *words)


@pytest.mark.integration
def test_answers_come_without_torch() -> None:
    commands = [
        *(["--help"], ["kl.coff=1"], ["env=gym", "env.id=Nope-v9"], ["loss=clip", "loss.beta=2"]),
        *(["--version"], ["ls", "."], ["plan", "kl.coef=1"]),
    ]
    code = (
        "import sys\nfrom klrl.__main__ import main\n"
        f"for words in {commands!r}:\n"
        "    try: main(words)\n    except SystemExit: pass\n"
        "    if 'torch' in sys.modules: sys.exit(str(words))"
    )
    before = cpu_seconds_of_children()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    took = cpu_seconds_of_children() - before
    assert took < 3, "far above the second that they take: something heavy is imported"


def cpu_seconds_of_children() -> float:
    """Of those that have ended; unlike the time on the wall, no matter what else runs here."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_refused_job_deletes_nothing_that_was_there_and_leaves_nothing(capsys, key: str) -> None:
    """The refusal comes while the job is built, with the user's own folder as the run folder."""
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years", encoding="utf-8")
    flags = ["-m"] if key == "hydra.sweep.dir" else []
    import klrl.train.loop

    def refuse_late(*args: object, **kwargs: object) -> None:
        raise ConfigError("late: refused")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(klrl.train.loop, "start", refuse_late)
        for words in ([f"{key}=mine"], []):
            assert exits(*flags, *QUICK, *words) == 2
            assert "late: refused" in capsys.readouterr().err
        assert "late: refused" in refused(capsys, *QUICK, "hydra.run.dir=one/two/three")
    assert not any(Path("outputs").glob("*"))
    assert [p.name for p in Path("mine").iterdir()] == ["thesis.txt"]
    assert not Path("one").exists(), "nor a folder above its own"


@pytest.mark.integration
def test_the_run_folder_is_read_as_hydra_reads_it(capsys) -> None:
    exits(*QUICK, "frames=128", "hydra.run.dir='lr=1,seed=0'")
    exits("resume=lr=1,seed=0", "frames=256")
    assert read_rows(Path("lr=1,seed=0/metrics.jsonl"))[-1]["frames"] == 256
    capsys.readouterr()
    said = refused(capsys, *QUICK, "hydra.run.dir=runs/${env.id}")
    assert "hydra.run.dir=runs/${env.id}: contains an interpolation" in said


SPACES = {
    "integers": (gymnasium.spaces.Box(0, 5, (2,), int), gymnasium.spaces.Box(-1, 1, (2,))),
    "a sequence": (
        gymnasium.spaces.Discrete(2),
        gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(3)),
    ),
}


@pytest.mark.parametrize("spaces", SPACES.values(), ids=SPACES.keys())
def test_spaces_that_cannot_be_served_are_refused_beforehand(capsys, spaces) -> None:
    class Odd(gymnasium.Env):
        action_space, observation_space = spaces

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 0.0, False, False, {}

    gymnasium.register("klrl-test/Odd-v0", Odd, disable_env_checker=True)
    try:
        assert "wrap the environment" in refused(capsys, "env=gym", "env.id=klrl-test/Odd-v0")
    finally:
        del gymnasium.registry["klrl-test/Odd-v0"]
