"""What a language job refuses: settings, data sets, tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from klrl.__main__ import compose, main
from klrl.base.errors import ConfigError
from klrl.config.checks import to_config
from tests.runs.commands import rows_of

pytestmark = pytest.mark.integration


WRONG = [
    (["actor=mlp"], "actor=mlp: env=sort_digits is a language task; choose actor=causal_lm"),
    (
        ["collector=vector"],
        "experiment=sort_digits: sets collector.prompts, which collector=vector does not have",
    ),
    (["env=pendulum"], "env=pendulum: sets advantage.gamma, which experiment=sort_digits's"),
    (["collector.group_size=1"], "collector.group_size=1: advantage=group compares"),
    *(
        (["advantage.baseline=normalized_shaped", *words], line)
        for words, line in (
            (["kl=none"], "and kl=none has no KL; choose advantage.baseline=normalized"),
            (["kl.placement=loss"], "and kl.placement=loss charges it in the loss, undivided"),
            (["kl.placement=split", "kl.estimator=exact"], "and kl.placement=split charges it"),
        )
    ),
    (["learner.minibatches=3"], "learner.minibatches=3: does not divide collector.prompts=4"),
    (["kl.apply=step"], "kl.apply=step: the KL of a response is known when it is complete"),
    (["reference=adapter_off"], "actor.lora.r=0 has no adapters"),
    (["actor.lora.r=2", "actor.lora.dropout=0.1"], "actor.lora.dropout=0.1: the updated policy"),
    (["actor.lora.alpha=8"], "actor.lora.alpha: nothing reads it here"),
    (["actor.lora.r=2", "actor.lora.target_modules=[nope]"], "actor.lora.target_modules=['nope']"),
    (["loss.reduction=sum"], "loss.reduction=sum: control only"),
    (
        ["controller=held", "controller.unit=step"],
        "controller.unit=step: control only; choose token (mean over tokens) or sequence (sum over",
    ),
    (
        ["loss=rloo"],
        "loss=rloo: its advantage is advantage=rloo, and here it is advantage=group with "
        "baseline=normalized; give advantage=rloo, or name another",
    ),
    (["loss.unit=step", "loss.target_kl=1"], "loss.unit=step: control only; choose token"),
    (["loss.unit=sequence"], "loss.unit: nothing reads it here: loss.target_kl=null is no cap"),
    (["loss.critic_coeff=1"], "loss.critic_coeff: nothing reads it here: advantage=group"),
    (["learner.compile=jit"], "learner.compile=jit: a language model's update runs eagerly"),
    (["kl.estimator=k3"], "kl.estimator=k3: in the reward only k1"),
    (
        ["env.reward=best"],
        "env.reward=best: choose exact, proxy, followed or",
    ),
    (["env.reward=nowhere:f"], "env.reward=nowhere:f: importing nowhere fails"),
    (["env.shortest=9"], "env.longest=8: give env.shortest=9 .. 64"),
    (["env.name=text"], "env.name: set by the choice"),
    (["collector.max_new_tokens=64"], "collector.max_new_tokens=64: leaves no room for a prompt"),
    (["collector.max_new_tokens=52"], "leaves 12; shorten the prompt or the response"),
    (["actor.model=nowhere/at/all"], "actor.model=nowhere/at/all: no such folder"),
    (["actor.init=nowhere"], "actor.init=nowhere: no such folder"),
    (
        ["actor.model="],
        "actor.model: has no value; give a folder written by save_pretrained, a hub",
    ),
    (["collector.temperature=0"], "collector.temperature=0.0: out of range"),
    (["collector.temprature=1"], "did you mean collector.temperature?"),
]


@pytest.mark.parametrize(
    "words",
    [
        *(["loss=grpo"], ["loss=dapo"], ["loss=rloo", "advantage=grpo"]),
        ["loss=rloo", "advantage.baseline=mean"],
    ],
    ids=" ".join,
)
def test_an_objective_by_name_may_have_an_advantage_by_name(job, words: list[str]) -> None:
    assert job(*words).loss.reduction in ("response", "token", "sequence")


@pytest.mark.parametrize(("words", "line"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_what_cannot_run_is_refused_in_one_line(exits, words: list[str], line: str) -> None:
    code, _, err = exits(*words)
    assert (code, len(err.splitlines())) == (2, 1)
    assert line in err
    assert not Path("run").exists()


def text_job(model: str, rows: list[str], reward: str = "mine:score") -> list[str]:
    Path("data.jsonl").write_text("\n".join(rows), encoding="utf-8")
    Path("mine.py").write_text(
        "def score(prompts, responses, rows):\n    return [0.0] * len(rows)\n"
    )
    return [
        *("experiment=text", "frames=32", "collector.prompts=4", "collector.group_size=4"),
        *("collector.max_new_tokens=6", "logger=none", "eval.every=2", "eval.episodes=9"),
        *("env.data=data.jsonl", f"env.reward={reward}", "hydra.run.dir=run"),
        f"actor.model={model}",
    ]


def refused_text(capsys, model: str, rows: list[str], **more: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(text_job(model, rows, **more))
    return int(stop.value.code or 0), capsys.readouterr().err


def test_prompts_from_a_file_plain_and_as_conversations(capsys, model: str) -> None:
    turns = [{"role": "user", "content": "21"}, {"role": "assistant", "content": "12"}]
    chat = json.dumps({"messages": [*turns, {"role": "user", "content": "43"}], "answer": "34"})
    assert refused_text(capsys, model, ['{"prompt": "user12"}', chat]) == (0, "")
    row = rows_of(Path("run"))[-1]
    assert (row["reward/episode"], row["eval/return"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([""], "env.data=data.jsonl: holds no prompt"),
        (['{"prompt": "1"}', "{"], "env.data=data.jsonl line 2: not JSON"),
        (
            ['{"prompt": "' + "1" * 70 + '"}'],
            "data.jsonl line 1: 70 tokens, and the model's context",
        ),
    ],
    ids=["empty", "broken", "long"],
)
def test_a_data_set_that_cannot_be_used_is_refused(capsys, model, rows, line) -> None:
    code, err = refused_text(capsys, model, rows)
    assert (code, len(err.splitlines())) == (2, 1)
    assert line in err
    assert not Path("run").exists()


@pytest.mark.parametrize("lacking", ["chat_template", "pad_token"])
def test_a_tokenizer_without_template_or_pad(capsys, model: str, lacking: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    setattr(tokenizer, lacking, None)
    network = AutoModelForCausalLM.from_pretrained(model)
    network.save_pretrained("other")
    tokenizer.save_pretrained("other")
    chat = json.dumps({"messages": [{"role": "user", "content": "43"}]})
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(text_job("other", [chat]))
    said = capsys.readouterr()
    if lacking == "pad_token":
        assert stop.value.code in (0, None)
        assert "padding with EOS, told apart by position" in said.out
        assert "pad == eos: masks go by position" in said.out
    else:
        assert (stop.value.code, len(said.err.splitlines())) == (2, 1)
        assert "no chat template" in said.err


@pytest.mark.parametrize("empty", ["", "' '"])
@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("env.data", "give data files: env.data=prompts.jsonl"),
        ("env.eval_data", "give data files, or null for those of env.data"),
        ("actor.model", "give a folder written by save_pretrained, a hub id, or smollm2"),
        ("actor.init", "give a trained run: actor.init=outputs/RUN"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(setting: str, remedy: str, empty: str) -> None:
    """As an unset variable of the shell leaves it; Path("") is the current folder."""
    words = ["experiment=text", "env.data=d.jsonl", "env.reward=mine:f", "actor.model=folder"]
    with pytest.raises(ConfigError) as caught:
        to_config(compose([*words, f"{setting}={empty}"]))
    assert str(caught.value) == f"{setting}: has no value; {remedy}"
