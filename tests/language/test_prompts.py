"""Prompts: JSON lines, rendering against plain transformers, padding, epochs, groups."""

import json
import os
import signal
import sys
import time
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from klrl.base.errors import ConfigError
from klrl.language.data import prompts as prompts_module
from klrl.language.data import templates
from klrl.language.data.files import read_prompts
from klrl.language.data.prompts import (
    Prompt,
    PromptStream,
    ShuffledEpochs,
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


def encode(prompt: Prompt, *how) -> list[int]:
    """The ids of one prompt."""
    return prompts_module.encode([prompt], *how)[0]


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


def test_a_line_that_is_no_utf8_is_told_by_its_number() -> None:
    Path("data.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match="line 2: not JSON"):
        read_json_file("data.jsonl")


def test_no_file_and_no_prompt_are_refused() -> None:
    with pytest.raises(ConfigError, match="env.data=none.jsonl: No such file"):
        read_json_file("none.jsonl")
    with pytest.raises(ConfigError, match="env.data=data.jsonl: has no prompts"):
        read_json_file(write("", "  "))


@pytest.mark.timeout(60)
def test_a_pipe_a_device_and_a_file_without_end_are_refused() -> None:
    Path("saved").mkdir()
    for path in ("data.jsonl", "data.parquet", "saved/state.json", "saved/dataset_info.json"):
        os.mkfifo(path)
    Path("zero.jsonl").symlink_to("/dev/zero")
    Path("saved/dataset_dict.json").write_text("{}")
    saved = ["saved"] * (find_spec("datasets") is not None)
    for path in ("data.jsonl", "data.parquet", "zero.jsonl", *saved):
        with pytest.raises(ConfigError, match=f"env.data={path}: .*not a regular file"):
            read_prompts(path)
    Path("large.jsonl").touch()
    os.truncate("large.jsonl", 30 * 10**9)
    with pytest.raises(ConfigError, match="env.data=large.jsonl: it has 30,000,000,000 bytes"):
        read_prompts("large.jsonl")


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


NS = (
    "{% set ns = namespace(x='a') %}"
    "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for i in range(10**12) %}x{% endfor %}", "Range too big"),
        ("{{ ([[1]] * 1000000)|sum(start=[]) }}", "took more than 3 s"),
        ("{{ 'a' * 1000000000 }}", "MemoryError"),
        ("{{ 'a'|center(10000000000) }}", "MemoryError"),
        ("{{ '%9999999999d' % 1 }}", "MemoryError"),
        ("{% set x = [0] * 1000000000 %}", "MemoryError"),
        (NS, "MemoryError"),
        (LOOP.replace("BODY", ""), "took more than 3 s"),
        ("{% for i in range(99999) %}0123456789a{% endfor %}", "it renders 1,099,989 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ""),
        ("{{ " + "(" * 50_000 + " }}", ""),
        ("{{ messages[0].nope.nope }}", "no attribute 'nope'"),
        ("{{ raise_exception('a\\nb') }}", "(a)"),
        ("{{ " + "9" * 10_000 + " }}", ""),
        ("{{ 1 // 0 }}", ""),
        ("{% if %}", ""),
    ],
    ids=range(16),
)
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
def test_a_template_that_fails_hangs_or_grows_is_refused_in_one_line(
    template: str, told: str, monkeypatch
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 3.0)
    tokenizer = toys.tokenizer.__wrapped__(template=template)
    with pytest.raises(ConfigError, match="^line 4: the chat template refuses it ") as caught:
        encode(Prompt([USER], origin="line 4"), tokenizer)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


FAILS_AT_B = "{% if messages[0].content == 'b' %}{{ FAULT }}{% endif %}" + toys.TEMPLATE


@pytest.mark.parametrize(
    ("fault", "told"),
    [("([[messages]] * 1000000)|sum(start=[])", "took more than 1 s"), ("1 // 0", "by zero")],
)
def test_a_template_that_hangs_or_fails_in_a_batch_is_told_with_its_line(
    fault: str, told: str, monkeypatch
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 1.0)
    tokenizer = toys.tokenizer.__wrapped__(template=FAILS_AT_B.replace("FAULT", fault))
    bad = [Prompt([{**USER, "content": c}], origin=f"line {i}") for i, c in enumerate("aab" * 2, 1)]
    with pytest.raises(ConfigError, match=f"^line 3: the chat template refuses it .*{told}"):
        prompts_module.encode(bad, tokenizer)
    assert encode(bad[0], tokenizer) == encode(bad[0], toys.tokenizer())


def test_conversations_of_several_batches_keep_their_order(monkeypatch) -> None:
    monkeypatch.setattr(templates, "BATCH", 3)
    texts = [f"{i} " * (i % 3) for i in range(8)]
    both = [Prompt(each) for t in texts for each in (f"{t}.", [{**USER, "content": t}])]
    tokenizer = toys.tokenizer()
    expected = [encode(prompt, tokenizer) for prompt in both]
    for ids, prompt in zip(expected, both, strict=True):
        if not isinstance(prompt.content, str):
            how = {"add_generation_prompt": True}
            assert ids == tokenizer.apply_chat_template(prompt.content, **how)["input_ids"]
    assert prompts_module.encode(both, tokenizer) == expected


def test_an_idle_child_that_was_killed_is_replaced() -> None:
    expected = encode(Prompt(TURNS), toys.tokenizer())
    killed = templates._idle[os.getpid()]
    os.kill(killed.pid, signal.SIGKILL)
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    assert encode(Prompt(TURNS), toys.tokenizer()) == expected


def test_a_tokenizer_that_panics_or_hangs_is_refused_in_one_line(monkeypatch) -> None:
    tokenizer = toys.tokenizer.__wrapped__()
    tokenizer._tokenizer.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(ConfigError, match="^line 4: the tokenizer refuses it .*retry-limit"):
        encode(Prompt("a" * 200 + "!", origin="line 4"), tokenizer)
    monkeypatch.setattr(prompts_module.guarded, "__defaults__", (0.3,))
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, **__: time.sleep(60))
    with pytest.raises(ConfigError, match="line 4: the tokenizer refuses it .took more than 0.3 s"):
        encode(Prompt("hello", origin="line 4"), tokenizer)


def test_tools_of_a_row_reach_the_chat_template_as_transformers_renders_them() -> None:
    template = toys.TEMPLATE + "{% if tools %}{{ tools | tojson }}{% endif %}"
    tokenizer = toys.tokenizer(template=template)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    expected = tokenizer.apply_chat_template(TURNS, tools=tools, add_generation_prompt=True)
    for given in (tools, json.dumps(tools)):
        prompt = parse_row({"messages": TURNS, "tools": given}, "row 1")
        assert encode(prompt, tokenizer) == expected["input_ids"]
    plain = encode(Prompt(TURNS), tokenizer)
    for none in (None, [], "[]"):
        assert encode(parse_row({"messages": TURNS, "tools": none}, "row 1"), tokenizer) == plain


@pytest.mark.parametrize("tools", [3, {"name": "add"}, ["add"], "add", '{"name": "add"}'])
def test_tools_that_are_no_list_of_schemas_are_refused(tools: object) -> None:
    with pytest.raises(ConfigError, match="row 1: tools is .*; give a list of JSON schemas"):
        parse_row({"messages": TURNS, "tools": tools}, "row 1")
    assert parse_row({"prompt": "text", "tools": tools}, "row 1").row["tools"] == tools


CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
CALLS = toys.TEMPLATE.replace("m['content']", "(m['content'] or m['tool_calls'] | tojson)")


def test_a_turn_may_have_tool_calls_in_place_of_content() -> None:
    tokenizer = toys.tokenizer(template=CALLS)
    result = {"role": "tool", "content": "3"}
    for call in (CALL, {**CALL, "content": None}):
        turns = [USER, call, result]
        prompt = parse_row({"messages": turns}, "row 1")
        expected = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        assert encode(prompt, tokenizer) == expected
        assert [turn["content"] for turn in prompt.recorded] == ["a", "", "3"]
        last = parse_row({"messages": turns[:2]}, "row 1")
        assert (last.content, last.turn, last.row["answer"]) == ([USER], None, CALL["tool_calls"])


def test_rendered_text_gets_no_second_bos() -> None:
    tokenizer = with_special_tokens()
    tokenizer.bos_token = "<|im_start|>"
    start = tokenizer.bos_token_id
    hello = tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert encode(Prompt("hello"), tokenizer) == [start, *hello]
    assert encode(Prompt("<|im_start|>hello"), tokenizer) == [start, *hello]
    assert encode(Prompt("<|im_start|>" * 2 + "hello"), tokenizer) == [start, start, *hello]
    plain = toys.tokenizer.__wrapped__()  # adds none
    plain.bos_token = "<|im_start|>"
    assert encode(Prompt("<|im_start|>" * 2 + "hello"), plain) == [start, start, *hello]


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


def test_the_prompt_may_have_a_field_of_another_name() -> None:
    row = {"question": "2 + 2?", "messages": "not read", "answer": "4"}
    found = prompts_module.parse_row(row, "line 1", "question")
    assert (found.content, found.row["answer"]) == ("2 + 2?", "4")
    chat = prompts_module.parse_row({"question": [USER]}, "line 1", "question")
    assert chat.content == [USER]
    with pytest.raises(ConfigError, match=r"^line 3: has no question, which env\.prompt_key names"):
        prompts_module.parse_row({"prompt": "x"}, "line 3", "question")
