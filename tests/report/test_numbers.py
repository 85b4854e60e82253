"""The numbers of runs and the points of curves, against arithmetic by hand."""

import numpy as np
import pytest

from klrl.report.measures import curve, final, measures
from klrl.report.runs import find_runs
from klrl.report.settings import count_runs
from klrl.report.statistics import estimate_curve
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


def test_curves_average_seeds_at_equal_frames_and_end_with_each_seed(tmp_path):
    for seed, (reward, rows) in enumerate([(0.0, 20), (4.0, 20), (100.0, 10)]):
        write_run(tmp_path / f"{seed}", seed=seed, rows=rows_of(reward)[:rows])
    (setting,) = count_runs(find_runs([str(tmp_path)]).runs)
    x, seeds = curve(setting, "reward/episode")
    assert x.tolist() == [100.0 * i for i in range(1, ROWS + 1)]
    y = estimate_curve(seeds)
    # After 10 iterations two of the three are left.
    assert y[0].value == pytest.approx((-19 - 15 + 81) / 3)
    assert (y[0].seeds, y[10].seeds) == (3, 2)
    assert (y[19].value, y[19].least, y[19].most, y[19].low) == (2, 0, 4, None)
    # A failed run counts on with its final value.
    path = tmp_path / "2" / "manifest.json"
    path.write_text(path.read_text().replace("finished", "failed"))
    (setting,) = count_runs(find_runs([str(tmp_path)]).runs)
    _, seeds = curve(setting, "reward/episode")
    np.testing.assert_array_equal(seeds[:, [9, 19]], [[-10, 0], [-6, 4], [90, 90]])


def test_long_runs_have_a_point_per_interval_that_averages_its_rows(tmp_path):
    rows = [{"frames": i, "reward/episode": float(i)} for i in range(1, 151)]
    run = one(tmp_path, rows=rows)
    (setting,) = count_runs([run])
    x, seeds = curve(setting, "reward/episode")
    assert x.tolist() == [*range(3, 151, 3)]
    np.testing.assert_array_equal(seeds[0], x - 1)


def test_the_evaluation_before_the_first_update_is_no_iteration(tmp_path):
    first = {"iteration": 0, "frames": 0, "eval/return": -50.0}
    run = one(tmp_path, rows=[first, *rows_of()[:19]])
    # 19 iterations: the last tenth is one, not two.
    assert final(run, "reward/episode") == -1.0
    x, seeds = curve(*count_runs([run]), "eval/return")
    assert (x[0], seeds[0, 0]) == (0.0, -50.0)


@pytest.mark.parametrize("some", [True, False])
def test_kls_without_a_closed_form_are_those_by_k3(some: bool, tmp_path) -> None:
    """Next to runs whose every tenth row is exact, as kl.exact=every:10, or to none."""
    rows = [
        {name.replace("exact", "k3"): value for name, value in row.items()}
        for row in rows_of(kl=0.5, kl_old=0.02)
    ]
    write_run(tmp_path / "charged", rows=rows)
    if some:
        mixed = [*rows[:-1], rows[-1] | {"kl/ref/exact": 9.0, "kl/old/exact": 9.0}]
        write_run(tmp_path / "every", rows=mixed, seed=1)
    runs = find_runs([str(tmp_path)]).runs
    found = {each.key: each for each in measures(runs)}
    assert found["kl_old"].metric.title == "KL(old||new) by k3"
    assert found["kl_ref"].metric.title == "KL(policy||reference) by k3"
    for run in runs:
        told = [found[key].of(run, found[key].metric.name) for key in ("kl_ref", "kl_old")]
        assert told == pytest.approx([0.5, 0.02])
