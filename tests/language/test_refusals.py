"""What a language job refuses beside ``messages/language.yaml``: data sets, tokenizers."""

import json
from pathlib import Path

import pytest

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


def test_rewards_are_tried_on_the_answers_that_a_run_imitates(capsys, model: str) -> None:
    """Not on sampled responses, which the run never scores."""
    rows = [json.dumps({"prompt": text, "answer": "12"}) for text in ("21", "12")]
    Path("a.jsonl").write_text("\n".join(rows))
    Path("mine.py").write_text(
        "def f(prompts, responses, rows):\n    return [1 / (r != '12') for r in responses]\n"
    )
    words = ["experiment=sft", "data=a.jsonl", f"actor.model={model}", "env.reward=mine.py:f"]
    with pytest.raises(SystemExit) as stop:
        main([*words, "collector.max_new_tokens=8", "hydra.run.dir=run"])
    told = capsys.readouterr().err
    assert stop.value.code == 2, told
    assert "env.reward=mine.py:f: sample 0 of 4 (" in told
    assert "response '12'): raised ZeroDivisionError" in told
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
