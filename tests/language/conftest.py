"""A small base model, and quick jobs on it."""

from collections.abc import Callable

import pytest

from benchmarks.sort_digits_base import Recipe, build
from klrl.__main__ import main
from klrl.config import LanguageConfig
from klrl.config.checks import to_config
from klrl.config.compose import Composer
from klrl.config.overrides import parse
from tests.runs.commands import last_choices

QUICK_MODEL = Recipe(
    hidden=16, layers=1, heads=2, batch=8, measure_every=4, measure_on=8, target=0.0, context=64
)


#: A module of rewards: the length of a response.
LENGTHS = "def reward(prompts, responses, rows):\n    return [float(len(r)) for r in responses]\n"
QUICK = (
    "experiment=sort_digits",
    "env.reward=proxy",  # which an untrained model earns sometimes
    "frames=32",
    "collector.prompts=4",
    "collector.group_size=4",
    "collector.max_new_tokens=6",
    "collector.samples_every=1",
    "learner.minibatches=2",
    "learner.epochs=1",
    "optim.lr=0.01",
    "optim.lr_floor=0.01",
    "eval.every=0",
    "checkpoint.every=1",
    "logger=none",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    build(QUICK_MODEL, folder)
    return str(folder)


@pytest.fixture
def job(model: str) -> Callable[..., LanguageConfig]:
    return composed(model)


def composed(model: str) -> Callable[..., LanguageConfig]:
    """Words -> a quick job on this model."""
    composer = Composer()
    given = [*QUICK, f"actor.model={model}"]
    return lambda *words: to_config(composer.composed(parse([*given, *words])))


@pytest.fixture
def exits(model: str, capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in ``run``: exit code, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        if not any(word.startswith("resume=") for word in words):
            named = () if "actor=mlp" in words else (f"actor.model={model}",)
            words = (*QUICK, *named, "hydra.run.dir=run", *words)
        with pytest.raises(SystemExit) as stop:
            main(last_choices(words))
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    return call
