"""Loading models and tokenizers: against plain transformers, and one line for each thing wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from klrl.base.errors import ConfigError
from klrl.language.data.model_files import find_model
from klrl.language.model.pretrained import CausalLM, load_causal_lm
from tests.language.families import tiny
from tests.transforms import llm_toys as toys

IDS = torch.tensor([[5, 9, 30, 12, 77]])


def save(family: str = "llama", folder: str = "model", **tokenizer: bool) -> Path:
    toys.network(family).save_pretrained(folder)
    toys.tokenizer(**tokenizer).save_pretrained(folder)
    return Path(folder)


def edit(folder: Path, file: str, **values: object) -> None:
    """Change fields of a JSON file; None takes one away."""
    told = json.loads((folder / file).read_text()) | values
    kept = {name: value for name, value in told.items() if value is not None}
    (folder / file).write_text(json.dumps(kept))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_a_loaded_model_computes_what_transformers_does(family: str) -> None:
    folder = save(family)
    loaded = load_causal_lm(str(folder), chat=True)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(logits(loaded.model), logits(plain))
    assert loaded.context == 256
    assert not loaded.model.training
    assert all(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.padding_side == "left"
    text = "sort the digits, 3x<|im_end|>"
    assert loaded.tokenizer(text)["input_ids"] == toys.tokenizer()(text)["input_ids"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_weights_have_the_dtype_asked_for(dtype: str) -> None:
    loaded = load_causal_lm(save(), chat=True, dtype=dtype)
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, dtype)}


def test_dropout_is_off_in_training_mode_too() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.5
    )
    GPT2LMHeadModel(config).save_pretrained("model")
    toys.tokenizer().save_pretrained("model")
    model = load_causal_lm("model", chat=True).model
    expected = logits(model.eval())
    assert torch.equal(logits(model.train()), expected)
    plain = AutoModelForCausalLM.from_pretrained("model").train()
    assert not torch.allclose(logits(plain), expected, atol=1e-3)  # what would have happened


def test_noise_of_routers_is_off_in_training_mode_too() -> None:
    """Mixtral multiplies what its experts read by 1 +- jitter where it trains."""
    torch.manual_seed(0)
    config = tiny("mixtral").config
    config.router_jitter_noise = 0.5
    AutoModelForCausalLM.from_config(config).save_pretrained("model")
    toys.tokenizer().save_pretrained("model")
    ids = torch.tensor([[5, 9, 3, 12, 7]])
    model = load_causal_lm("model", chat=True).model
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert torch.equal(model.train()(input_ids=ids).logits, expected)
        plain = AutoModelForCausalLM.from_pretrained("model").train()
        assert not torch.allclose(plain(input_ids=ids).logits, expected, atol=1e-3)


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_gradient_checkpointing_computes_twice_and_gives_the_same_gradients(family: str) -> None:
    folder, gradients, calls = save(family), [], []
    for checkpointing in (False, True):
        model = load_causal_lm(folder, chat=True, gradient_checkpointing=checkpointing).model
        count = []
        block = model.transformer.h[0] if family == "gpt2" else model.model.layers[0]
        linear = block.mlp.c_fc if family == "gpt2" else block.mlp.up_proj
        linear.register_forward_hook(lambda *_, count=count: count.append(1))
        model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)[0, :, 3].sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        calls.append(len(count))
    assert calls == [1, 2]
    for plain, again in zip(*gradients, strict=True):
        assert torch.allclose(plain, again, atol=1e-6)


def test_the_authors_sampling_defaults_are_dropped() -> None:
    folder = save()
    edit(folder, "generation_config.json", do_sample=True, top_k=5, temperature=0.3, top_p=0.5)
    generation = load_causal_lm(folder, chat=True).model.generation_config
    assert (generation.top_k, generation.top_p, generation.temperature) == (None, None, None)
    assert generation.eos_token_id == toys.tokenizer().eos_token_id
    assert generation.pad_token_id == toys.tokenizer().pad_token_id


def test_a_model_is_loaded_by_hub_id_and_nothing_that_runs_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--me--tiny"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(save(), snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    loaded = load_causal_lm("me/tiny", chat=True)
    assert torch.equal(logits(loaded.model), logits(toys.network()))


def test_the_hub_is_asked_for_weights_and_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(name: str, **kwargs: object) -> str:
        asked.update(kwargs, name=name)
        return "fetched"

    monkeypatch.setattr("klrl.language.data.model_files.snapshot_download", download)
    assert find_model("me/tiny") == Path("fetched")
    assert asked["name"] == "me/tiny"
    allowed = " ".join(asked["allow_patterns"])  # type: ignore[arg-type]
    assert "*.safetensors" in allowed
    assert not any(kind in allowed for kind in (".py", ".bin", ".pt", ".pkl", ".h5"))


def without_pad(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", pad_token=None)


def test_without_a_pad_token_eos_takes_its_place_and_that_is_said() -> None:
    folder, said = save(), []
    without_pad(folder)
    loaded = load_causal_lm(folder, chat=True, say=said.append)
    assert loaded.tokenizer.pad_token_id in loaded.eos
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id
    assert said == [
        "actor.model=model: no pad token; EOS is used instead",
    ]


def test_a_tokenizer_with_everything_is_no_news(capsys: pytest.CaptureFixture[str]) -> None:
    for pad_is_eos in (False, True):
        loaded = load_causal_lm(save(folder=f"{pad_is_eos}", pad_is_eos=pad_is_eos), chat=True)
        assert (loaded.tokenizer.pad_token_id in loaded.eos) is pad_is_eos
    assert capsys.readouterr().out == ""


def test_auto_tokenizer_still_overrules_the_folder_of_a_qwen2_model() -> None:
    """When this fails, read_tokenizer needs its own choice of a class no more."""
    tokenizer = AutoTokenizer.from_pretrained(save("qwen2"))
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"
    assert len(tokenizer) == len(toys.tokenizer()) + 1


def test_plain_prompts_need_no_chat_template() -> None:
    folder = save()
    (folder / "chat_template.jinja").unlink()
    assert load_causal_lm(folder, chat=False).tokenizer.chat_template is None


Spoil = Callable[[Path], None]


def removes(*files: str) -> Spoil:
    return lambda folder: [(folder / file).unlink() for file in files]


def writes(file: str, text: str) -> Spoil:
    return lambda folder: (folder / file).write_text(text)


def sets(file: str = "config.json", **values: object) -> Spoil:
    return lambda folder: edit(folder, file, **values)


def adapters_only(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")


def pickled_beside_a_decoy(folder: Path) -> None:
    pickled(folder)
    save_file({"other": torch.zeros(1)}, folder / "other.safetensors")


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])


def missing_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def adds(*names: str) -> Spoil:
    """Add weights to the model's file."""

    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights |= {name: torch.ones(2) for name in names}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return spoil


def remote_code(folder: Path) -> None:
    code = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    edit(folder, "config.json", model_type="mine", auto_map=code)
    (folder / "mine.py").write_text("raise SystemExit('this ran')")


def many_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder)


MINE = {"auto_map": {"AutoTokenizer": ["mine.Tokenizer", None]}}
TOKENIZER = "tokenizer_config.json"


@pytest.mark.parametrize(
    "spoil, told",
    [
        (removes("config.json"), "has no config.json"),
        (adapters_only, "has LoRA adapters .adapter_config.json.*; merge them"),
        # What merge_and_unload().save_pretrained leaves in the folder of the adapters.
        (
            writes("adapter_config.json", "{}"),
            "has LoRA adapters .adapter_config.json.*; merge them",
        ),
        (writes("config.json", "{"), "config.json is not JSON"),
        (pickled, r"its weights are pickled .pytorch_model.bin."),
        (pickled_beside_a_decoy, "its weights cannot be read .*no file named model.safetensors"),
        (removes("model.safetensors"), r"has no \*.safetensors"),
        (cut_weights, "its weights cannot be read"),
        (missing_weights, "its files lack 1 weight .model.layers.1.mlp.up_proj.weight"),
        (
            sets(intermediate_size=48),
            r"its files have model.layers.0.mlp.down_proj.weight of shape \(16, 32\), but its "
            r"config.json says \(16, 48\)",
        ),
        (sets(num_hidden_layers=1), "its files have 9 weights .* .model.layers.1.input_layernorm"),
        (
            adds("lm_head.bias", "model.layers.0.mlp.up_proj.bias"),
            "its files have 2 weights .*bias",
        ),
        (adds("v_head.summary.weight"), "its files have 1 weight .*v_head.summary.weight"),
        (remote_code, "needs custom code"),
        (sets(model_type="mine"), "config.json is not a valid mine config .*does not recognize"),
        (sets(model_type="vit"), "vit is not a causal language model"),
        (sets(TOKENIZER, **MINE), "its tokenizer needs custom code"),
        (writes(TOKENIZER, "{"), "tokenizer_config.json is not JSON"),
        (removes("tokenizer.json", TOKENIZER), "its tokenizer cannot be read"),
        (removes("chat_template.jinja"), "its tokenizer has no chat template"),
        (sets(TOKENIZER, eos_token=None), "its tokenizer has no EOS token"),
        (many_tokens, r"its tokenizer has \d+ tokens, its embedding \d+ rows"),
        (writes("config.json", "null"), "config.json is null, not an object"),
        (writes("tokenizer_config.json", "null"), "tokenizer_config.json is null, not an"),
        (sets(model_type=["llama"]), r"config.json is not a valid \['llama'\] config"),
        (
            sets(hidden_size="abc"),
            "config.json is not a valid llama config .*'hidden_size' expected",
        ),
        (sets(hidden_act="nope"), "its weights cannot be read .KeyError: 'nope'"),
        # transformers would take the config's EOS and say nothing.
        (
            writes("generation_config.json", '{"eos_token_id": [1, 2'),
            "generation_config.json is no",
        ),
        (writes("generation_config.json", "null"), "generation_config.json is null, not an"),
        (
            writes("generation_config.json", '{"max_new_tokens": "a"}'),
            "its weights cannot be read .TypeError",
        ),
    ],
)
def test_a_folder_that_cannot_serve_is_refused_in_one_line(spoil: Spoil, told: str) -> None:
    folder = save()
    spoil(folder)
    with pytest.raises(ConfigError, match=f"^actor.model=model: {told}") as caught:
        load_causal_lm("model", chat=True)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)  # a remedy follows


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_a_model_with_fewer_layers_than_its_weights_is_refused_without_a_report(
    family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    kinds = {"layer_types": ["full_attention"]} if family == "qwen2" else {}
    edit(save(family), "config.json", **{layers: 1}, **kinds)
    capfd.readouterr()
    with pytest.raises(ConfigError, match="that its config.json leaves out"):
        load_causal_lm("model", chat=True)
    assert capfd.readouterr() == ("", "")


def test_constants_that_older_versions_stored_are_no_weights() -> None:
    folder = save("gpt2")
    adds("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")(folder)
    mine = load_causal_lm(folder, chat=True).model
    assert torch.equal(logits(mine), logits(toys.network("gpt2").eval()))


@pytest.mark.parametrize("model", ["./none", "/none/at/all", "a/b/c", "~/none", "", " "])
def test_a_path_that_is_none_never_reaches_the_hub(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "klrl.language.data.model_files.snapshot_download", lambda *_, **__: pytest.fail("asked")
    )
    with pytest.raises(ConfigError, match=f"actor.model={model}: no such folder"):
        find_model(model)


def test_a_file_is_no_model() -> None:
    Path("model.safetensors").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        find_model("model.safetensors")


def test_a_hub_that_cannot_be_reached_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for model in ("me/tiny", "not an id!"):
        with pytest.raises(ConfigError, match=f"={model}: .*, and no download from") as caught:
            find_model(model)
        assert "\n" not in str(caught.value)


def test_the_longest_response_is_taken_off_the_context() -> None:
    assert CausalLM(None, None, 256, ()).prompt_limit(100) == 156
    assert CausalLM(None, None, None, ()).prompt_limit(100) is None
    with pytest.raises(ConfigError, match="collector.max_new_tokens=256: leaves no room"):
        CausalLM(None, None, 256, ()).prompt_limit(256)
