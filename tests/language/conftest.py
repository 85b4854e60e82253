"""A small base model, and quick jobs on it."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.sort_digits_base import Recipe, build
from klrl.__main__ import main
from klrl.config import LanguageConfig
from klrl.config.checks import to_config
from klrl.config.compose import Composer
from klrl.config.overrides import parse
from klrl.language.data.batch import response_mask
from klrl.language.run import evaluate
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


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list:
    """The batches of responses that ``klrl kl`` measures."""
    found, answers = [], evaluate.Player.answers

    def watched(*given, **how):
        for asked, batch in answers(*given, **how):
            found.append(batch)
            yield asked, batch

    monkeypatch.setattr(evaluate.Player, "answers", watched)
    return found


def plain(folder: str, batch, temperature: float = 1.0) -> list[torch.Tensor]:
    """log p of every token of each response [T, V], a row at a time, from a folder's own model."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for row, mask in zip(batch, response_mask(batch), strict=True):
        ids = row["tokens", "full"][row["masks", "all_attention_mask"]]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, -int(mask.sum()) - 1 : -1]
        found.append((logits.double() / temperature).log_softmax(-1))
    return found
