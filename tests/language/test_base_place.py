"""Verify, export and evaluate where the base model's files have changed, or lie elsewhere now."""

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from klrl.language.run.load import trained_policy
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training
from tests.runs.commands import said

pytestmark = pytest.mark.integration

ADAPTERS = ("actor.lora.r=2", "reference=adapter_off")
OTHER_WEIGHTS = "no longer has the weights that the run started from; restore its original files\n"


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def base(model: str) -> Path:
    """A copy of the model, at a relative path."""
    return Path(shutil.copytree(model, "base"))


def trained(job, *words: str, run: str = "run") -> None:
    Training(job("actor.model=base", *words)).train(RunFolder(Path(run)))


def change(folder: Path) -> None:
    """Another model in the same place: every weight 1 % larger."""
    file = folder / "model.safetensors"
    weights = {name: 1.01 * weight for name, weight in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


def refused(capsys, *words: str) -> str:
    """The one line of a command that is refused."""
    code, out, err = said(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
    assert not Path("out").exists()
    return err


@pytest.mark.parametrize("words", [(), ADAPTERS], ids=["full", "adapters"])
def test_verify_calls_no_record_false_whose_base_model_changed(job, base, capsys, words) -> None:
    trained(job, *words)
    assert said(capsys, "verify", "run")[0] == 0
    change(base)
    line = refused(capsys, "verify", "run")
    assert "run/checkpoints/last/frames-000000000032: " in line
    assert line.endswith(f"actor.model=base {OTHER_WEIGHTS}")


@pytest.mark.parametrize("words", [("kl=none",), ("reference=ema",)])
def test_without_a_digest_verify_does_not_use_the_base_model(job, base, capsys, words) -> None:
    """These checkpoints need no base model, so nobody knows whether its weights have changed."""
    trained(job, *words)
    before = said(capsys, "verify", "run")
    change(base)
    assert said(capsys, "verify", "run") == before
    assert before[0] == 0


def test_all_weights_are_written_and_played_beside_another_base_model(job, base, capsys) -> None:
    trained(job)
    policy = trained_policy("run").model.state_dict()
    played = said(capsys, "evaluate", "run", "--episodes", "8", "--json")
    change(base)
    assert said(capsys, "export", "run", "out")[0] == 0
    written = AutoModelForCausalLM.from_pretrained("out").state_dict()
    assert written.keys() == policy.keys()
    assert all(torch.equal(written[name], policy[name]) for name in policy)
    code, again, told = said(capsys, "evaluate", "run", "--episodes", "8", "--json")
    scores = {k: v for k, v in json.loads(played[1]).items() if not k.startswith("eval/kl_ref")}
    assert (code, json.loads(again)) == (0, scores)
    assert "no KL to the reference: " in told
    assert f"actor.model=base {OTHER_WEIGHTS}" in told


@pytest.mark.parametrize(
    "words", [(), pytest.param(ADAPTERS, marks=pytest.mark.slow)], ids=["full", "adapters"]
)
def test_a_base_model_that_lies_elsewhere_now(job, base, capsys, words) -> None:
    trained(job, *words)
    before = [
        said(capsys, "verify", "run"),
        said(capsys, "evaluate", "run", "--episodes", "8", "--json"),
    ]
    now = Path(shutil.move(base, "else=where,"))
    remedies = {
        ("verify", "run"): "--model FOLDER\n",
        ("export", "run", "out"): "--model FOLDER\n",
        ("evaluate", "run"): "actor.model=FOLDER\n",
    }
    for command, remedy in remedies.items():
        line = refused(capsys, *command)
        assert line.startswith(
            f"klrl {command[0]}: actor.model=base: no such folder, and no download from the hub"
        )
        assert line.endswith(f"; give its current folder with {remedy}")
    told = said(capsys, "evaluate", "run", f"actor.model={now}", "--episodes", "8")[1]
    assert " (last checkpoint of run)\nKL(policy||reference) " in told
    assert "where" not in told  # it is no other task
    after = [
        said(capsys, "verify", "run", "--model", str(now)),
        said(capsys, "evaluate", "run", f"actor.model={now}", "--episodes", "8", "--json"),
    ]
    assert after == before
    assert said(capsys, "export", "run", "out", "--model", str(now))[0] == 0
    if words:
        settings = json.loads(Path("out/adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(now.resolve())
    else:
        assert torch.equal(
            AutoModelForCausalLM.from_pretrained("out").lm_head.weight,
            trained_policy("run", model=str(now)).model.lm_head.weight,
        )


@pytest.mark.parametrize("words", [(), ADAPTERS], ids=["full", "adapters"])
def test_another_model_is_not_taken_for_it(job, base, capsys, words) -> None:
    """Its tokenizer and config would be exported, whoever's the weights are."""
    trained(job, *words)
    change(Path(shutil.copytree(base, "other")))
    for command in (
        ("verify", "run", "--model", "other"),
        ("export", "run", "out", "--model", "other"),
        ("evaluate", "run", "actor.model=other"),
    ):
        assert refused(capsys, *command).endswith(f"actor.model=other {OTHER_WEIGHTS}")
    for command in ("verify", "run"), ("export", "run", "out"):
        for name in ("nowhere", "~nosuchuser/x", "run/manifest.json"):
            assert refused(capsys, *command, "--model", name) == (
                f"klrl {command[0]}: --model={name}: no such folder; give the folder of the "
                "run's base model\n"
            )


def test_the_references_base_model_is_where_the_policys_is(job, base, capsys) -> None:
    trained(job, run="first")
    trained(job, "reference=checkpoint", "reference.path=first")
    shutil.move(base, "now")
    assert said(capsys, "verify", "run", "--model", "now")[0] == 0
