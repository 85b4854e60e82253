"""How long a sequence may be: a model's context, and families that turn positions by length."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from klrl.base.context import context_of
from klrl.config import TextConfig
from klrl.language.data.tasks import make_task
from klrl.language.model.pretrained import load_causal_lm
from klrl.language.run.sampler import CacheSampler, Decoding, SpecialTokens
from tests.language.conftest import LENGTHS
from tests.language.toys import EOS, PAD, network, prompts
from tests.transforms.llm_toys import tokenizer

SPECIAL = SpecialTokens((EOS,), PAD)


def longrope() -> Phi3ForCausalLM:
    """A random Phi-3 whose positions turn in another way in batches of more than 16 tokens."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.5}
    positions = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    special = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD}
    config = Phi3Config(
        vocab_size=300, **sizes, **heads, **positions, **special, rope_parameters=rope
    )
    return Phi3ForCausalLM(config).eval()


def test_with_longrope_a_row_depends_on_the_rows_beside_it() -> None:
    """transformers' own logits of a row of 5 tokens, alone and beside one of 30.

    When this fails, transformers turns each row's positions by its own length: ``context_of`` can
    take ``max_position_embeddings`` again.
    """
    model, ids = longrope(), torch.randint(3, 200, (2, 30))
    with torch.no_grad():
        alone = model(input_ids=ids[:1, :5]).logits
        beside = model(input_ids=ids).logits[:1, :5]
    assert (alone - beside).abs().max() > 0.1


def test_with_longrope_no_sequence_is_longer_than_the_positions_before_extension(tmp_path) -> None:
    longrope().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path, chat=False, say=lambda _: None)
    assert loaded.context == 16
    sampler = CacheSampler(loaded.model, SPECIAL)
    fits = prompts(lengths=(4, 12))
    assert sampler.self_check(*fits, 2).value < 1e-4
    sampler(*fits, 2, Decoding(max_new_tokens=4))
    with pytest.raises(ValueError, match=r"17 tokens: more than .*original_max_position_embedd"):
        sampler(*fits, 2, Decoding(max_new_tokens=5))


def test_a_context_is_read_from_every_form_of_a_config() -> None:
    config = network("llama").config
    assert context_of(config) == 256
    config.max_position_embeddings = -1
    assert context_of(config) is None
    config.rope_parameters = {
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 32},
        "sliding_attention": {"rope_type": "default"},
    }
    assert context_of(config) == 32


@pytest.mark.parametrize("length", [255, 254, 253])
def test_a_prompt_that_leaves_little_room_is_checked_with_what_fits(length) -> None:
    model, (ids, mask) = network("llama"), prompts(lengths=(length, 9))
    made = CacheSampler(model, SPECIAL)
    assert made.self_check(ids, mask, 2).value < 1e-4
    assert made(ids, mask, 2, Decoding(max_new_tokens=256 - length)).tokens.shape[1] <= 3


def test_a_model_is_tried_with_the_shortest_and_the_longest_prompt(tmp_path) -> None:
    rows = [{"prompt": "12345", "answer": "1"}] * 40
    rows[17], rows[31] = {"prompt": "1" * 30}, {"prompt": "12"}
    Path("lengths.py").write_text(LENGTHS)
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    task = make_task(TextConfig(name="text", data=str(data), reward="lengths:reward"), 0)
    for split in ("train", "eval"):
        few = task.trial_batch(tokenizer(), None, 4, split)
        assert len(few.prompts) == 4
        assert {"12", "1" * 30} <= {prompt.content for prompt in few.prompts}
