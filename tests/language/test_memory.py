"""``klrl plan --memory`` against the bytes that torch's allocator gives to a run."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import klrl
from klrl.base.errors import ConfigError
from klrl.config.compose import job_config
from klrl.language.data.sort_digits import BASE_MODEL
from klrl.language.run.memory import memory
from tests.language.conftest import QUICK

#: Width, layers, vocabulary, heads and inner width of models that differ tenfold.
SIZES = {
    "1.6M": (112, 8, 4096, 4, 320),
    "15M": (252, 14, 16384, 9, 768),
    "135M": (576, 30, 49152, 9, 1536),
}
WORDS = (
    *QUICK,
    *("collector.max_new_tokens=32", "frames=16", "device=cpu"),
)


def made(folder: Path, size: str) -> str:
    """A Llama of random weights, with the tokens of klrl's own model."""
    width, layers, tokens, heads, inner = SIZES[size]
    config = LlamaConfig(
        **{"hidden_size": width, "num_hidden_layers": layers, "vocab_size": tokens},
        **{"intermediate_size": inner, "num_attention_heads": heads, "eos_token_id": 3},
        **{"num_key_value_heads": heads // 3, "tie_word_embeddings": True, "pad_token_id": 0},
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(BASE_MODEL) / file, folder)
    return str(folder)


def allocated(words: list[str], folder: Path) -> int:
    """The most bytes that a run holds, by the profiler's record of each allocation."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        klrl.run(*words, folder=folder)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("size", "more"),
    [
        ("1.6M", []),
        ("1.6M", ["actor.lora.r=2", "reference=adapter_off"]),
        ("1.6M", ["loss.entropy_bonus=true", "loss.entropy_coeff=0.1"]),
        *(pytest.param(size, [], marks=pytest.mark.slow) for size in ("15M", "135M")),
    ],
)
def test_the_estimate_is_near_what_torch_allocates(size, more, tmp_path: Path) -> None:
    words = [*WORDS, f"actor.model={made(tmp_path / 'model', size)}", *more]
    estimate = max(map(sum, zip(*memory(job_config(words)).values(), strict=True)))
    assert estimate == pytest.approx(allocated(words, tmp_path / "run"), rel=0.1)


def test_ranks_share_only_what_a_run_shares() -> None:
    config = job_config([*WORDS, "advantage=gae"])
    memory(config)
    with pytest.raises(ConfigError, match="advantage=gae: its critic learns in one process"):
        memory(config, 2)


def test_parts_are_those_of_the_settings(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "1.6M")
    model = AutoModelForCausalLM.from_pretrained(folder)
    size = 4 * model.num_parameters()
    (tmp_path / "model" / "model.safetensors").unlink()  # no weight is read

    def parts(*words: str, ranks: int = 1) -> dict[str, tuple[float, ...]]:
        return memory(job_config([*WORDS, f"actor.model={folder}", *words]), ranks)

    whole = parts()
    assert whole["weights"] == whole["reference"] == (size,) * 3
    assert whole["gradients"] == (0, 0, size)
    assert whole["Adam's moments"] == (2 * size,) * 3
    # 16 responses of 32 tokens with a state of 112 numbers, and keys and values of a head of 28.
    state = 16 * 32 * 112 * 4
    assert whole["hidden states"] == (2 * state, state, 1.5 * state)
    prompt = parts("collector.max_new_tokens=1")["cache"][0] / (8 * 2 * 28 * 4) / 4 - 4
    assert whole["cache"][0] == 8 * 2 * 28 * 4 * 4 * (prompt + 4 * 32)
    assert parts("kl=none")["reference"] == (0,) * 3
    adapters = parts("actor.lora.r=2", "reference=adapter_off")
    # Two factors of rank 2 at each of q, k, v, o and the three layers of the MLP.
    trained = 4 * 8 * 2 * (224 + 140 + 140 + 224 + 3 * 432)
    assert adapters["weights"] == (size + trained,) * 3
    assert adapters["gradients"][2] == trained
    assert adapters["reference"] == adapters["older heads"] == (0,) * 3
    low = parts("learner.micro_batch=1", "actor.gradient_checkpointing=true")
    assert low["activations, logits"][2] < whole["activations, logits"][2] / 2
    two = parts("collector.staleness=3", ranks=2)
    # A device has its own half, but all rollouts that wait.
    assert two["hidden states"][1] == state / 2 + 3 * state
    assert two["cache"][0] == whole["cache"][0] / 2
    assert parts("collector.staleness=3", "kl.exact=charged")["hidden states"] == (0,) * 3
    # The policy's before the update, the latest sampler's, and three that wait.
    assert two["older heads"] == (5 * 4 * 4096 * 112,) * 3
