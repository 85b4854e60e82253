"""The report's numbers: statistics against rliable, the rest against arithmetic by hand."""

import numpy as np
import pytest

from klrl.report.charts import curve
from klrl.report.measures import final, in_band
from klrl.report.runs import find_runs
from klrl.report.settings import group_runs, names_of
from klrl.report.statistics import (
    at_equal_cost,
    bootstrap_interval,
    estimate_curve,
    iqm,
)
from tests.report.toys import ROWS, rows_of, write_run

# ------------------------------------------------------------------------------------ statistics


def scores(runs, tasks):
    k = np.arange(1.0, runs * tasks + 1).reshape(runs, tasks)
    return 10 * np.sin(k * k) + 3 * np.cos(7 * k) + 5 * np.arange(tasks)


#: What rliable 1.2.0 printed: aggregate_iqm, get_interval_estimates(reps=50000) of scores().
RLIABLE = {
    (10, 1): (-3.497691684731701, -6.957068541840392, 3.6618244256542103),
    (8, 4): (5.811884683958156, 3.4956834657759646, 8.290987027110736),
    (5, 3): (2.980522131499269, -1.2227397288071626, 7.8559869205440505),
}


@pytest.mark.parametrize("shape", RLIABLE)
def test_iqm_and_interval_are_those_that_rliable_printed(shape):
    middle, low, high = RLIABLE[shape]
    drawn = scores(*shape)
    assert float(iqm(drawn.ravel())) == pytest.approx(middle, abs=1e-9)
    ends = bootstrap_interval(drawn, resamples=50_000)
    np.testing.assert_allclose(ends, (low, high), atol=0.02 * (high - low))


def test_the_bootstrap_interval_of_two_seeds_is_their_range():
    # Resamples: both the lower in a quarter of all, both the upper in a quarter.
    low, high = bootstrap_interval(np.array([[1.0], [5.0]]))
    assert (low, high) == (1.0, 5.0)


def test_nan_seeds_are_left_out_and_below_five_seeds_there_is_no_interval():
    values = np.full((5, 3), np.nan)
    values[:, 0] = 1, 2, 3, 4, 1000
    values[:4, 1] = 1, 2, 3, 4
    whole, four, none = estimate_curve(values)
    assert (whole.value, whole.iqm, whole.least, whole.most, whole.seeds) == (202, 3, 1, 1000, 5)
    assert whole.low < 0 < whole.high
    assert (four.value, four.low, four.high, four.seeds) == (2.5, None, None, 4)
    assert none is None


def test_gain_at_equal_cost_is_linear_and_nowhere_else():
    gains = at_equal_cost(np.array([3.0, 1]), np.array([10.0, 20]), np.array([0.5, 1.5, 3, 4]))
    np.testing.assert_array_equal(gains, [np.nan, 17.5, 10, np.nan])


# ------------------------------------------------------------------------------------- the numbers


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
    points = curve(group_runs(runs, names_of(runs))[0][0], "reward/episode")
    assert [point.x for point in points] == [100.0 * i for i in range(1, ROWS + 1)]
    y = [point.y for point in points]
    # After 10 iterations two of the three are left.
    assert y[0].value == pytest.approx((-19 - 15 + 81) / 3)
    assert (y[0].seeds, y[10].seeds) == (3, 2)
    assert (y[19].value, y[19].least, y[19].most, y[19].low) == (2, 0, 4, None)
    np.testing.assert_array_equal(points[19].seeds, [0, 4, np.nan])


def test_a_failed_seed_counts_on_at_its_end(tmp_path):
    for seed, (reward, rows) in enumerate([(0.0, 20), (4.0, 20), (100.0, 10)]):
        status = "failed" if seed == 2 else "finished"
        write_run(tmp_path / f"{seed}", seed=seed, rows=rows_of(reward)[:rows], status=status)
    runs = find_runs([str(tmp_path)]).runs
    setting = group_runs(runs, names_of(runs))[0][0]
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
