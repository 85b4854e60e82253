"""Data sets: JSON lines, and what datasets reads; splits; template arguments."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from klrl.base.errors import ConfigError
from klrl.config import TextConfig
from klrl.language.data.files import _refuse_addresses, hold_out, read_prompts
from klrl.language.data.prompts import Prompt, PromptStream, render
from klrl.language.data.tasks import text
from klrl.language.model.pretrained import load_causal_lm
from klrl.language.run.verify import verify_run
from tests.language.test_refusals import text_job
from tests.runs.commands import samples_of
from tests.transforms import llm_toys as toys

TURNS = [{"role": "user", "content": "sort 3 1"}]
ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(10)]


def test_a_prompt_may_be_a_conversation() -> None:
    Path("data.jsonl").write_text(json.dumps({"prompt": TURNS, "chosen": []}))
    (prompt,) = read_prompts("data.jsonl")
    assert prompt.content == TURNS
    Path("data.jsonl").write_text(json.dumps({"prompt": [{"role": "user"}]}))
    with pytest.raises(ConfigError, match="line 1: turn 1 needs a role and a content"):
        read_prompts("data.jsonl")


def test_a_json_list_is_read_without_any_package() -> None:
    Path("data.json").write_text("\n" + json.dumps(ROWS, indent=1))
    assert [p.row for p in read_prompts("data.json")] == ROWS
    assert read_prompts("data.json")[3].origin == "env.data=data.json row 4"
    for content in ("[]", '["a"]', '[{"answer": 1}]', "[1, 2"):
        Path("data.json").write_text(content)
        with pytest.raises(ConfigError, match=r"env.data=data.json( row 1)?: ") as caught:
            read_prompts("data.json")
        assert "\n" not in str(caught.value)


def test_what_only_datasets_reads_is_refused_without_it(monkeypatch) -> None:
    Path("d.parquet").write_text("PAR1")
    files("folder", "train.jsonl")
    monkeypatch.setattr("klrl.language.data.files.find_spec", lambda name: None)
    for path in ("d.parquet", "folder"):
        with pytest.raises(ConfigError, match=rf"{path}: .* datasets is not .*klrl\[data\]"):
            read_prompts(path)


def parquet(rows: list[dict], file: str) -> None:
    """By pyarrow: ``Dataset.from_list`` of datasets 5.2 fails to pickle a table of pyarrow 26."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), file)


def test_parquet_and_saved_data_sets_are_read_by_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    mixed = [{"prompt": "a", "messages": None, "n": 1}, {"messages": TURNS, "n": 2}]
    Path("folder").mkdir()
    Path("folder/dataset_infos.json").write_text("{}")  # as older data sets of the hub have it
    parquet(mixed, "folder/train-00000-of-00001.parquet")
    parquet([{**row, "n": 9} for row in mixed], "folder/test-00000-of-00001.parquet")
    for path in ("folder", "folder/train-00000-of-00001.parquet"):
        first, second = read_prompts(path)
        assert (first.content, first.row["n"]) == ("a", 1)
        assert (second.content, second.row["n"]) == (TURNS, 2)
    assert [p.row["n"] for p in read_prompts("folder", split="test")] == [9, 9]
    parquet(ROWS[:6], "six.parquet")
    parquet(ROWS, "ten.parquet")
    named = {"train": "six.parquet", "test": "ten.parquet"}
    both = {split: datasets.Dataset.from_parquet(file) for split, file in named.items()}
    datasets.DatasetDict(both).save_to_disk("saved")
    assert [p.row for p in read_prompts("saved", split="train")] == ROWS[:6]
    with pytest.raises(ConfigError, match="saved has no such split; choose one of test, train"):
        read_prompts("saved", split="dev")
    Path("bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match="env.data=bad.parquet: datasets cannot read it"):
        read_prompts("bad.parquet")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"eval_split": "test"}, "env.eval_split=test: env.data=data.jsonl has no splits; "),
        ({"split": "dev"}, "env.split=dev: env.data=data.jsonl has no splits; "),
        (
            {"data": "named", "split": "test", "eval_split": "dev"},
            "env.eval_split=dev: env.data=named has no such split; choose one of test",
        ),
        ({"data": "named", "split": "test", "eval_data": "named"}, None),
        ({"eval_data": "folder"}, None),
        ({"split": "test", "data": "named", "eval_data": "data.jsonl"}, None),
    ],
    ids=str,
)
def test_a_split_that_data_do_not_have_is_refused(settings: dict, told: str | None) -> None:
    """Lest evaluations answer training prompts, and nobody knows."""
    if {"named", "folder"} & set(settings.values()):
        pytest.importorskip("datasets")
    for file in ("data.jsonl", "folder/all.jsonl", "named/test.jsonl"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text(json.dumps(ROWS[0]) + "\n")
    config = TextConfig(**{"data": "data.jsonl", "reward": "exact", **settings})
    if told is None:
        assert text(config, seed=0).evaluations == 1
        return
    with pytest.raises(ConfigError) as caught:
        text(config, seed=0)
    assert str(caught.value).startswith(told)


def files(folder: str, *names: str) -> None:
    """A file of one prompt each, which is its name."""
    for name in names:
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"prompt": name}) + "\n")


@pytest.mark.parametrize(
    ("names", "split", "found"),
    [
        (["data/train_sft-00000-of-00002.jsonl", "data/train_sft-00001-of-00002.jsonl",
          "data/test_sft-00000-of-00001.jsonl"], "train_sft", [0, 1]),
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl"], "test", [1]),
        (["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"], "train", [0, 1]),
        (["a.jsonl", "b.jsonl"], "train", [0, 1]),
    ],
    ids=str,
)  # fmt: skip
def test_datasets_finds_the_split_of_files(names, split, found) -> None:
    pytest.importorskip("datasets")
    files("folder", *names)
    contents = [p.content for p in read_prompts("folder", split=split)]
    assert contents == [names[index] for index in found]


CARD = "---\nconfigs:\n- config_name: default\n  data_files: DATA\n---\nSee http://localhost\n"


def test_a_folder_whose_data_are_elsewhere_is_refused() -> None:
    pytest.importorskip("datasets")
    files("folder", "a.jsonl", "b.jsonl")
    Path("folder/README.md").write_text(CARD.replace("DATA", "b.jsonl"))
    assert [p.content for p in read_prompts("folder")] == ["b.jsonl"]
    for address in ("http://localhost/a.jsonl", "\n  - hf://datasets/a/b/a.jsonl"):
        Path("folder/README.md").write_text(CARD.replace("DATA", address))
        with pytest.raises(ConfigError, match=r"env.data=folder: its README.md names data else"):
            read_prompts("folder")


@pytest.mark.parametrize(
    "described",
    [
        'configs: [{config_name: default, data_files: [{split: train, path: "http://a/b"}]}]',
        'configs:\n- {config_name: default, data_files: "http://a/b"}',
        '"data_files": "http://a/b"',
        'data_files: "http\\x3a//a/b"',
        "a: &a [1]\nconfigs: *a",
        "configs: [",
    ],
)
def test_a_description_cannot_hide_an_address(described: str) -> None:
    Path("README.md").write_text(f"---\n{described}\n---\n")
    with pytest.raises(ConfigError, match=r"its README.md (names data elsewhere|cannot be read)"):
        _refuse_addresses(Path(), "env.data=.")


def test_a_share_is_held_out_once_and_for_every_seed() -> None:
    prompts = [Prompt(str(i)) for i in range(20)]
    train, held = hold_out(prompts, 0.25)
    assert (len(train), len(held)) == (15, 5)
    assert sorted(int(p.content) for p in [*train, *held]) == list(range(20))
    assert [int(p.content) for p in held] != list(range(15, 20))  # a file is often sorted
    assert hold_out(prompts, 0.25) == (train, held)
    train, held = hold_out(prompts[:2], 0.01)
    assert (len(train), len(held)) == (1, 1)
    with pytest.raises(ConfigError, match="env.eval_share=0.5: a single prompt cannot be split"):
        hold_out(prompts[:1], 0.5)


def test_rows_of_one_prompt_are_held_out_together() -> None:
    """The split of distinct prompts is that of a file without repeats."""
    turns = [[{"role": "user", "content": str(i)}] for i in range(10)]
    once, held_once = hold_out([Prompt(each) for each in turns], 0.2)
    prompts = [Prompt(each, {"answer": j}) for j in range(4) for each in turns]
    train, held = hold_out(prompts, 0.2)
    assert [p.content for p in train] == [p.content for p in once] * 4
    assert [p.content for p in held] == [p.content for p in held_once] * 4
    with pytest.raises(ConfigError, match="a single prompt cannot be split"):
        hold_out(prompts[::10], 0.5)


def started(capsys, model: str, rows: list, *words: str) -> tuple[int, str, str]:
    from klrl.__main__ import main

    with pytest.raises(SystemExit) as stop:
        main([*text_job(model, [json.dumps(row) for row in rows]), *words])
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


DIGITS = [{"prompt": f"user{i}", "answer": str(i)} for i in range(10)]


@pytest.mark.integration
def test_evaluation_gets_the_share_and_training_never_does(capsys, model: str) -> None:
    Path("share_reward.py").write_text(
        "seen = []\n"
        "def score(prompts, responses, rows):\n"
        "    seen.append(set(prompts))\n"
        "    return [0.0] * len(rows)\n"
    )
    words = ("env.reward=share_reward:score", "env.eval_share=0.3")
    code, out, err = started(capsys, model, DIGITS, *words)
    assert (code, err) == (0, "")
    assert "env.eval_share=0.3: 3 of 10 prompts are held out for evaluation" in out
    seen = sys.modules["share_reward"].seen[1:]  # without the trial before the run
    trained = set().union(*(prompts for prompts in seen if len(prompts) == 4))
    asked = set().union(*(prompts for prompts in seen if len(prompts) < 4))
    assert trained
    assert asked
    assert not trained & asked


@pytest.mark.integration
def test_samples_have_role_and_content_of_each_turn(capsys, model: str) -> None:
    """Other fields may have values that JSON lacks: NaN, or a date of parquet."""
    turn = {"role": "user", "content": "21"}
    code, _, err = started(capsys, model, [{"messages": [{**turn, "toxicity": math.nan}]}])
    assert (code, err) == (0, "")
    assert all(sample["prompt"] == [turn] for sample in samples_of(Path("run")))
    assert verify_run("run").problems == []


THINKS = toys.TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}"


def test_template_arguments_reach_the_chat_template() -> None:
    tokenizer = toys.tokenizer(template=THINKS)
    asked = {"enable_thinking": False}
    stream = PromptStream(lambda i: Prompt(TURNS), tokenizer, None, asked)
    plain = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(stream.take(1).ids[0]) == plain + "no"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["env.template_kwargs={deep:1}"], "env.template_kwargs.deep: the chat template does not"),
        (["env.template_kwargs={user:1}"], "env.template_kwargs.user: the chat template does not"),
        (["env.template_kwargs={messages:1}"], "env.template_kwargs: no prompt is a conversation"),
    ],
    ids=" ".join,
)
def test_settings_of_data_that_fit_nothing_are_refused(capsys, model, words, told) -> None:
    rows = DIGITS if "messages" in words[0] else [{"messages": TURNS}]
    code, _, err = started(capsys, model, rows, *words)
    assert (code, len(err.splitlines())) == (2, 1), err
    assert told in err


TRIMS = toys.TEMPLATE.replace(
    "{{ m['content'] }}<|im_end|>{% end", "{{ m['content'] | trim }}<|im_end|>{% end"
)
NEEDS = "{% if lang is not defined %}{{ raise_exception('lang is needed') }}{% endif %}" + TRIMS
ONCE = "{% if messages | length > 1 %}{{ raise_exception('no second turn') }}{% endif %}" + TRIMS
#: The mark includes the newline after the turn.
NEWLINE = TRIMS.replace("{% endgeneration %}\n", "\n{% endgeneration %}")
CLOCK = (
    "{% if date is not defined %}{% set date = strftime_now('%y%m%d') %}{% endif %}{{ date }}"
    + TRIMS
)


def with_template(model: str, template: str) -> str:
    shutil.copytree(model, "with_template")
    Path("with_template/chat_template.jinja").write_text(template)
    return "with_template"


def test_the_clock_of_a_chat_template_says_one_day(model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(with_template(model, CLOCK))
    turns = [{"role": "user", "content": "21"}]
    for template, day in (({}, "240726"), ({"date": "21"}, "21")):
        text = tokenizer.decode(next(render(tokenizer, [(turns, {})], template)))
        assert "".join(text.split()).startswith(day + "<|im_start|>"), text


def test_of_several_chat_templates_the_default_is_used(model: str) -> None:
    folder = Path(with_template(model, TRIMS))
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    both = [{"name": name, "template": of} for name, of in (("default", CLOCK), ("rag", TRIMS))]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": both}))
    assert isinstance(AutoTokenizer.from_pretrained(folder).chat_template, dict)
    assert load_causal_lm(folder, chat=True).tokenizer.chat_template == CLOCK
    file.write_text(file.read_text().replace('"default"', '"other"'))
    with pytest.raises(ConfigError, match="has no chat template"):
        load_causal_lm(folder, chat=True)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("template", "words", "told"),
    [
        (TRIMS, [], None),
        (NEEDS, ["env.template_kwargs.lang=en"], None),
        (NEEDS, [], "env.data=data.jsonl line 1: the chat template refuses it (lang is needed)"),
        (CLOCK, [], None),
        (ONCE, [], None),
        (NEWLINE, [], None),
    ],
    ids=["trims", "argument", "no argument", "clock", "no answer", "newline"],
)
def test_a_template_that_renders_the_prompts_is_accepted(
    capsys, model: str, template: str, words: list[str], told: str | None
) -> None:
    """Also one that renders no answers, or marks other tokens than klrl: masks use positions."""
    rows = [{"messages": [{"role": "user", "content": "21"}], "answer": " 12\n"}]
    code, _, err = started(capsys, with_template(model, template), rows, *words)
    if told is None:
        assert (code, err) == (0, "")
        return
    assert (code, len(err.splitlines())) == (2, 1), err
    assert told in err
    assert not Path("run").exists()
