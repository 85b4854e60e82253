"""Which runs count: failed, short, equal; differences and the front; evaluations."""

import csv
import json
import re

import numpy as np
import pytest

from klrl.report.__main__ import main
from klrl.report.differences import differences_of, front, shown
from klrl.report.measures import summary_lines
from klrl.report.outcomes import count_runs, short_runs
from klrl.report.runs import find_runs
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


def lines_of(root, failed="last"):
    counted = count_runs(find_runs([str(root)]).runs)
    return summary_lines(counted.settings, failed)


# --------------------------------------------------------------------------------- which runs count


@pytest.fixture
def diverged(tmp_path):
    """Two of five seeds of the best coefficient end with an error, at returns of 5 and -20."""
    write(tmp_path)
    fail(tmp_path, 0.1, 3, reward=21.0, rows=4)
    fail(tmp_path, 0.1, 4, reward=-4.0, rows=4)
    return tmp_path


@pytest.mark.parametrize(
    "failed, values",
    [("last", [50, 51, 52, 5, -20]), ("worst", [50, 51, 52, -20, -20])],
)
def test_a_failed_seed_counts_as_it_was_asked(failed, values, diverged):
    (line,) = [each for each in lines_of(diverged, failed) if each.setting.name == "kl.coef=0.1"]
    np.testing.assert_array_equal(line.values["return"], values)
    assert line.estimates["return"].value == np.mean(values)


def test_a_setting_with_two_diverged_seeds_is_ranked_by_all_five(diverged):
    lines = {line.setting.name: line for line in lines_of(diverged)}
    means = {name: line.estimates["return"].value for name, line in lines.items()}
    assert means == {"kl.coef=0": 51.8, "kl.coef=0.1": pytest.approx(27.6), "kl.coef=1": 12}
    # A finished seed without a return is in no number; the three left of five are told too.
    change_rows(diverged / "0.1_2", lambda row: row | {"reward/episode": float("nan")})
    _, page = page_of(diverged)
    assert page.labels[1] == "kl.coef=0.1 (3 of 5, 4 of 5 have a return)"
    assert page.cells[page.cells.index("kl.coef=0.1") + 1] == "3 of 5|4 of 5 have a return"


def test_a_run_that_failed_before_its_first_row_counts_as_the_worst(tmp_path):
    write(tmp_path)
    fail(tmp_path, 0.1, 0, reward=0.0, rows=0)
    (line,) = [each for each in lines_of(tmp_path) if each.setting.name == "kl.coef=0.1"]
    np.testing.assert_array_equal(line.values["return"], [10, 51, 52, 53, 54])
    assert np.isnan(line.values["kl_ref"][0])


def test_a_failed_rerun_replaces_no_finished_run(tmp_path):
    """Of two finished ones the later counts, as ever."""
    days = {"first": (1, "finished"), "then": (2, "finished"), "failed": (3, "failed")}
    for reward, (name, (day, status)) in enumerate(days.items()):
        started = f"2026-01-0{day}T00:00:00+00:00"
        write_run(tmp_path / name, rows=rows_of(reward), status=status, started=started)
    (setting,) = count_runs(find_runs([str(tmp_path)]).runs).settings
    assert [run.path.name for run in setting.runs] == ["then"]


def test_of_two_runs_of_a_seed_the_one_that_finished_last_counts(tmp_path):
    """A resume keeps ``started``."""
    for name, begun, ended in (("resumed", 1, 4), ("between", 2, 3)):
        times = {"started": f"2026-01-0{begun}T00:00:00", "ended": f"2026-01-0{ended}T00:00:00"}
        write_run(tmp_path / name, **times)
    (setting,) = count_runs(find_runs([str(tmp_path)]).runs).settings
    assert [run.path.name for run in setting.runs] == ["resumed"]


def test_seeds_that_were_resumed_with_other_frames_are_told(tmp_path):
    for seed, planned in enumerate(([1000, 2000], [2000], [500, 1000, 2000], None)):
        write_run(tmp_path / str(seed), seed=seed, planned=planned)
    text, _ = page_of(tmp_path)
    told = "seed 0 (frames=1000, then 2000); all runs seed 2 (frames=500, then 1000, then 2000)."
    assert f"until a resume changed frames: all runs {told}<" in text
    (setting,) = count_runs(find_runs([str(tmp_path)]).runs).settings
    assert len(setting.runs) == 4


def test_short_runs_are_marked_against_what_the_task_asks(tmp_path):
    write_run(tmp_path / "whole")
    write_run(tmp_path / "cut", seed=1, rows=rows_of()[:19])
    write_run(tmp_path / "failed", seed=2, rows=rows_of()[:3], status="failed")
    write_run(tmp_path / "asked_less", rows=rows_of()[:10], config={"frames": 1000})
    counted = count_runs(find_runs([str(tmp_path)]).runs).settings
    assert {counted[i].name: number for i, number in short_runs(counted).items()} == {
        "frames=1000": 1,
        "frames=2000": 1,
    }
    _, page = page_of(tmp_path)
    assert page.cells[page.cells.index("frames=2000") + 1] == "2 of 3|1 short"


def test_a_finished_seed_without_a_return_is_told(tmp_path):
    """It leaves four seeds, and so no interval."""
    write(tmp_path)
    silent = {"reward/episode": float("nan")}
    change_rows(tmp_path / "0.1_2", lambda row: row | silent)
    change_rows(tmp_path / "0.1_3", lambda row: row | {"kl/ref/exact": float("nan")})
    for seed in range(5):
        change_rows(tmp_path / f"1.0_{seed}", lambda row: row | silent)
    _, page = page_of(tmp_path)
    told = "4 of 5 have a return"
    assert page.labels == ["kl.coef=0", f"kl.coef=0.1 ({told})", "kl.coef=1 (none has a return)"]
    i = page.cells.index("kl.coef=0.1")
    assert page.cells[i + 1 : i + 3] == [f"5|{told}", "50.0 to 54.0|mean 52.0"]
    # The KL of four, 2 in each.
    assert page.cells[i + 5] == "2|4 of 5"
    assert page.cells[page.cells.index("kl.coef=1") + 1 :][:2] == ["5|none has a return", ""]


def test_where_no_episode_ended_in_a_run_all_are_compared_by_the_reward_per_frame(tmp_path):
    write(tmp_path, {1.0: (10, 11, 12), 0.1: (50, 51, 52)})
    # Without any other reward the two that ended episodes are left.
    change_rows(tmp_path / "1.0_1", lambda row: {k: v for k, v in row.items() if "reward" not in k})
    (line,) = [each for each in lines_of(tmp_path) if each.setting.name == "kl.coef=1"]
    np.testing.assert_array_equal(line.values["return"], [10, np.nan, 12])
    for folder in tmp_path.glob("*.*_*"):
        change_rows(folder, lambda row: row | {"reward/raw": 0.25})
    _, page = page_of(tmp_path)
    assert page.cells[page.cells.index("kl.coef=1") + 1 :][:2] == ["3", "0.25"]


# -------------------------------------------------------------------------------------- differences


def test_differences_are_welchs_with_holm_over_all_pairs(tmp_path):
    write(tmp_path)
    lines = lines_of(tmp_path)
    names = [line.setting.name for line in lines]
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
    # 49, 51, 52, 54, 53 against 50 to 54: ten wins and four ties of 25.
    assert made[0, 1].more == pytest.approx((10 + 4 / 2) / 25)
    assert not any(each.paired for each in made.values())
    assert made[1, 2].turned().low == -made[1, 2].high


def test_the_front_leaves_out_what_is_significantly_beaten_at_no_more_kl(tmp_path):
    write(tmp_path, kls={1.0: 5.0, 0.1: 2.0, 0.0: 9.0})
    lines = lines_of(tmp_path)
    # kl.coef=1 is 40 below kl.coef=0.1, at more KL; kl.coef=0 differs by 0.2 alone.
    kept = front(lines, differences_of(lines))
    assert [lines[i].setting.name for i in kept] == ["kl.coef=0.1", "kl.coef=0"]
    write(tmp_path / "less", {1.0: RETURNS[1.0], 0.1: RETURNS[0.1]})
    lines = lines_of(tmp_path / "less")
    # The one that returns less has less KL.
    kept = front(lines, differences_of(lines))
    assert [lines[i].setting.name for i in kept] == ["kl.coef=1", "kl.coef=0.1"]


def test_below_five_seeds_nothing_is_compared(tmp_path):
    write(tmp_path, {coef: values[:4] for coef, values in RETURNS.items()})
    lines = lines_of(tmp_path)
    assert differences_of(lines) == []
    assert front(lines, []) == []
    text, page = page_of(tmp_path)
    assert "Needs two settings of 5 seeds" in text
    assert "No front is drawn" in text
    assert "10.0 to 13.0|mean 11.5" in page.cells


def test_seeds_are_paired_where_they_share_a_trained_start_alone(tmp_path):
    start = {"actor": {"init": "outputs/teacher"}}
    for i, more in enumerate(({}, start)):
        write(tmp_path / f"{i}", **more)
        lines = lines_of(tmp_path / f"{i}")
        (first, *_) = differences_of(lines)
        assert first.paired == bool(more)
    # Differences seed by seed: -1, 0, 0, 1, -1.
    alone = welch([np.array([-1.0, 0, 0, 1, -1])], [1.0])
    assert (first.value, first.low) == pytest.approx((alone.value, alone.low))
    # A start of its own for one of the settings.
    write(tmp_path / "2", {1.0: RETURNS[1.0]}, **start)
    write(tmp_path / "2", {0.1: RETURNS[0.1]}, actor={"init": "outputs/other"})
    assert [each.paired for each in differences_of(lines_of(tmp_path / "2"))] == [False]


def test_language_runs_of_one_base_model_are_paired(tmp_path):
    for coef, values in RETURNS.items():
        for seed, value in enumerate(values):
            rows = [{"samples": 10 * i, "reward/episode": value} for i in range(1, 5)]
            config = {"env": {"id": None, "name": "sort_digits"}, "kl": {"coef": coef}}
            write_run(tmp_path / f"{coef}_{seed}", seed=seed, rows=rows, config=config)
    assert all(each.paired for each in differences_of(lines_of(tmp_path)))


def test_of_many_settings_each_is_shown_against_the_best(tmp_path):
    coefs = [0.0, 0.1, 0.2, 0.3, 0.4]
    write(tmp_path, {c: 100 * c + np.arange(5.0) for c in coefs}, dict.fromkeys(coefs, 1.0))
    lines = lines_of(tmp_path)
    every = differences_of(lines)
    assert (len(every), len(shown(every, len(lines)))) == (10, 4)
    assert all(4 in (each.a, each.b) for each in shown(every, len(lines)))
    main([str(tmp_path)])
    with (tmp_path / "report" / "differences.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    assert float(rows[0]["a_minus_b"]) == pytest.approx(-10)


# ------------------------------------------------------------------------------------- evaluations


def close(folder, value, error, best=None, best_error=None):
    """Let a run's last row hold a closing evaluation, after an earlier one."""
    row = {"eval/return": value, "eval/return_se": error, "eval/episodes": 100}
    row |= {"eval/best_return": best, "eval/best_return_se": best_error} if best else {}
    early = {"eval/return": -1000.0, "eval/return_se": 1.0, "eval/episodes": 20}
    change_rows(folder, lambda old: old | {4: early, 20: row}.get(old["iteration"], {}))


def test_runs_are_listed_with_their_closing_evaluation_and_the_best(tmp_path):
    write(tmp_path, {1.0: (10, 11), 0.1: (50, 51)})
    close(tmp_path / "1.0_0", -152.68, 9.9, best=-141.25, best_error=12.3)
    close(tmp_path / "1.0_1", -160.0, 8.0, best=-150.0, best_error=7.0)
    fail(tmp_path, 0.1, 1, reward=21.0, rows=4)
    cells = page_of(tmp_path)[1].cells
    places = [k for k, cell in enumerate(cells) if cell in ("finished", "failed")]
    closing = "100 episodes, deterministic"
    assert {tuple(cells[k - 2 : k]): cells[k : k + 4] for k in places} == {
        ("kl.coef=0.1", "0"): ["finished", "50", "", ""],
        ("kl.coef=0.1", "1"): ["failed", "5", "", ""],
        ("kl.coef=1", "0"): ["finished", "10", f"-152.7 +- 9.9|{closing}", "-141 +- 12"],
        ("kl.coef=1", "1"): ["finished", "11", f"-160.0 +- 8.0|{closing}", "-150.0 +- 7.0"],
    }
    # And in the table of settings next to the last policy.
    i = cells.index("kl.coef=1")
    assert {"-160 to -153|mean -156", "-150 to -141|mean -146"} <= {*cells[i + 1 : i + 9]}
    # Next to the range over seeds, the error of the start states that they share.
    assert cells[cells.index("-160 to -153|mean -156") + 1] == "8.0 to 9.9|mean 8.9"


@pytest.mark.parametrize("evaluation, told", [(None, "greedy"), ("sampled", "sampled")])
def test_language_says_score_and_how_it_was_evaluated(evaluation, told, tmp_path):
    rows = [{"samples": 10 * i, "reward/episode": 0.5} for i in range(1, 5)]
    config = {"env": {"id": None, "name": "sort_digits"}}
    more = {"domain": "language", **({"evaluation": evaluation} if evaluation else {})}
    rows[-1] |= {"eval/return": 0.8359375, "eval/return_se": 0.0123, "eval/episodes": 512}
    rows[-1] |= {"eval/best_return": 0.75, "eval/best_return_se": 0.02}
    write_run(tmp_path / "a", rows=rows, config=config, **more)
    text, page = page_of(tmp_path)
    assert f"0.836 +- 0.012|512 responses, {told}" in page.cells
    assert "0.750 +- 0.020" in page.cells
    assert f"{told} evaluation score of the best checkpoint" in text
    # But in the names of metrics.
    assert "return" not in re.sub(r"eval/\w+", "", " ".join(page.cells))
