"""``klrl export``: plain transformers and peft read the folder, and give the policy's log-probs."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import klrl
from klrl.__main__ import main
from klrl.base.errors import ConfigError
from klrl.language.run.export import export_run
from klrl.runs.folder import RunFolder
from klrl.train.loop import Training
from tests.report.toys import write_run
from tests.transforms import llm_toys as toys

pytestmark = pytest.mark.integration

IDS = torch.tensor([[3, 4, 5, 6, 7, 8, 5]])


@pytest.fixture
def authored(model: str) -> str:
    """The model as an author may have saved it: dropout, sampling defaults, no pad token."""
    network = AutoModelForCausalLM.from_pretrained(model)
    network.save_pretrained("authored")
    AutoTokenizer.from_pretrained(model).save_pretrained("authored")
    config = json.loads(Path("authored/config.json").read_text())
    del config["pad_token_id"]
    config |= {"attention_dropout": 0.25, "resid_pdrop": 0.1}
    Path("authored/config.json").write_text(json.dumps(config))
    Path("authored/generation_config.json").write_text(
        json.dumps({"do_sample": True, "top_k": 7, "temperature": 0.3, "eos_token_id": 2})
    )
    return "authored"


@torch.no_grad()
def log_probs(model) -> torch.Tensor:
    return model.eval()(IDS).logits.double().log_softmax(-1)


def policy_of(run: str, which: str = "last") -> torch.Tensor:
    return log_probs(klrl.load_policy(run, which).model)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max()) <= 1e-6


def test_all_weights_as_plain_transformers_loads_them(job, authored: str) -> None:
    Training(job(f"actor.model={authored}")).train(RunFolder(Path("run")))
    export_run("run", Path("out/model"))
    loaded = AutoModelForCausalLM.from_pretrained("out/model")
    assert_same(log_probs(loaded), policy_of("run"))
    start = AutoModelForCausalLM.from_pretrained(authored)
    assert float((log_probs(start) - policy_of("run")).abs().max()) > 1e-3  # it was trained
    config = json.loads(Path("out/model/config.json").read_text())
    assert (config["attention_dropout"], config["resid_pdrop"]) == (0.25, 0.1)
    assert "pad_token_id" not in config
    assert config["dtype"] == "float32"
    assert (loaded.generation_config.top_k, loaded.generation_config.temperature) == (7, 0.3)
    before, after = (AutoTokenizer.from_pretrained(f) for f in (authored, "out/model"))
    assert after.chat_template == before.chat_template
    assert after.get_vocab() == before.get_vocab()
    assert after.padding_side == before.padding_side


def test_generate_draws_from_the_policy_at_the_runs_temperature(job) -> None:
    """The author's top_k and temperature, or top_k=50, would draw from another policy."""
    toys.network().save_pretrained("author")  # of 300 tokens
    toys.tokenizer().save_pretrained("author")
    Path("author/generation_config.json").write_text('{"do_sample": true, "temperature": 0.3}')
    config = job("actor.model=author", "collector.temperature=0.7")
    Training(config).train(RunFolder(Path("run")))
    line = export_run("run", Path("out"))
    assert line.endswith("float32; the run's policy is softmax(logits / 0.7)")
    loaded = AutoModelForCausalLM.from_pretrained("out")
    how = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    (drawn_from,) = loaded.generate(IDS, attention_mask=torch.ones_like(IDS), **how).scores
    logits = klrl.load_policy("run").model(IDS).logits[:, -1].double()
    assert_same(drawn_from.double().log_softmax(-1), (logits / 0.7).log_softmax(-1))
    assert len(loaded.generate(IDS, max_new_tokens=1, num_return_sequences=64).unique()) > 8


# peft 0.21 reads a property that transformers 5.23 deprecates.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("merge", [False, True], ids=["adapters", "merged"])
def test_adapters_alone_and_merged(job, authored: str, merge: bool) -> None:
    words = ("actor.lora.r=2", "reference=adapter_off", "optim.lr=0.1")
    Training(job(f"actor.model={authored}", *words)).train(RunFolder(Path("run")))
    export_run("run", Path("out"), merge=merge)
    start = AutoModelForCausalLM.from_pretrained(authored)
    assert float((log_probs(start) - policy_of("run")).abs().max()) > 1e-3
    if merge:
        assert not Path("out/adapter_config.json").exists()
        assert_same(log_probs(AutoModelForCausalLM.from_pretrained("out")), policy_of("run"))
        assert json.loads(Path("out/config.json").read_text())["attention_dropout"] == 0.25
        return
    assert not Path("out/model.safetensors").exists()
    assert_same(log_probs(PeftModel.from_pretrained(start, "out")), policy_of("run"))
    # The folder names its base model, wherever it is read from.
    assert_same(log_probs(AutoModelForCausalLM.from_pretrained("out")), policy_of("run"))
    assert AutoTokenizer.from_pretrained("out").chat_template


@pytest.mark.parametrize("layer", ["lm_head", pytest.param("embed_tokens", marks=pytest.mark.slow)])
def test_adapters_on_one_of_two_tied_weights_are_not_merged(job, layer: str) -> None:
    """One weight cannot be both the embedding and the head with adapters added."""
    words = ("frames=16", "actor.lora.r=2", f"actor.lora.target_modules=[{layer},q_proj]")
    Training(job(*words)).train(RunFolder(Path("run")))
    with pytest.raises(ConfigError, match=r"^--merge: actor.lora.target_modules=.* drop --merge$"):
        export_run("run", Path("out"), merge=True)
    assert not Path("out").exists()


# peft 0.21 reads a property that transformers 5.23 deprecates.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_name_the_converted_model_by_its_folder(job, model: str, monkeypatch) -> None:
    """``smollm2`` is klrl's name; peft would look for it on the hub."""
    monkeypatch.setattr("klrl.language.model.smollm.smollm", lambda: Path(model))
    monkeypatch.setattr("klrl.language.model.smollm.check_installed", lambda: None)
    config = job("actor.model=smollm2", "actor.lora.r=2", "reference=adapter_off", "frames=16")
    Training(config).train(RunFolder(Path("run")))
    export_run("run", Path("out"))
    settings = json.loads(Path("out/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(Path(model).resolve())
    assert_same(log_probs(AutoModelForCausalLM.from_pretrained("out")), policy_of("run"))


@pytest.mark.slow
def test_the_dtype_is_the_runs(job) -> None:
    words = ("actor.dtype=bfloat16", "actor.lora.r=2")
    Training(job(*words)).train(RunFolder(Path("run")))
    export_run("run", Path("out"), merge=True)
    assert AutoModelForCausalLM.from_pretrained("out").dtype == torch.bfloat16


def test_what_cannot_be_exported_is_refused_in_one_line(job, capsys) -> None:
    Training(job()).train(RunFolder(Path("run")))
    write_run(Path("control"))
    Path("there").mkdir()
    refused = {
        ("control", "new"): "klrl export: RUN=control: ",
        ("nowhere", "new"): "klrl export: RUN=nowhere: no such folder",
        ("run", "there"): "klrl export: FOLDER=there: already exists; give a new folder",
        ("~nosuchuser/x", "new"): "klrl export: RUN=~nosuchuser/x: no such folder",
        ("run", "new", "--merge"): "klrl export: --merge: the run has no adapters (actor.lora.r=0)",
        (
            "run",
            "new",
            "--which",
            "best",
        ): f"klrl export: {Path.cwd() / 'run'}: has no checkpoint 'best'",
    }
    capsys.readouterr()
    for words, line in refused.items():
        with pytest.raises(SystemExit, match="2"):
            main(["export", *words])
        said = capsys.readouterr().err
        assert said.startswith(line), said
        assert len(said.splitlines()) == 1
        assert not Path("new").exists()
