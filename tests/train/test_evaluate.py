"""What an evaluation adds up to, whoever plays."""

from itertools import combinations

import numpy as np
import pytest

from klrl.domains import CONTROL, LANGUAGE, Domain
from klrl.train.scores import CLOSING, IN_RUN, Scores, Starts, evaluation

RETURNS = [3.5, -1.0, 0.25, 8.0]


@pytest.mark.parametrize("few", [1, 3, 4], ids=lambda few: f"{few} at a time")
@pytest.mark.parametrize("gold", [[], [1.0, 0.0, 0.5, 0.75]], ids=["", "gold"])
def test_mean_and_errors_are_numpys_however_many_end_at_a_time(few: int, gold: list) -> None:
    parts = (Scores(RETURNS[i : i + few], gold[i : i + few]) for i in range(0, 4, few))
    result = evaluation(parts, LANGUAGE, "greedy", IN_RUN)
    assert result.returns == RETURNS
    expected = {
        "eval/return": np.mean(RETURNS),
        "eval/return_std": np.std(RETURNS),
        "eval/return_se": np.std(RETURNS, ddof=1) / np.sqrt(4),
        "eval/episodes": 4,
    }
    if gold:
        expected["eval/gold"] = np.mean(gold)
    assert result.row == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("domain", "scores", "how", "told"),
    [
        (
            CONTROL,
            Scores([-142.78, -162.58]),
            "deterministic",
            "return -152.7 +- 9.9 (standard error over 2 episodes, deterministic)",
        ),
        (CONTROL, Scores([-150.0]), "sampled", "return -150 (1 episode, sampled)"),
        (
            CONTROL,
            Scores([4.0, 4.0], cut=1),
            "deterministic",
            "return 4 +- 0 (standard error over 2 episodes, deterministic, "
            "1 more did not end and does not count)",
        ),
        (
            LANGUAGE,
            Scores([1.0, 0.5], [0.25, 0.0]),
            "sampled at temperature 0.7",
            "score 0.75 +- 0.25, gold 0.125 (standard error over 2 responses, "
            "sampled at temperature 0.7)",
        ),
    ],
)
def test_a_person_is_told(domain: Domain, scores: Scores, how: str, told: str) -> None:
    assert evaluation([scores], domain, how, IN_RUN).line == told


def test_episodes_that_were_cut_off_are_in_no_number() -> None:
    parts = [Scores([1.0, 3.0], cut=2), Scores([5.0], cut=1)]
    row = evaluation(parts, CONTROL, "deterministic", IN_RUN).row
    assert (row["eval/return"], row["eval/episodes"], row["eval/cut"]) == (3.0, 3, 3)
    nothing = evaluation([Scores([], cut=4)], CONTROL, "deterministic", IN_RUN)
    assert nothing.row == {"eval/episodes": 0, "eval/cut": 4}
    with pytest.raises(ValueError, match="none of 4 episodes ended"):
        _ = nothing.mean


def test_no_two_sets_of_start_states_share_one() -> None:
    sets = [IN_RUN, CLOSING, *(Starts("evaluate", seed) for seed in range(8))]
    seeds = [set(starts.seeds(1_000)) for starts in sets]
    assert all(len(each) == 1_000 for each in seeds)
    assert not any(a & b for a, b in combinations(seeds, 2))
    assert IN_RUN.seeds(20) == IN_RUN.seeds(100)[:20]
