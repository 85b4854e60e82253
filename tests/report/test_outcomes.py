"""Which runs count; differences, the front and returns at equal KL; evaluations."""

import json

import numpy as np
import pytest

from klrl.report.differences import differences_of, front
from klrl.report.equal_kl import equal_kl
from klrl.report.measures import measured
from klrl.report.runs import find_runs
from klrl.report.settings import count_runs
from klrl.report.statistics import welch
from tests.report.toys import page_of, rows_of, write_run

pytestmark = pytest.mark.integration

#: Final returns by coefficient; KLs below. Spreads of a unit, means far apart but for the last two.
RETURNS = {1.0: (10, 11, 12, 13, 14), 0.1: (50, 51, 52, 53, 54), 0.0: (49, 51, 52, 54, 53)}
KLS = {1.0: 1.0, 0.1: 2.0, 0.0: 9.0}


def write(root, returns=RETURNS, kls=KLS, **more):
    """A run per coefficient and seed; the final is half below the last row."""
    for coef, values in returns.items():
        for seed, value in enumerate(values):
            config = {"kl": {"coef": coef}, **more}
            rows = rows_of(value + 0.5, kls[coef])
            write_run(root / f"{coef}_{seed}", seed=seed, rows=rows, config=config)


def fail(root, coef, seed, reward, rows):
    """Let a run end with an error after so many rows."""
    folder = root / f"{coef}_{seed}"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "status": "failed"}))
    kept = [json.dumps(row) + "\n" for row in rows_of(reward)[:rows]]
    (folder / "metrics.jsonl").write_text("".join(kept))


def change_rows(folder, change):
    """Rewrite a run's rows."""
    path = folder / "metrics.jsonl"
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings_of(root):
    return measured(count_runs(find_runs([str(root)]).runs))


# --------------------------------------------------------------------------------- which runs count


@pytest.fixture
def diverged(tmp_path):
    """Two of five seeds of the best coefficient end with an error, at returns of 5 and -20."""
    write(tmp_path)
    fail(tmp_path, 0.1, 3, reward=21.0, rows=4)
    fail(tmp_path, 0.1, 4, reward=-4.0, rows=4)
    return tmp_path


def test_a_setting_with_two_diverged_seeds_is_ranked_by_all_five(diverged):
    lines = {line.name: line for line in settings_of(diverged)}
    means = {name: line.estimates["return"].value for name, line in lines.items()}
    assert means == {"kl.coef=0": 51.8, "kl.coef=0.1": pytest.approx(27.6), "kl.coef=1": 12}
    np.testing.assert_array_equal(lines["kl.coef=0.1"].values["return"], [50, 51, 52, 5, -20])
    # A finished seed without a return is in no number.
    change_rows(diverged / "0.1_2", lambda row: row | {"reward/episode": float("nan")})
    _, page = page_of(diverged)
    assert page.labels == ["kl.coef=0", "kl.coef=0.1 (3 of 5)", "kl.coef=1"]
    seeds, score = page.row("kl.coef=0.1", 2)
    assert seeds == "3 of 5"
    assert score == "-20 to 51|mean 22|IQM 28, worst -20|4 of 5"


def test_a_run_that_failed_before_its_first_row_counts_as_the_worst(tmp_path):
    write(tmp_path)
    fail(tmp_path, 0.1, 0, reward=0.0, rows=0)
    (line,) = [each for each in settings_of(tmp_path) if each.name == "kl.coef=0.1"]
    np.testing.assert_array_equal(line.values["return"], [10, 51, 52, 53, 54])
    assert np.isnan(line.values["kl_ref"][0])


def test_a_failed_rerun_replaces_no_finished_run(tmp_path):
    """Of two finished ones the later counts, as ever."""
    days = {"first": (1, "finished"), "then": (2, "finished"), "failed": (3, "failed")}
    for reward, (name, (day, status)) in enumerate(days.items()):
        started = f"2026-01-0{day}T00:00:00+00:00"
        write_run(tmp_path / name, rows=rows_of(reward), status=status, started=started)
    (setting,) = count_runs(find_runs([str(tmp_path)]).runs)
    assert [run.path.name for run in setting.runs] == ["then"]


def test_of_two_runs_of_a_seed_the_one_that_finished_last_counts(tmp_path):
    """A resume keeps ``started``."""
    for name, begun, ended in (("resumed", 1, 4), ("between", 2, 3)):
        times = {"started": f"2026-01-0{begun}T00:00:00", "ended": f"2026-01-0{ended}T00:00:00"}
        write_run(tmp_path / name, **times)
    (setting,) = count_runs(find_runs([str(tmp_path)]).runs)
    assert [run.path.name for run in setting.runs] == ["resumed"]


def test_a_finished_seed_without_a_return_is_told(tmp_path):
    """It leaves four seeds, and so no interval."""
    write(tmp_path)
    silent = {"reward/episode": float("nan")}
    change_rows(tmp_path / "0.1_2", lambda row: row | silent)
    change_rows(tmp_path / "0.1_3", lambda row: row | {"kl/ref/exact": float("nan")})
    for seed in range(5):
        change_rows(tmp_path / f"1.0_{seed}", lambda row: row | silent)
    _, page = page_of(tmp_path)
    assert page.labels == ["kl.coef=0.1", "kl.coef=0", "kl.coef=1"]
    score, kl = page.row("kl.coef=0.1", 3)[1:]
    assert score == "50.0 to 54.0|mean 52.0|IQM 52.0, worst 50.0|4 of 5"
    # The KL of four, 2 in each.
    assert kl == "2|4 of 5"
    assert page.row("kl.coef=1", 2) == ["5", ""]


def test_where_no_episode_ended_in_a_run_all_are_compared_by_the_reward_per_frame(tmp_path):
    write(tmp_path, {1.0: (10, 11, 12), 0.1: (50, 51, 52)})
    # Without any other reward the two that ended episodes are left.
    change_rows(tmp_path / "1.0_1", lambda row: {k: v for k, v in row.items() if "reward" not in k})
    (line,) = [each for each in settings_of(tmp_path) if each.name == "kl.coef=1"]
    np.testing.assert_array_equal(line.values["return"], [10, np.nan, 12])
    for folder in tmp_path.glob("*.*_*"):
        change_rows(folder, lambda row: row | {"reward/raw": 0.25})
    _, page = page_of(tmp_path)
    assert page.row("kl.coef=1", 2) == ["3", "0.25"]


# -------------------------------------------------------------------------------------- differences


def test_differences_are_welchs_with_holm_over_all_pairs(tmp_path):
    write(tmp_path)
    lines = settings_of(tmp_path)
    names = [line.name for line in lines]
    assert names == ["kl.coef=0", "kl.coef=0.1", "kl.coef=1"]
    made = {(each.a, each.b): each for each in differences_of(lines)}
    seeds = [np.array(RETURNS[coef], float) for coef in (0.0, 0.1, 1.0)]
    alone = {pair: welch([seeds[pair[0]], seeds[pair[1]]], [1, -1]) for pair in made}
    for pair, contrast in alone.items():
        assert (made[pair].low, made[pair].high) == pytest.approx((contrast.low, contrast.high))
    # The smallest p times three, the next times two, the largest as it is.
    ordered = sorted(alone, key=lambda pair: alone[pair].p)
    for pair, times in zip(ordered, (3, 2, 1), strict=True):
        assert made[pair].p == pytest.approx(min(1, times * alone[pair].p), rel=1e-9)
    # The higher mean first; 50 to 54 against 49, 51, 52, 54, 53: eleven wins and four ties of 25.
    assert [*made] == [(1, 0), (1, 2), (0, 2)]
    assert made[1, 0].more == pytest.approx((11 + 4 / 2) / 25)
    assert not any(each.paired for each in made.values())
    # After the rows of the results, five cells for each pair: better, worse, their difference.
    _, page = page_of(tmp_path)
    i = page.cells.index("kl.coef=0.1", page.cells.index("kl.coef=1"))
    told = [page.cells[k : k + 3] for k in range(i, i + 15, 5)]
    assert [value.partition("|")[0] for *_, value in told] == ["+0.2", "+40.0", "+39.8"]
    assert [each[:2] for each in told] == [[names[a], names[b]] for a, b in made]


def test_the_front_leaves_out_what_is_significantly_beaten_at_no_more_kl(tmp_path):
    write(tmp_path, kls={1.0: 5.0, 0.1: 2.0, 0.0: 9.0})
    lines = settings_of(tmp_path)
    # kl.coef=1 is 40 below kl.coef=0.1, at more KL; kl.coef=0 differs by 0.2 alone.
    kept = front(lines, differences_of(lines))
    assert [lines[i].name for i in kept] == ["kl.coef=0.1", "kl.coef=0"]
    write(tmp_path / "less", {1.0: RETURNS[1.0], 0.1: RETURNS[0.1]})
    lines = settings_of(tmp_path / "less")
    # The one that returns less has less KL.
    kept = front(lines, differences_of(lines))
    assert [lines[i].name for i in kept] == ["kl.coef=1", "kl.coef=0.1"]


def test_below_five_seeds_nothing_is_compared(tmp_path):
    write(tmp_path, {coef: values[:4] for coef, values in RETURNS.items()})
    lines = settings_of(tmp_path)
    assert differences_of(lines) == []
    assert front(lines, []) == []
    text, page = page_of(tmp_path)
    assert "Needs two settings of 5 seeds" in text
    assert page.row("kl.coef=1", 2)[1].startswith("10.0 to 13.0|mean 11.5|")


def test_seeds_are_paired_where_they_share_a_trained_start_alone(tmp_path):
    start = {"actor": {"init": "outputs/teacher"}}
    for i, more in enumerate(({}, start)):
        write(tmp_path / f"{i}", **more)
        lines = settings_of(tmp_path / f"{i}")
        (first, *_) = differences_of(lines)
        assert first.paired == bool(more)
    # Differences seed by seed.
    alone = welch([np.array([1.0, 0, 0, -1, 1])], [1.0])
    assert (first.value, first.low) == pytest.approx((alone.value, alone.low))
    # A start of its own for one of the settings.
    write(tmp_path / "2", {1.0: RETURNS[1.0]}, **start)
    write(tmp_path / "2", {0.1: RETURNS[0.1]}, actor={"init": "outputs/other"})
    assert [each.paired for each in differences_of(settings_of(tmp_path / "2"))] == [False]


def test_language_runs_of_one_base_model_are_paired(tmp_path):
    for coef, values in RETURNS.items():
        for seed, value in enumerate(values):
            rows = [{"samples": 10 * i, "reward/episode": value} for i in range(1, 5)]
            config = {"env": {"id": None, "name": "sort_digits"}, "kl": {"coef": coef}}
            write_run(tmp_path / f"{coef}_{seed}", seed=seed, rows=rows, config=config)
    assert all(each.paired for each in differences_of(settings_of(tmp_path)))


def test_returns_at_equal_kl_are_linear_in_its_root_seed_by_seed(tmp_path):
    """Roots 1 to 3 of one family, 1 to 2 of the other: levels at 1.25, 1.5 and 1.75."""
    for name, kls in (("a", (1.0, 9.0)), ("b", (1.0, 4.0))):
        for coef, kl in zip((1.0, 0.1), kls, strict=True):
            for seed in range(2):
                # The final return is 10 times the root, plus the seed.
                rows = rows_of(10 * kl**0.5 + seed + 0.5, kl)
                config = {"kl": {"name": name, "coef": coef}}
                write_run(tmp_path / f"{name}_{coef}_{seed}", seed=seed, rows=rows, config=config)
    levels, families = equal_kl(settings_of(tmp_path))
    assert levels == pytest.approx([1.25**2, 1.5**2, 1.75**2])
    assert {*families} == {"kl=a", "kl=b"}
    for of in families.values():
        assert [each.value for each in of] == pytest.approx([13, 15.5, 18])
        assert [each.most - each.least for each in of] == pytest.approx([1, 1, 1])


# ------------------------------------------------------------------------------------- evaluations


def close(folder, value, error, best=None, best_error=None):
    """Let a run's last row hold a closing evaluation, after an earlier one."""
    row = {"eval/return": value, "eval/return_se": error, "eval/episodes": 100}
    row |= {"eval/best_return": best, "eval/best_return_se": best_error} if best else {}
    early = {"eval/return": -1000.0, "eval/return_se": 1.0, "eval/episodes": 20}
    change_rows(folder, lambda old: old | {4: early, 20: row}.get(old["iteration"], {}))


def test_the_last_evaluation_stands_with_the_error_that_all_seeds_share(tmp_path):
    write(tmp_path, {1.0: (10, 11), 0.1: (50, 51)})
    close(tmp_path / "1.0_0", -152.68, 9.9, best=-141.25, best_error=12.3)
    close(tmp_path / "1.0_1", -160.0, 8.0, best=-150.0, best_error=7.0)
    evaluated = page_of(tmp_path)[1].row("kl.coef=1", 4)[2:]
    assert evaluated == ["-160 to -153|mean -156|+- 8.9 in a seed", "-150 to -141|mean -146"]


@pytest.mark.parametrize("evaluation, said", [(None, "greedy"), ("sampled", "sampled")])
def test_language_says_score_and_how_it_was_evaluated(evaluation, said, tmp_path):
    rows = [{"samples": 10 * i, "reward/episode": 0.5} for i in range(1, 5)]
    config = {"env": {"id": None, "name": "sort_digits"}}
    more = {"domain": "language", **({"evaluation": evaluation} if evaluation else {})}
    rows[-1] |= {"eval/return": 0.8359375, "eval/return_se": 0.0123, "eval/episodes": 512}
    rows[-1] |= {"eval/best_return": 0.75, "eval/best_return_se": 0.02}
    write_run(tmp_path / "a", rows=rows, config=config, **more)
    text, page = page_of(tmp_path)
    assert page.row("all runs", 4) == ["1", "0.5", "0.836|+- 0.012 in a seed", "0.75"]
    assert f"{said} evaluation score of the best checkpoint" in text
