"""Which prompts an evaluation asks, and that training does not notice."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from klrl.language.run.evaluate import Player, places
from klrl.runs.metrics import TIMES
from klrl.runs.rows import read_rows
from klrl.train.evaluate import evaluate_run
from klrl.train.loop import Training
from klrl.train.scores import CLOSING, IN_RUN, Size, Starts
from tests.language.conftest import LENGTHS

pytestmark = pytest.mark.integration
TOLD = Starts("evaluate"), Starts("evaluate", 1)


def test_an_endless_task_has_prompts_for_each_set() -> None:
    asked = [places(starts, 512, None) for starts in (IN_RUN, CLOSING, *TOLD)]
    assert all(len(each) == 512 for each in asked)
    assert not any(set(a) & set(b) for a, b in combinations(asked, 2))


@pytest.mark.parametrize(
    ("among", "during", "closing"),
    [(1, [0], [0]), (2, [0], [1]), (5, [0, 1, 2], [3, 4]), (9, [0, 1, 2, 3], [5, 6, 7, 8])],
)
def test_a_file_has_two_halves(among: int, during: list[int], closing: list[int]) -> None:
    assert list(places(IN_RUN, 4, among)) == during
    assert list(places(CLOSING, 4, among)) == closing
    assert list(places(TOLD[1], 4, among)) == list(range(min(4, among)))
    assert list(places(TOLD[1], 4, among, chosen=True)) == closing


def test_the_prompts_are_those_of_their_places(job) -> None:
    run = Training(job())
    asked: list[str] = []
    reward = run.parts.task.reward

    class Listening:
        def __call__(self, prompts, answers, drawn):
            asked.extend(prompt.row["digits"] for prompt in prompts)
            return reward(prompts, answers, drawn)

    object.__setattr__(run.parts.task, "reward", Listening())
    for starts in (IN_RUN, CLOSING):
        asked.clear()
        parts = run.parts
        player = Player(run.config, parts.policy, parts.task, parts.sampler)
        result = player.evaluate(starts, Size(9, 5))
        expected = [run.parts.task.evaluate(i).row["digits"] for i in places(starts, 5, None)]
        assert asked == expected
        assert len(result.returns) == 5
        assert result.how == "greedy"


def test_a_run_says_what_is_sampled_and_what_is_greedy(exits) -> None:
    """Two iterations of 16 samples, evaluated before the first and after the last."""
    words = ("eval.every=null", "eval.evaluations=2", "eval.episodes=8", "eval.share=0.5")
    code, out, _ = exits(*words, "eval.final=12")
    assert code == 0
    rows = read_rows(Path("run/metrics.jsonl"))
    assert [(row["iteration"], row.get("eval/episodes")) for row in rows] == [
        (0, 8),
        (1, None),
        (2, 12),
    ]
    assert "evaluations: 2 during the run (8 responses each), then 12 responses at the end" in out
    assert "| sampled score " in out
    assert "| greedy evaluation " in out
    assert "(standard error over 12 responses, greedy, " in out
    code, out, _ = exits(*words, "eval.sampled=true", "hydra.run.dir=drawn")
    assert "responses, sampled at temperature 1, " in out
    assert "| sampled evaluation " in out
    assert json.loads(Path("drawn/manifest.json").read_text())["evaluation"] == "sampled"
    assert exits("hydra.run.dir=off")[0] == 0
    for run in ("run", "drawn"):
        assert trained(run) == trained("off")


@pytest.mark.parametrize(
    ("count", "words", "played", "few"),
    [
        (64, ("env.eval_share=0.1",), (3, 3), True),  # 6 of 64: 3 during the run, 3 at its end
        (60, (), (10, 12), False),
        (58, (), (10, 12), True),
        (9, ("env.eval_data=data.jsonl",), (5, 4), True),
    ],
)
def test_a_run_says_how_many_prompts_its_evaluations_have(
    exits, tmp_path, monkeypatch, count: int, words, played: tuple[int, int], few: bool
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "the_length.py").write_text(LENGTHS)
    Path("data.jsonl").write_text("\n".join(json.dumps({"prompt": f"{i}"}) for i in range(count)))
    words = ("env.data=data.jsonl", "env.reward=the_length:reward", *words, "eval.every=1")
    code, out, _ = exits("experiment=text", *words, "eval.episodes=10", "eval.final=12")
    assert code == 0
    during, closing = played
    said = f"2 during the run ({during} responses each), then {closing} responses at the end"
    assert said + "; few prompts give a rough mean" * few + "\n" * (not few) in out
    rows = read_rows(Path("run/metrics.jsonl"))
    assert [row["eval/episodes"] for row in rows] == [during, closing]


def trained(run: str) -> list[dict[str, float]]:
    """The rows of iterations, less evaluations and times."""
    rows = read_rows(Path(run, "metrics.jsonl"))
    left = [
        {k: v for k, v in row.items() if k not in TIMES and not k.startswith("eval/")}
        for row in rows
    ]
    return [row for row in left if row["iteration"]]


def test_the_best_is_not_told_from_the_prompts_that_chose_it(exits, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "the_length.py").write_text(LENGTHS + LENGTHS.replace("reward(", "half("))
    for name, count in (("data.jsonl", 7), ("other.jsonl", 5)):
        lines = [json.dumps({"prompt": f"{i}"}) for i in range(count)]
        Path(name).write_text("\n".join(lines))
    words = ("env=text", "env.data=data.jsonl", "env.reward=the_length:reward")
    assert exits("experiment=text", *words, "eval.every=1", "eval.final=2")[0] == 0
    n = {which: len(evaluate_run("run", which=which).returns) for which in ("last", "best")}
    assert n == {"last": 7, "best": 3}
    expected = {
        "env.reward=the_length:half": 3,  # the same prompts, whatever scores them
        "env.reward_weights=[2]": 3,
        f"env.eval_data={Path('data.jsonl').absolute()}": 3,
        "env.eval_data=other.jsonl": 5,
    }
    found = {word: len(evaluate_run("run", [word], which="best").returns) for word in expected}
    assert found == expected
