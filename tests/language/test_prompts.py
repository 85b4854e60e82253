"""Prompts: JSON lines, rendering against plain transformers, padding, epochs, groups."""

import json
from datetime import date
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from klrl.base.errors import ConfigError
from klrl.language.data.prompts import (
    Prompt,
    PromptStream,
    ShuffledEpochs,
    encode,
    left_pad,
    parse_row,
    read_json_file,
)
from tests.transforms import llm_toys as toys

TURNS = [
    {"role": "system", "content": "sort"},
    {"role": "user", "content": "three one"},
    {"role": "assistant", "content": "one three"},
    {"role": "user", "content": "two one"},
]


def write(*lines: object) -> Path:
    path = Path("data.jsonl")
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def test_plain_prompts_conversations_and_their_other_fields_are_read() -> None:
    path = write({"prompt": "hello", "answer": 3}, "", {"messages": TURNS})
    first, second = read_json_file(path)
    assert first.content == "hello"
    assert first.row["answer"] == 3
    assert second.content == TURNS
    assert second.origin == "env.data=data.jsonl line 3"


def test_a_byte_order_mark_and_windows_line_ends_are_no_error() -> None:
    Path("data.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [p.content for p in read_json_file("data.jsonl")] == ["a", "b"]


GOOD = {"prompt": "a"}
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "line, told",
    [
        ('{"prompt": "a"', "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "line 2: not JSON"),
        (r'{"prompt": "\ud800"}', "line 2: not JSON .*surrogates not allowed"),
        (r'{"prompt": "a", "answer": ["\uDC00"]}', "line 2: not JSON .*surrogates not allowed"),
        ("[1]", "line 2: is a list; write an object"),
        ({"text": "a"}, "line 2: has only text"),
        ({"prompt": "a", "messages": [USER]}, "line 2: has both"),
        ({"prompt": None}, "line 2: prompt is null"),
        ({"prompt": 3}, "line 2: prompt is a number"),
        ({"prompt": []}, "line 2: prompt is empty"),
        ({"messages": "a"}, "line 2: messages is a text"),
        ({"messages": [USER, {"role": "user"}]}, "line 2: turn 2 needs a role and a content"),
        ({"messages": [USER, "a"]}, "line 2: turn 2 needs"),
        ({"messages": [{"role": "user", "content": 3}]}, "line 2: turn 1 needs"),
        ({"messages": TURNS[2:3]}, "line 2: the only turn is the assistant's"),
    ],
)
def test_a_bad_line_is_told_by_its_number(line: object, told: str) -> None:
    with pytest.raises(ConfigError, match=f"env.data=data.jsonl {told}") as caught:
        read_json_file(write(GOOD, line))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": date(2026, 1, 1)}, "prompt is a date"),
        ({"prompt": b"a"}, "prompt is a bytes"),
        ({"messages": [{"role": "user", "at": date(2026, 1, 1)}]}, "turn 1 needs a role"),
    ],
)
def test_a_bad_row_of_parquet_is_told_by_its_type(row: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=f"row 1: {told}"):
        parse_row(row, "row 1")


def test_a_path_with_braces_is_told_as_it_is() -> None:
    refusing = toys.tokenizer(template="{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match=r"^\{x\} line 1: the chat template refuses it \(no\); "):
        encode(Prompt(TURNS[:2], origin="{x} line 1"), refusing)


def test_a_line_that_is_no_utf8_is_told_by_its_number() -> None:
    Path("data.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match="line 2: not JSON"):
        read_json_file("data.jsonl")


def test_no_file_and_no_prompt_are_refused() -> None:
    with pytest.raises(ConfigError, match="env.data=none.jsonl: No such file"):
        read_json_file("none.jsonl")
    with pytest.raises(ConfigError, match="env.data=data.jsonl: has no prompts"):
        read_json_file(write("", "  "))


def test_a_conversation_is_rendered_as_transformers_does_and_ends_ready_for_an_answer() -> None:
    tokenizer = toys.tokenizer()
    text = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encode(Prompt(TURNS), tokenizer) == expected


def with_special_tokens():
    """Begins a text with <|im_start|> and ends it with EOS, as some tokenizers do."""
    tokenizer = toys.tokenizer.__wrapped__()
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[
            (name, tokenizer.convert_tokens_to_ids(name)) for name in ("<|im_start|>", "<|im_end|>")
        ],
    )
    return tokenizer


def test_a_plain_prompt_keeps_bos_and_loses_the_eos_that_no_response_could_follow() -> None:
    tokenizer = with_special_tokens()
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    bare = tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert tokenizer("hello")["input_ids"] == [start, *bare, end]
    assert encode(Prompt("hello"), tokenizer) == [start, *bare]


def test_an_eos_that_the_user_wrote_stays() -> None:
    tokenizer = toys.tokenizer()
    assert encode(Prompt("hello<|im_end|>"), tokenizer)[-1] == tokenizer.eos_token_id


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="line 4: the prompt has no tokens"):
        encode(Prompt("", origin="line 4"), toys.tokenizer())


def test_a_template_that_refuses_a_conversation_is_told_with_its_line() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="line 4: the chat template refuses it.*alternate"):
        encode(Prompt([USER], origin="line 4"), toys.tokenizer(template=template))


def test_a_prompt_beyond_the_context_tells_line_length_and_limit() -> None:
    prompts = read_json_file(write({"prompt": "a b"}, {"prompt": "x" * 9}))
    tokenizer = toys.tokenizer()
    lengths = [len(tokenizer(p.content)["input_ids"]) for p in prompts]
    for limit in (9, None):
        assert len(encode(prompts[1], tokenizer, limit)) == lengths[1] == 9
    with pytest.raises(ConfigError, match="line 2: 9 tokens.*leaves 8"):
        encode(prompts[1], tokenizer, 8)
    stream = PromptStream(ShuffledEpochs(prompts, 0), tokenizer, 8)
    with pytest.raises(ConfigError, match="line 2: 9 tokens"):
        stream.take(2)


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = left_pad([[5, 6, 7], [8]], pad=9)
    assert ids.tolist() == [[5, 6, 7], [9, 9, 8]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    assert ids.dtype == torch.int64
    assert mask.dtype == torch.bool


def test_padding_is_by_position_where_pad_is_eos() -> None:
    tokenizer = toys.tokenizer(pad_is_eos=True)
    prompts = [Prompt(TURNS), Prompt([USER])]
    batch = PromptStream(prompts.__getitem__, tokenizer, None).take(2)
    for row, mask, prompt in zip(batch.ids, batch.mask, prompts, strict=True):
        assert row[mask].tolist() == encode(prompt, tokenizer)
        assert tokenizer.eos_token_id in row[mask]


DATA = [Prompt(str(index)) for index in range(7)]


def numbers(prompts: list[Prompt]) -> list[int]:
    return [int(prompt.content) for prompt in prompts]


def test_every_epoch_is_the_whole_data_in_an_order_of_its_own() -> None:
    at = ShuffledEpochs(DATA, seed=3)
    epochs = [numbers([at(7 * epoch + i) for i in range(7)]) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != numbers([ShuffledEpochs(DATA, seed=4)(i) for i in range(7)])


def test_a_prompt_does_not_depend_on_the_order_of_asking() -> None:
    forward, backward = ShuffledEpochs(DATA, seed=3), ShuffledEpochs(DATA, seed=3)
    there = [forward(i).content for i in range(20)]
    back = [backward(i).content for i in reversed(range(20))]
    assert there == back[::-1]


def test_a_stream_resumes_from_its_counter_in_the_middle_of_an_epoch() -> None:
    def stream() -> PromptStream:
        return PromptStream(ShuffledEpochs(DATA, seed=3), toys.tokenizer(), None)

    whole, first, second = stream(), stream(), stream()
    expected = [numbers(whole.take(4).prompts) for _ in range(5)]
    found = [numbers(first.take(4).prompts) for _ in range(2)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [numbers(second.take(4).prompts) for _ in range(3)]
    assert found == expected
