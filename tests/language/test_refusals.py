"""What a language job refuses beside ``messages/language.yaml``: data sets, tokenizers."""

from pathlib import Path

import pytest

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
