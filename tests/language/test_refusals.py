"""What a language job refuses beside ``messages/language.yaml``: data sets, tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from klrl.__main__ import main

pytestmark = pytest.mark.integration


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
