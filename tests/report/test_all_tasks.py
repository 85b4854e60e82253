"""All tasks together: the normalisation, its table and its figure."""

import re

import numpy as np
import pytest

from klrl.report.aggregate import against_best, aggregates
from klrl.report.dots import dots
from klrl.report.measures import summary_lines
from klrl.report.outcomes import count_runs
from klrl.report.runs import find_runs
from tests.report.test_outcomes import RETURNS, write
from tests.report.toys import page_of, rows_of, write_run

pytestmark = pytest.mark.integration


@pytest.fixture
def two_tasks(tmp_path):
    write(tmp_path / "a")
    second = {coef: tuple(100 * v for v in values) for coef, values in RETURNS.items()}
    write(tmp_path / "b", {**second, 0.0: (0, 0, 0, 0, 0)}, env={"id": "Big-v1"})
    return tmp_path


def test_an_aggregate_normalises_as_it_was_asked(two_tasks):
    counted = count_runs(find_runs([str(two_tasks)]).runs).settings
    tasks = {
        task: summary_lines([each for each in counted if each.task == task])
        for task in ("Toy-v1", "Big-v1")
    }
    made = aggregates(tasks, {"Toy-v1": (10, 110), "Big-v1": (0, 10_000)})
    means = {each.name: each.mean.value for each in made}
    assert means == pytest.approx({"kl.coef=0": 0.209, "kl.coef=0.1": 0.47, "kl.coef=1": 0.07})
    # IQM of 0 to .04 and .10 to .14: of ten, two are cut at either end.
    one = made[-1]
    assert one.iqm == pytest.approx(np.mean([0.02, 0.03, 0.04, 0.10, 0.11, 0.12]))
    # Variance 2.5e-4 in each: error sqrt(2 x 2.5e-4 / 5) / 2; t of eight degrees is 2.306004.
    assert one.mean.high - 0.07 == pytest.approx(2.306004 * (2 * 2.5e-4 / 5) ** 0.5 / 2, rel=1e-6)
    best, others = against_best(made)
    assert best == "kl.coef=0.1"
    # P(best > kl.coef=0): 13 of 25 in one task, all in the other.
    assert others[0].more == pytest.approx((13 / 25 + 1) / 2)


def lines_by_task(root):
    counted = count_runs(find_runs([str(root)]).runs).settings
    return {
        task: summary_lines([each for each in counted if each.task == task])
        for task in dict.fromkeys(setting.task for setting in counted)
    }


SCALE = {"Toy-v1": (10, 110), "Big-v1": (0, 10_000)}
NORMALISE = ("--normalise", "Toy-v1=10:110", "Big-v1=0:10000")


@pytest.mark.slow
def test_where_tasks_have_unequal_seeds_the_page_says_what_weighs_how(two_tasks):
    same = "Every task weighs the same."
    assert same in page_of(two_tasks, *NORMALISE)[0]
    write_run(
        two_tasks / "b" / "more",
        seed=5,
        rows=rows_of(5200.5),
        config={
            "env": {"id": "Big-v1"},
            "kl": {"coef": 0.1},
        },
    )
    tasks = lines_by_task(two_tasks)
    one = {each.name: each for each in aggregates(tasks, SCALE)}["kl.coef=0.1"]
    # .40 to .44 and .50 to .54, with .52 again: of eleven runs two are cut at either end.
    assert one.iqm == pytest.approx(np.mean([0.42, 0.43, 0.44, 0.50, 0.51, 0.52, 0.52]))
    assert one.mean.value == pytest.approx((0.42 + 0.52) / 2)
    assert (one.iqm_low, one.iqm_high) == (None, None)
    text, page = page_of(two_tasks, *NORMALISE)
    assert same not in text
    assert "a task of more seeds weighs more in the IQM, which has no interval then" in text
    every = [k for k, cell in enumerate(page.cells) if cell == "kl.coef=0.1"]
    assert "5 to 6" in {page.cells[k + 1] for k in every}


def test_the_interval_of_the_iqm_says_its_level(two_tasks):
    text, _ = page_of(two_tasks, *NORMALISE)
    assert "IQM<small>95 % bootstrap interval</small>" in text
    assert "Intervals assume no rare bad seeds." in text


def test_all_tasks_have_a_figure(two_tasks, pictures):
    text, _ = page_of(two_tasks, *NORMALISE)
    for kind in ("png", "svg"):
        assert f'<a href="all_tasks.{kind}">' in text
    assert (two_tasks / "report" / "all_tasks.png").read_bytes().startswith(b"\x89PNG")
    drawn = (two_tasks / "report" / "all_tasks.svg").read_text()
    assert all(each in drawn for each in ("kl.coef=0.1", "Toy-v1", "Big-v1", "normalised"))
    (figure,) = re.findall(r'<figure class="dots">.*?</figure>', text, re.S)
    # Per setting a mean with its interval and a mark for each task, which the key has too.
    counts = [figure.count(f'class="{kind}"') for kind in ("point", "up", "dot")]
    assert counts == [3, 3, 6 + 2]
    assert "<title>kl.coef=0.1, Toy-v1: 0.420</title>" in figure
    assert "<title>kl.coef=0.1: 0.470 (0.458 to 0.482)</title>" in figure


def test_marks_stand_where_the_axis_says(two_tasks):
    figure = dots(aggregates(lines_by_task(two_tasks), SCALE), [*SCALE])
    ticks = re.findall(r'<text class="x" x="([-.\d]+)"[^>]*>([-.\d]+)</text>', figure)
    places, names = np.array(ticks, float).T
    scale = np.polyfit(places, names, 1)
    np.testing.assert_allclose(np.polyval(scale, places), names, atol=2e-3)
    means = [float(x) for x in re.findall(r'<circle class="point" cx="([-.\d]+)"', figure)]
    np.testing.assert_allclose(np.polyval(scale, means), [0.209, 0.47, 0.07], atol=2e-3)
    first = [
        float(x) for x in re.findall(r"Toy-v1: [-.\d]+</title><circle cx=\"([-.\d]+)\"", figure)
    ]
    np.testing.assert_allclose(np.polyval(scale, first), [0.418, 0.42, 0.02], atol=2e-3)
    (low, high), *_ = re.findall(r'<line class="up" x1="([-.\d]+)" x2="([-.\d]+)"', figure)[1:]
    ends = np.polyval(scale, [float(low), float(high)])
    np.testing.assert_allclose(ends, [0.4585, 0.4815], atol=2e-3)


@pytest.mark.slow
def test_the_page_has_all_tasks_where_a_normalisation_is_given(two_tasks):
    text, _ = page_of(two_tasks, "--normalise", "Toy-v1=0:100", "Big-v1=0:10000")
    assert '<a href="#tasks">All tasks</a>' in text
    assert "Best: kl.coef=0.1" in text
    assert "All tasks" not in page_of(two_tasks)[0]


@pytest.mark.slow
def test_many_tasks_of_few_seeds_have_a_figure_without_intervals(pictures, tmp_path):
    tasks = [f"<b>{i}" for i in range(5)]
    for i, task in enumerate(tasks):
        write(tmp_path / f"{i}", {1.0: (i, i + 1)}, env={"id": task})
    words = [f"{task}=0:10" for task in tasks]
    text, _ = page_of(tmp_path, "--normalise", *words)
    (figure,) = re.findall(r'<figure class="dots">.*?</figure>', text, re.S)
    # The mean of .05, .15 ... .45; no shapes, and so no key but a line.
    assert "<title>all runs: 0.250</title>" in figure
    assert [figure.count(f'class="{kind}"') for kind in ("point", "up", "dot")] == [1, 0, 5]
    assert "small: means of the tasks" in figure
    assert "<b>" not in figure
    drawn = (tmp_path / "report" / "all_tasks.svg").read_text()
    assert "means of the tasks" in drawn
    assert "95 % interval" not in drawn
