"""What an evaluation adds up to, whoever plays."""

from __future__ import annotations

import numpy as np
import pytest

from klrl.domains import CONTROL, LANGUAGE, Domain
from klrl.train.evaluate import Scores, evaluation

RETURNS = [3.5, -1.0, 0.25, 8.0]


@pytest.mark.parametrize("few", [1, 3, 4], ids=lambda few: f"{few} at a time")
@pytest.mark.parametrize("gold", [[], [1.0, 0.0, 0.5, 0.75]], ids=["", "gold"])
def test_mean_and_spread_are_numpys_however_many_end_at_a_time(few: int, gold: list) -> None:
    parts = (Scores(RETURNS[i : i + few], gold[i : i + few]) for i in range(0, 4, few))
    result = evaluation(parts, LANGUAGE, "greedy")
    assert result.returns == RETURNS
    expected = {"eval/return": np.mean(RETURNS), "eval/return_std": np.std(RETURNS)}
    if gold:
        expected["eval/gold"] = np.mean(gold)
    assert result.row == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("domain", "scores", "how", "told"),
    [
        (
            CONTROL,
            Scores([-150.0, -151.0]),
            "deterministic",
            "return -150.5 +- 0.5 over 2 deterministic episodes",
        ),
        (
            LANGUAGE,
            Scores([1.0, 0.5], [0.25, 0.0]),
            "sampled at temperature 0.7",
            "reward 0.75 +- 0.25, gold 0.125 over 2 sampled responses at temperature 0.7",
        ),
    ],
)
def test_a_person_is_told(domain: Domain, scores: Scores, how: str, told: str) -> None:
    assert evaluation([scores], domain, how).told == told
