"""The numbers of runs and the points of curves, against arithmetic by hand."""

import numpy as np
import pytest

from klrl.report.charts import curve
from klrl.report.measures import final, in_band
from klrl.report.runs import find_runs
from klrl.report.settings import group_runs, names_of
from tests.report.toys import ROWS, rows_of, write_run


def one(tmp_path, **more):
    write_run(tmp_path / "one", **more)
    return find_runs([str(tmp_path / "one")]).runs[0]


def test_final_is_the_mean_of_the_last_tenth_else_the_last_recorded(tmp_path):
    rows = rows_of(reward=0.0)
    rows[4]["eval/return"] = 7.0
    run = one(tmp_path, rows=rows)
    assert final(run, "reward/episode") == -0.5  # of -1 and 0
    assert final(run, "eval/return") == 7.0


def test_in_band_counts_from_the_eleventh_iteration(tmp_path):
    rows = rows_of()
    for row, factor in zip(rows[10:], (1.4, 1 / 1.4, 1.6, 1 / 1.6, 1, 1, 1, 2, 0, 1), strict=True):
        row["kl/old/exact"] = 0.01 * factor
    assert in_band(one(tmp_path, rows=rows)) == pytest.approx(0.6)


def test_curves_average_seeds_at_equal_frames_and_end_with_each_seed(tmp_path):
    for seed, (reward, rows) in enumerate([(0.0, 20), (4.0, 20), (100.0, 10)]):
        write_run(tmp_path / f"{seed}", seed=seed, rows=rows_of(reward)[:rows])
    runs = find_runs([str(tmp_path)]).runs
    setting = group_runs(runs, names_of(runs))[0][0]
    points = curve(setting, "reward/episode")
    assert [point.x for point in points] == [100.0 * i for i in range(1, ROWS + 1)]
    y = [point.y for point in points]
    # After 10 iterations two of the three are left.
    assert y[0].value == pytest.approx((-19 - 15 + 81) / 3)
    assert (y[0].seeds, y[10].seeds) == (3, 2)
    assert (y[19].value, y[19].least, y[19].most, y[19].low) == (2, 0, 4, None)
    np.testing.assert_array_equal(points[19].seeds, [0, 4, np.nan])
    # A failed one counts on, as it is asked.
    points = curve(setting, "reward/episode", ends=[np.nan, np.nan, 90.0])
    assert points[9].seeds == [-10, -6, 90]
    assert points[19].seeds == [0, 4, 90]
    assert points[19].y.value == pytest.approx(94 / 3)


def test_the_evaluation_before_the_first_update_is_no_iteration(tmp_path):
    rows = rows_of()
    for row in rows[10:]:
        row["kl/old/exact"] = 0.012
    for row in rows[:10]:
        row["kl/old/exact"] = 1.0
    first = {"iteration": 0, "frames": 0, "eval/return": -50.0}
    run = one(tmp_path, rows=[first, *rows[:19]])
    # 19 iterations: the last tenth is one, not two.
    assert final(run, "reward/episode") == -1.0
    assert in_band(run) == 1.0
    setting = group_runs([run], names_of([run]))[0][0]
    (point,) = curve(setting, "eval/return")[:1]
    assert (point.x, point.y.value) == (0.0, -50.0)
