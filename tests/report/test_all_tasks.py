"""All tasks together: the ratio of two settings' means, the geometric mean over tasks."""

import numpy as np
import pytest

from klrl.report.differences import OverTasks, over_tasks
from klrl.report.measures import summary_lines
from klrl.report.outcomes import count_runs
from klrl.report.runs import find_runs
from tests.report.test_outcomes import RETURNS, write
from tests.report.toys import page_of, rows_of, write_run

pytestmark = pytest.mark.integration

#: Another unit, and another order of the settings.
SECOND = {1.0: (1000, 1100, 1200, 1300, 1400), 0.1: (500, 510, 520, 530, 540), 0.0: (5, 6, 7, 8, 9)}


@pytest.fixture(scope="module")
def two_tasks(tmp_path_factory):
    root = tmp_path_factory.mktemp("tasks")
    write(root / "a")
    write(root / "b", SECOND, env={"id": "Big-v1"})
    return root


def compared(*roots) -> OverTasks:
    counted = count_runs(find_runs([*map(str, roots)]).runs).settings
    tasks = dict.fromkeys(each.task for each in counted)
    lines = {task: summary_lines([s for s in counted if s.task == task]) for task in tasks}
    return over_tasks(lines)


def test_a_pair_over_tasks_is_the_mean_of_its_log_ratios(two_tasks):
    made = compared(two_tasks)
    pairs = {(made.names[each.a], made.names[each.b]): each for each in made.pairs}
    pair = pairs["kl.coef=0.1", "kl.coef=1"]
    assert pair.value == pytest.approx((np.log(52 / 12) + np.log(520 / 1200)) / 2)
    # 25 of 25 pairs of runs on one task, none on the other.
    assert pair.more == 0.5
    # s / mean of the four samples, s^2 = 2.5 v^2 for steps of v; degrees of freedom by hand.
    parts = np.array([2.5 / 52**2, 2.5 / 12**2, 250 / 520**2, 25_000 / 1200**2]) / 5 / 4
    assert pair.high - pair.value == pytest.approx(pair.value - pair.low)
    df = parts.sum() ** 2 / (parts**2 / 4).sum()
    assert 8 < df < 9  # t of 8 and 9 degrees: 2.306, 2.262
    assert 2.262 < (pair.high - pair.value) / np.sqrt(parts.sum()) < 2.306


def test_a_mean_that_is_not_positive_leaves_no_mean_over_tasks(two_tasks, tmp_path):
    write(tmp_path / "c", {**RETURNS, 1.0: (-10, -11, 0, 1, 2)}, env={"id": "Low-v1"})
    made = compared(two_tasks, tmp_path)
    assert (made.pairs, made.negative) == ([], ["kl.coef=1 on Low-v1"])


def test_settings_count_that_every_task_has_with_five_seeds(two_tasks, tmp_path):
    for seed in range(4):
        config = {"env": {"id": "Few-v1"}, "kl": {"coef": 0.1}}
        write_run(tmp_path / str(seed), seed=seed, rows=rows_of(9.0), config=config)
    assert compared(two_tasks, tmp_path).names == []


def test_the_page_has_the_ratio_where_there_are_tasks(two_tasks, tmp_path):
    text, page = page_of(two_tasks, "-o", str(two_tasks / "report"))
    assert "#tasks" in page.links
    at = page.cells.index("1.37|1.24 to 1.51")  # sqrt(52 / 12 x 520 / 1200)
    assert page.cells[at - 2 : at] == ["kl.coef=0.1", "kl.coef=1"]
    assert page.cells[at + 3] == "+14 %"  # log 1.144 is 2.268 + 0.884 errors of 0.0428
    assert "the smallest true difference that, with these seeds and this spread," in text
    write(tmp_path)
    assert "#tasks" not in page_of(tmp_path)[1].links
