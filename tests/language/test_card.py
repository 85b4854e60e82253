"""The README.md of ``klrl export``: huggingface_hub reads it, and its numbers are the run's."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

import klrl
from klrl.language.run.export import export_run
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training
from tests.runs.commands import manifest_of, rows_of

pytestmark = pytest.mark.integration


def settings_of(card: ModelCard) -> dict:
    (text,) = re.findall(r"```yaml\n(.*)```", card.text, re.DOTALL)
    return yaml.safe_load(text)


# peft 0.21 reads a property that transformers 5.23 deprecates.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_the_card_has_the_runs_numbers_and_no_place_of_this_machine(job, model: str) -> None:
    """Of adapters, for which peft writes a card with the path of the base model."""
    words = ("actor.lora.r=2", "reference=adapter_off", "eval.every=1", "eval.final=12")
    config = job(*words, "collector.temperature=0.7", "optim.lr=0.05", "kl.coef=0.25")
    Training(config).train(RunFolder(Path("run")))
    export_run("run", Path("out"))
    file = Path("out/README.md").read_text("utf-8")
    card, row = ModelCard.load("out/README.md"), rows_of(Path("run"))[-1]
    assert card.data.to_dict() == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["klrl"],
    }
    manifest = manifest_of(Path("run"))
    assert f"Run `{manifest['id']}` of klrl {klrl.__version__}: adapters of the last" in file
    assert f"32 samples, trained from {Path(model).name}.\n" in file
    assert "softmax(logits / 0.7)" in file
    (numbers,) = re.findall(r"KL\(policy\|\|reference\) (\S+) \+- (\S+), ", file)
    assert float(numbers[0]) == pytest.approx(row["eval/kl_ref"], rel=0.01)
    assert float(numbers[1]) == pytest.approx(row["eval/kl_ref_se"], rel=0.1)
    assert "The reference is the base model.\n" in file
    assert "every token of 12 responses" in file
    assert str(Path(model).parent) not in file
    found = settings_of(card)
    assert found["kl"]["coef"] == 0.25
    assert found["actor"]["model"] == Path(model).name
    assert found["env"]["reward"] == "proxy"


def test_the_best_checkpoint_has_the_kl_of_its_own_evaluation(job) -> None:
    Training(job("eval.every=1", "eval.episodes=8", "frames=48")).train(RunFolder(Path("run")))
    export_run("run", Path("out"), which="best")
    (entry,) = Path("run/checkpoints/best").iterdir()
    (row,) = [r for r in rows_of(Path("run")) if r["samples"] == int(entry.name[7:])]
    (kl,) = re.findall(r"KL\(policy\|\|reference\) (\S+)", Path("out/README.md").read_text("utf-8"))
    assert float(kl) == pytest.approx(row["eval/kl_ref"], rel=0.01)


def test_a_hub_id_is_the_cards_base_model(job, model: str, monkeypatch) -> None:
    monkeypatch.setattr(
        "klrl.language.data.model_files.snapshot_download", lambda name, **how: model
    )
    config = job("actor.model=someone/tiny", "kl=none", "frames=16")
    Training(config).train(RunFolder(Path("run")))
    export_run("run", Path("out"))
    card = ModelCard.load("out/README.md")
    assert (card.data.base_model, card.data.library_name) == ("someone/tiny", "transformers")
    assert "did not measure the KL" in card.text
    shutil.copytree(model, "moved")
    export_run("run", Path("again"), model="moved")
    assert "base_model" not in ModelCard.load("again/README.md").data.to_dict()


def test_a_path_below_a_setting_loses_its_folders(job, model: str) -> None:
    home = Path("place with a space").absolute()
    home.mkdir()
    (home / "mine.py").write_text(
        "def reward(prompts, responses, rows):\n    return [0.0 for _ in responses]\n"
    )
    (home / "p.jsonl").write_text(json.dumps({"prompt": "3 1 2="}) + "\n")
    words = ("env=text", f"env.data='{home}/p.jsonl'", f"env.reward='{home}/mine.py:reward'")
    Training(job(*words, "frames=16")).train(RunFolder(Path("run")))
    export_run("run", Path("out"))
    text = Path("out/README.md").read_text("utf-8")
    assert home.name not in text
    env = settings_of(ModelCard(text))["env"]
    assert (env["data"], env["reward"]) == ("p.jsonl", "mine.py:reward")
