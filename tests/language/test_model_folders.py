"""``klrl kl FOLDER --to FOLDER --prompts FILE``: two models that klrl did not train.

Expected values are sums over the vocabulary in float64, from the logits of plain transformers, one
sequence at a time without padding. The prompts' ids are those of ``apply_chat_template``.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from klrl.base.errors import ConfigError
from klrl.language.data.batch import response_mask
from klrl.train.policy_kl import kl_between
from tests.language.conftest import plain
from tests.runs.commands import said
from tests.transforms import llm_toys as toys

TURNS = [{"role": "user", "content": "hello, how are you today?"}]
WORDS = ("env.data=prompts.jsonl", "collector.max_new_tokens=9")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Llama models with the same tokens."""
    home = tmp_path_factory.mktemp("folders")
    for seed, name in enumerate(("first", "second")):
        toys.network(seed=seed).save_pretrained(home / name)
        toys.tokenizer().save_pretrained(home / name)
    rows = [{"prompt": "sort the digits"}, {"messages": TURNS}, {"prompt": "one, two"}]
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows * 20)))
    return home


@pytest.fixture(autouse=True)
def here(folders: Path) -> None:
    shutil.copytree(folders, ".", dirs_exist_ok=True)


def divergences(p: torch.Tensor, q: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each divergence at every token, [T], by its definition, from log p and log q [T, V]."""
    m = ((p.exp() + q.exp()) / 2).log()
    return {
        "KL(run||other)": (p.exp() * (p - q)).sum(-1),
        "KL(other||run)": (q.exp() * (q - p)).sum(-1),
        "js": ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)) / 2,
        "tv": (p.exp() - q.exp()).abs().sum(-1) / 2,
    }


@pytest.mark.parametrize(("actor", "temperature"), [("first", 1.0), ("second", 0.7)])
def test_two_folders_as_plain_transformers_measures_them(actor, temperature, batches) -> None:
    """Per token and per response; a sum over the sampled tokens' log-ratios estimates the same."""
    words = (*WORDS, f"collector.temperature={temperature}")
    found = kl_between("first", "second", words, on=None if actor == "first" else actor)
    assert (found.episodes, len(batches)) == (60, 1)
    p, q = (plain(folder, batches[0], temperature) for folder in ("first", "second"))
    whose = {"first": "run", "second": "other"}[actor]
    expected = [divergences(*pair) for pair in zip(p, q, strict=True)]
    for name in expected[0]:
        of_responses = [each[name] for each in expected]
        tokens, sums = torch.cat(of_responses), torch.stack([each.sum() for each in of_responses])
        mine = found.distances[f"{name} on {whose}"]
        assert mine.mean == pytest.approx(float(tokens.mean()), abs=1e-5)
        assert mine.worst == pytest.approx(float(tokens.max()), abs=1e-5)
        assert mine.total == pytest.approx(float(sums.mean()), abs=1e-5 * tokens.numel() / 60)
        assert mine.total_error == pytest.approx(float(sums.std() / math.sqrt(60)), abs=1e-4)
    assert found.states == sum(map(len, p))

    mask = response_mask(batches[0])
    drawn = [row[real] for row, real in zip(batches[0]["tokens", "response"], mask, strict=True)]
    ratios = []
    for one, other, ids in zip(p, q, drawn, strict=True):
        pair = (one, other) if actor == "first" else (other, one)
        acting, rest = (each.gather(-1, ids[:, None]).sum() for each in pair)
        ratios.append(acting - rest)
    k1 = torch.stack(ratios)
    exact = found.distances[
        "KL(run||other) on run" if actor == "first" else "KL(other||run) on other"
    ]
    assert exact.total > 1
    error = math.hypot(float(k1.std()) / math.sqrt(60), exact.total_error)
    assert abs(float(k1.mean()) - exact.total) < 4 * error


def test_prompts_are_rendered_by_the_models_own_template(batches) -> None:
    kl_between("first", "second", WORDS, episodes=2)
    tokenizer = AutoTokenizer.from_pretrained("first")
    (batch,) = batches
    text, turns = (
        row["tokens", "full"][row["masks", "all_attention_mask"]][: -int(mask.sum())].tolist()
        for row, mask in zip(batch, response_mask(batch), strict=True)
    )
    rendered = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    assert text == tokenizer("sort the digits")["input_ids"]
    assert turns == rendered


def test_the_command_prints_the_same_numbers(capsys) -> None:
    line = ("kl", "first", "--to", "second", "--prompts", "prompts.jsonl", "--json")
    code, out, err = said(capsys, *line, "collector.max_new_tokens=9")
    assert (code, err) == (0, "")
    assert json.loads(out) == kl_between("first", "second", WORDS).row


def retokenized(folder: str, **kept: object) -> None:
    """Add a token to the second model's tokenizer, or change it as ``kept`` says."""
    tokenizer = AutoTokenizer.from_pretrained("second")
    if not kept:
        tokenizer.add_tokens(["zz"])
        network = AutoModelForCausalLM.from_pretrained("second")
        network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        network.save_pretrained(folder)
    for name, value in kept.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)


def test_other_tokens_or_templates_are_refused_in_one_line() -> None:
    retokenized("other")
    shutil.copytree("second", "chat")
    retokenized("chat", chat_template=toys.TEMPLATE.replace("user", "human") + "{# #}")
    shutil.copytree("second", "bare")
    Path("bare/chat_template.jinja").unlink()
    refusals = (
        ("first", "other", "other: its vocabulary differs from RUN's"),
        ("first", "chat", "chat: its chat template differs from RUN's"),
        ("bare", "first", ": the chat template refuses it (Cannot use chat"),
    )
    for run, to, words in refusals:
        with pytest.raises(ConfigError, match="^[^\n]*$") as refused:
            kl_between(run, to, WORDS)
        assert words in str(refused.value)
    assert (
        kl_between("first", "bare", WORDS, episodes=2).row
        == kl_between("first", "second", WORDS, episodes=2).row
    )
    text = Path("text.jsonl")
    text.write_text('{"prompt": "one two"}')
    assert kl_between("first", "chat", ("env.data=text.jsonl",)).episodes == 1
