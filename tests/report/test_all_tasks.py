"""All tasks together: the normalisation, its tables and its figure."""

import re
from dataclasses import replace

import numpy as np
import pytest

from klrl.report.aggregate import against_best, aggregates
from klrl.report.measures import summary_lines
from klrl.report.outcomes import count_runs
from klrl.report.pictures import draw_tasks
from klrl.report.runs import find_runs
from tests.report.test_outcomes import RETURNS, write
from tests.report.toys import page_of, rows_of, told, write_run

pytestmark = pytest.mark.integration

SCALE = {"Toy-v1": (10, 110), "Big-v1": (0, 10_000)}
NORMALISE = ("--normalise", "Toy-v1=10:110", "Big-v1=0:10000")
MEANS = {"kl.coef=0": 0.209, "kl.coef=0.1": 0.47, "kl.coef=1": 0.07}


@pytest.fixture(scope="module")
def two_tasks(tmp_path_factory):
    root = tmp_path_factory.mktemp("tasks")
    write(root / "a")
    second = {coef: tuple(100 * v for v in values) for coef, values in RETURNS.items()}
    write(root / "b", {**second, 0.0: (0, 0, 0, 0, 0)}, env={"id": "Big-v1"})
    return root


def aggregates_of(*roots):
    counted = count_runs(find_runs([*map(str, roots)]).runs).settings
    tasks = {task: summary_lines([each for each in counted if each.task == task]) for task in SCALE}
    return aggregates(tasks, SCALE)


def test_an_aggregate_normalises_as_it_was_asked(two_tasks):
    made = aggregates_of(two_tasks)
    assert {each.name: each.mean.value for each in made} == pytest.approx(MEANS)
    # IQM of 0 to .04 and .10 to .14: of ten, two are cut at either end.
    one = made[-1]
    assert one.iqm == pytest.approx(np.mean([0.02, 0.03, 0.04, 0.10, 0.11, 0.12]))
    # Variance 2.5e-4 in each: error sqrt(2 x 2.5e-4 / 5) / 2; t of eight degrees is 2.306004.
    assert one.mean.high - 0.07 == pytest.approx(2.306004 * (2 * 2.5e-4 / 5) ** 0.5 / 2, rel=1e-6)
    best, others = against_best(made)
    assert best == "kl.coef=0.1"
    # P(best > kl.coef=0): 13 of 25 in one task, all in the other.
    assert others[0].more == pytest.approx((13 / 25 + 1) / 2)


def test_where_tasks_have_unequal_seeds_the_iqm_has_no_interval(two_tasks, tmp_path):
    config = {"env": {"id": "Big-v1"}, "kl": {"coef": 0.1}}
    write_run(tmp_path / "more", seed=5, rows=rows_of(5200.5), config=config)
    one = {each.name: each for each in aggregates_of(two_tasks, tmp_path)}["kl.coef=0.1"]
    # .40 to .44 and .50 to .54, with .52 again: of eleven runs two are cut at either end.
    assert one.iqm == pytest.approx(np.mean([0.42, 0.43, 0.44, 0.50, 0.51, 0.52, 0.52]))
    assert one.mean.value == pytest.approx((0.42 + 0.52) / 2)
    assert (one.iqm_low, one.iqm_high) == (None, None)


def test_the_page_has_all_tasks_where_a_normalisation_is_given(two_tasks):
    text, page = page_of(two_tasks, *NORMALISE, "-o", str(two_tasks / "report"))
    assert "#tasks" in page.links
    assert all(
        (two_tasks / "report" / f"all_tasks.{kind}").stat().st_size for kind in ("png", "svg")
    )
    assert "Toy-v1 10 = 0 and 110 = 1, Big-v1 0 = 0 and 10000 = 1." in text
    at = page.cells.index("0.470|0.458 to 0.482")
    assert page.cells[at - 2 : at] == ["kl.coef=0.1", "5"]
    assert "Best: kl.coef=0.1" in text
    chart = dict(page.charts)["Normalised return over all tasks"]
    assert told(chart, "kl.coef=0.1") == [
        ("0.470 (0.458 to 0.482)", "mean over tasks"),
        ("0.420", "Toy-v1"),
        ("0.520", "Big-v1"),
    ]
    assert "#tasks" not in page_of(two_tasks)[1].links


def test_marks_stand_where_the_axis_says(two_tasks, tmp_path):
    made = aggregates_of(two_tasks)
    # A name in the figure's own words.
    made[0] = replace(made[0], name='<b id="s0 point" style="x" d="1.2345">')
    drawing, _ = draw_tasks(made, [*SCALE], "return", tmp_path / "all_tasks")
    assert '&lt;b id="s0 point" style="x" d="1.2345"&gt;</text>' in drawing.svg
    ticks = re.findall(r'text-anchor="middle" x="([-.\d]+)"[^>]*>([-.\d]+)</text>', drawing.svg)
    places, names = np.array(ticks, float).T
    scale = np.polyfit(places, names, 1)
    np.testing.assert_allclose(np.polyval(scale, places), names, atol=1e-4)

    def drawn(kind):
        use = rf'class="{kind}" data-s="\d+">.*?<use [^>]*x="([-.\d]+)"'
        return np.polyval(scale, np.array(re.findall(use, drawing.svg), float))

    np.testing.assert_allclose(drawn("point"), [*MEANS.values()], atol=1e-3)
    both = [0.418, 0, 0.42, 0.52, 0.02, 0.12]
    np.testing.assert_allclose(drawn("dot"), both, atol=1e-3)
    # What the script marks is what is drawn.
    pointed = [[point[0] for point in each["points"]] for each in drawing.data["series"]]
    np.testing.assert_allclose(np.polyval(scale, pointed).ravel()[1::3], both[::2], atol=1e-3)
    ends = re.findall(r'class="up"[^>]*><path d="M ([-.\d]+) [-.\d]+ L ([-.\d]+)', drawing.svg)
    np.testing.assert_allclose(
        np.polyval(scale, np.array(ends[1], float)), [0.4585, 0.4815], atol=1e-3
    )
