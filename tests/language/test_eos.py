"""Models that end a response with any of several tokens, against plain transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from klrl.base.errors import ConfigError
from klrl.language.data.batch import make_batch
from klrl.language.data.rewards import response_texts
from klrl.language.model.pretrained import load_causal_lm
from klrl.language.run import preflight
from klrl.language.run.load import Policy
from klrl.language.run.sampler import CacheSampler, Decoding
from tests.language.toys import prompts
from tests.transforms import llm_toys as toys

LONGEST = 8


def save(listed: object, file: str = "generation_config.json", family: str = "llama") -> Path:
    """A folder whose model tells ``listed`` as its eos_token_id."""
    toys.network(family).save_pretrained("model")
    toys.tokenizer().save_pretrained("model")
    if file == "config.json":  # transformers then makes the generation config from it
        Path("model/generation_config.json").unlink()
    path = Path("model") / file
    told = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**told, "eos_token_id": listed}))
    return Path("model")


def greedy(model, prompt, mask, **words) -> list[list[int]]:
    """Plain transformers, a prompt at a time without padding: what follows each."""
    found = []
    for ids, kept in zip(prompt, mask, strict=True):
        row = ids[kept][None]
        whole = model.generate(
            row,
            attention_mask=torch.ones_like(row),
            do_sample=False,
            max_new_tokens=LONGEST,
            pad_token_id=0,
            **words,
        )
        found.append(whole[0, row.shape[1] :].tolist())
    return found


@pytest.mark.parametrize("kind", ["shared", "copied"])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_responses_end_where_plain_transformers_ends_them(kind, file, family) -> None:
    prompt, mask = prompts(pads=2)
    free = greedy(toys.network(family), prompt, mask, eos_token_id=None)
    assert [len(row) for row in free] == [LONGEST] * 3
    eos = toys.tokenizer().eos_token_id
    folder = save([eos, free[0][4], free[1][2]], file, family)
    plain = greedy(AutoModelForCausalLM.from_pretrained(folder), prompt, mask)
    assert len(plain[0]) <= 5
    assert len(plain[1]) <= 3

    loaded = load_causal_lm(folder, chat=True, say=lambda _: None)
    assert set(loaded.eos) == {eos, free[0][4], free[1][2]}
    special = Policy(loaded).special
    sampler = CacheSampler(loaded.model, special, way=kind)
    found = sampler(prompt, mask, 1, Decoding(LONGEST, greedy=True))
    rows = [row[kept].tolist() for row, kept in zip(found.tokens, found.mask, strict=True)]
    assert rows == plain
    assert found.truncated.tolist() == [row[-1] not in loaded.eos for row in plain]
    assert preflight.endings(make_batch(prompt, mask, found, 1), special).ok
    bare = [row[:-1] if row[-1] in loaded.eos else row for row in plain]
    texts = response_texts(loaded.tokenizer, rows, special.eos)
    assert texts == loaded.tokenizer.batch_decode(bare)


def test_several_are_said_and_pad_among_them_is_known_by_position() -> None:
    said: list[str] = []
    loaded = load_causal_lm(save([2, 1, 0]), chat=True, say=said.append)
    assert loaded.eos == (2, 1, 0)
    assert loaded.tokenizer.pad_token_id in loaded.eos
    assert said == [
        "actor.model=model: a response ends with any of <|im_end|>, <|im_start|>, <pad>, as its "
        "generation config says"
    ]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_a_single_special_token_ends_a_response_too(file) -> None:
    """As in Phi-4: its turns end with <|im_end|>, while its tokenizer's EOS is <|endoftext|>."""
    prompt, mask = prompts(pads=2)
    folder = save(1, file)
    model = AutoModelForCausalLM.from_pretrained(folder)
    head = model.get_output_embeddings().weight
    with torch.no_grad():  # make token 1 the likeliest where the third token was
        head[1] = 1.01 * head[greedy(model, prompt, mask)[0][2]]
    model.save_pretrained(folder)
    plain = greedy(model, prompt, mask)
    assert len(plain[0]) <= 3
    assert plain[0][-1] == 1

    loaded = load_causal_lm(folder, chat=True, say=lambda _: None)
    assert loaded.eos == (toys.tokenizer().eos_token_id, 1)
    sampler = CacheSampler(loaded.model, Policy(loaded).special)
    found = sampler(prompt, mask, 1, Decoding(LONGEST, greedy=True))
    assert found.tokens[0][found.mask[0]].tolist() == plain[0]


@pytest.mark.parametrize("told", [7, 100_000, [], None])
def test_a_single_id_of_an_ordinary_token_leaves_the_tokenizers_alone(told) -> None:
    """Classes of transformers have one by default, whatever the tokenizer."""
    said: list[str] = []
    loaded = load_causal_lm(save(told), chat=True, say=said.append)
    assert (loaded.eos, said) == ((toys.tokenizer().eos_token_id,), [])


@pytest.mark.parametrize("wrong", [-1, 100_000, "<|im_end|>"])
def test_a_list_that_names_no_token_is_refused_in_one_line(wrong) -> None:
    with pytest.raises(ConfigError) as told:
        load_causal_lm(save([2, wrong]), chat=True)
    text = str(told.value)
    assert text == (
        f"actor.model=model: eos_token_id={[2, wrong]} of its generation config names {wrong}, "
        "which is not a token id of its tokenizer; fix its generation_config.json"
    )
