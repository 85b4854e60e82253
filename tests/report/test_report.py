"""The report's command: what it reads, counts, names and refuses; what page and CSV hold."""

import csv
import re
import subprocess
import sys

import numpy as np
import pytest

from klrl.report.runs import find_runs
from klrl.report.settings import count_runs, name_settings
from tests.report.toys import (
    MARKUP,
    page_of,
    rows_of,
    write_marked_up,
    write_run,
    write_runs,
    write_sweep,
)
from tests.runs.commands import said

pytestmark = pytest.mark.integration


def table(path):
    """The rows of a CSV."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -------------------------------------------------------------------------------------- run folders


def test_checkpoints_and_overlapping_paths_are_no_further_runs(tmp_path):
    run = write_run(tmp_path / "s" / "a")
    (run / "checkpoints" / "last" / "1").mkdir(parents=True)
    (run / "checkpoints" / "last" / "1" / "manifest.json").write_text("{}")
    found = find_runs([str(tmp_path), str(run)])
    assert (len(found.runs), found.skipped) == (1, [])


def test_seeds_and_how_jobs_are_run_make_no_setting_and_a_run_again_replaces(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, config={"logger": {"name": "wandb"}})
    again = write_run(tmp_path / "c", seed=1, started="2026-02-01T00:00:00+00:00")
    write_run(tmp_path / "d", seed=0, config={"kl": {"coef": 1.0}})
    for seed, group in enumerate(("launcher", "search", "sweep"), 2):
        write_run(tmp_path / group, seed=seed, config={group: {"name": "joblib", "jobs": 2}})
    settings = count_runs(find_runs([str(tmp_path)]).runs)
    assert [s.name for s in settings] == ["kl.coef=0.1", "kl.coef=1"]
    paths = [run.path for run in settings[0].runs]
    others = [tmp_path / group for group in ("launcher", "search", "sweep")]
    assert paths == [tmp_path / "a", again, *others]
    _, page = page_of(tmp_path)
    assert page.jobs.startswith(f"{tmp_path / 'b'}: Toy-v1, kl.coef=0.1, seed 1: replaced by ")


@pytest.mark.parametrize(
    "settings, names",
    [
        (  # What divides nothing further is left out.
            [
                {"loss.dtarg": 0.01, "loss.name": "klpen"},
                {"loss.clip": 0.2, "loss.name": "clip"},
                {"loss.clip": 0.3, "loss.name": "clip"},
            ],
            ["loss.name=klpen", "loss.name=clip loss.clip=0.2", "loss.name=clip loss.clip=0.3"],
        ),
        (  # An older run without a newer setting.
            [{"kl.coef": 0.1, "numerics": 1}, {"kl.coef": 0.1, "new": 2, "numerics": 2}],
            ["numerics=1", "numerics=2"],
        ),
        ([{"a": 1}, {"a": 1, "b": None}], ["no b", "b=null"]),
        # A font has no control characters, and a terminal obeys them.
        ([{"a": "\x1b[31m"}, {"a": 1}], [r"a=\x1b[31m", "a=1"]),
    ],
)
def test_settings_have_the_shortest_names_that_tell_them_apart(settings, names):
    assert name_settings(settings) == names


@pytest.mark.parametrize(
    "more, told",
    [
        ({"domain": "chess"}, r"names the domain 'chess', unknown to this version of klrl"),
        ({"domain": "language"}, r"metrics.jsonl: its rows have no samples"),
        ({"rows": [{"reward/raw": 1.0}]}, r"metrics.jsonl: its rows have no frames"),
    ],
)
def test_a_run_without_its_axis_is_named_and_skipped(more, told, tmp_path):
    write_run(tmp_path / "a", **more)
    found = find_runs([str(tmp_path)])
    assert found.runs == []
    assert re.search(told, found.skipped[0])


# ------------------------------------------------------------------------------------ one report


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of :func:`write_runs`, with all charts: its folder, its text, and its page."""
    root = write_runs(tmp_path_factory.mktemp("sweep"))
    text, page = page_of(root)
    return root / "report", text, page


def test_every_link_of_the_page_is_within_it_or_next_to_it(report):
    folder, text, page = report
    for link in page.links:
        anchored = link.startswith("#") and link[1:] in page.ids
        assert anchored or link == "data:," or (folder / link).is_file(), link
    assert "http" not in text.replace("http-equiv", "")
    assert not re.search(r"url\((?!#)|@import|<script", text)
    assert {each.name for each in folder.iterdir()} == {"report.html", "summary.csv"}
    assert len(set(page.ids)) == len(page.ids)


def test_the_policy_of_the_page_blocks_scripts_and_the_network(report):
    (policy,) = re.findall(r'-Policy" content="([^"]*)">', report[1])
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert report[1].index(policy) < report[1].index("<style")
    assert rules == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_the_page_holds_the_numbers(report):
    _, text, page = report
    # Final: mean of the last two rows is half below the last. The failed seed's is its fourth.
    # Below five seeds the range comes first; IQM: the mean of 99.5 and 101.5; the KL's range.
    row = ["3 of 4", "-16 to 110|mean 74|IQM 100, worst -16", "1.0 to 4.0|mean 3.2"]
    assert page.row("kl=legacy kl.coef=0.1", 3) == row
    # KL(old||new), kl.coef, loss.beta.
    assert page.row("kl=retrieve kl.coef=1", 6)[3:] == ["0.01", "0.1", "1"]
    # sqrt(KL) from 1 to 2: levels at 1.25, 1.5, 1.75; returns between 53.5 and 103.5.
    values = [cell.partition("|mean ")[2] for cell in page.row("kl=legacy", 3)]
    assert values == ["66.0", "78.5", "91.0"]
    assert "KL = 1.56<small>nats per frame</small>" in text
    error = "iteration 5: the loss is nan; try a smaller optim.lr <"
    assert f"failed: Toy-v1, kl=legacy kl.coef=0.1, seed 3: failed, counted {error}" in page.jobs
    assert "python -m klrl kl.coef=0.1 seed=0" in page.commands
    assert "broken/metrics.jsonl: its rows have no frames" in page.jobs
    assert "/somewhere" not in text
    assert "gold" not in text


def test_the_summary_has_the_numbers_in_full(report):
    lines = table(report[0] / "summary.csv")
    assert len(lines) == 4
    assert (lines[0]["seeds"], lines[0]["finished"]) == ("4", "3")
    assert (float(lines[0]["return"]), float(lines[0]["return_iqm"])) == (73.625, 100.5)
    assert (float(lines[0]["return_worst"]), float(lines[0]["kl_ref"])) == (-16, 3.25)
    # The least KL, coefficient or standard error is not that of the worst seed.
    assert [name for name in lines[0] if name.endswith("_worst")] == ["return_worst"]


def test_a_curve_is_drawn_where_its_axes_say(report):
    svg = report[2].charts["Training return"]
    names = [line["setting"] for line in table(report[0] / "summary.csv")]
    i = names.index("kl=retrieve kl.coef=1")
    (path,) = re.findall(rf'class="s{i} mean"><path d="([^"]*)"', svg)
    x, y = np.array(re.findall(r"[-.\d]+", path), float).reshape(-1, 2).T
    assert svg.count(f'class="s{i} seed"') == 3
    # Names of the ticks, and the lines of the grid.
    below = re.findall(r'text-anchor: middle" x="([.\d]+)"[^>]*>([.\d]+)(k?)<', svg)
    below = [(float(at), float(name) * (1000 if k else 1)) for at, name, k in below]
    beside = re.findall(r'text-anchor: end"[^>]*>(-?\d+)<', svg)
    grid = re.findall(r'd="M [.\d]+ ([.\d]+) L [.\d]+ \1 " [^>]*stroke: #d8d8d8', svg)
    frames = np.polyval(np.polyfit(*np.array(below).T, 1), x)
    np.testing.assert_allclose(frames, 100 * np.arange(1, 21), atol=1)
    returns = np.polyval(np.polyfit(np.array(grid, float), np.array(beside, float), 1), y)
    # The mean of what seeds add, 0, 2 and 10, to a return that rises by 1 to 40.
    np.testing.assert_allclose(returns, np.arange(21, 41) + 4, atol=0.1)


def test_equal_runs_make_equal_bytes(report, tmp_path, charts):
    folder = report[0]
    page_of(folder.parent, "-o", str(tmp_path))
    assert (tmp_path / "report.html").read_bytes() == (folder / "report.html").read_bytes()


def test_equal_curves_are_drawn_with_different_gaps(tmp_path, charts):
    """Of five equal settings, each shows where the later ones have gaps."""
    for coef in range(5):
        write_run(tmp_path / f"{coef}", config={"kl": {"coef": float(coef)}})
    svg = page_of(tmp_path)[1].charts["Training return"]
    means = re.findall(r'class="s\d mean"><path d="([^"]*)"[^>]*style="([^"]*)"', svg)
    assert len({path for path, _ in means}) == 1
    dashes = [re.findall("stroke-dasharray: ([^;]*)", style)[0] for _, style in means]
    assert len({*dashes}) == 5
    gaps = [sum(map(float, each.split(",")[1::2])) for each in dashes]
    assert gaps[0] == 0
    assert min(gaps[1:]) >= 3


def test_no_string_of_a_run_folder_becomes_markup(tmp_path):
    """As a browser reads it: no element and no handler is there that klrl did not write."""
    page = page_of(write_marked_up(tmp_path))[1]
    assert "planted" not in page.ids
    assert page.handlers == []
    assert (page.tags["img"], page.tags["script"], page.tags["style"]) == (0, 0, 1)
    # It is all there, as text.
    assert any(MARKUP in cell for cell in page.cells)
    assert any(MARKUP in label for label in page.labels)
    assert MARKUP in page.commands
    assert MARKUP in page.jobs


def test_no_string_of_a_run_folder_turns_or_hides_text(tmp_path, capsys):
    """Bidi overrides, zero width characters and terminal escapes: in the page and on stdout."""
    text, page = page_of(write_marked_up(tmp_path, "\u202e\u200bx\x1b[2J"))
    for each in (text, capsys.readouterr().out):
        assert not set(each) & set("\u202e\u200b\x1b")
    assert any(r"\u202e\u200bx\x1b[2J" in cell for cell in page.cells)


# -------------------------------------------------------------------------------------- the command


def test_the_gold_score_has_curves_a_frontier_and_a_column(tmp_path, charts):
    # (kl.coef, KL, reward, gold): more KL, more reward, and too much of it for the gold score.
    runs = [(1.0, 1.0, 0.5, 0.4), (0.1, 4.0, 0.8, 0.7), (0.0, 9.0, 0.9, 0.2)]
    for coef, kl, reward, gold in runs:
        row = {"reward/episode": reward, "reward/gold": gold, "kl/ref/exact_seq": kl}
        rows = [{"samples": 10 * i, **row} for i in range(1, 5)]
        rows[0]["eval/gold"], rows[-1]["eval/gold"] = gold, gold + 0.05
        config = {"env": {"id": None, "name": "sort_digits"}, "kl": {"coef": coef}}
        write_run(tmp_path / "words" / f"{coef}", rows=rows, config=config)
    text, page = page_of(tmp_path)
    assert "The reward is a proxy of the gold score" in text
    assert [*page.charts] == [
        "Score against sqrt(KL(policy||reference))",
        "Sampled training score",
        "KL(policy||reference)",
        "Gold score against sqrt(KL(policy||reference))",
        "Sampled training gold score",
        "Greedy evaluation gold score",
    ]
    golds = page.charts["Gold score against sqrt(KL(policy||reference))"]
    assert ">sqrt(KL(policy||reference)), KL in nats per response</text>" in golds
    # To the right with the root of the KL; down with the gold score.
    points = [
        re.findall(rf'class="s{i} point">.*?<use [^>]*x="([.\d]+)" y="([.\d]+)"', golds)[0]
        for i in range(3)
    ]
    x, y = np.array(points, float).T
    assert (x[0] - x[2]) / (x[1] - x[2]) == pytest.approx(2, abs=0.01)
    assert (y[0] - y[2]) / (y[1] - y[2]) == pytest.approx(-2 / 3, abs=0.01)
    lines = {line["setting"]: line for line in table(tmp_path / "report/summary.csv")}
    assert float(lines["kl.coef=0"]["gold"]) == pytest.approx(0.2)


@pytest.mark.parametrize("task", [{"id": "Toy-v1"}, {"id": None, "name": "sort_digits"}])
def test_a_page_without_a_gold_score_does_not_mention_one(tmp_path, task):
    row = {"reward/episode": 0.5, "kl/ref/exact": 0.1, "eval/return": 0.6, "eval/kl_ref": 0.2}
    axis = "frames" if task["id"] else "samples"
    rows = [{axis: 10 * i, **row} for i in range(1, 5)]
    write_run(tmp_path / "run", rows=rows, config={"env": task})
    assert "gold score" not in page_of(tmp_path)[0].lower()


def test_a_spreadsheet_reads_no_text_as_a_formula_and_every_number_as_one(tmp_path):
    formulas = ['=HYPERLINK("http://x")', "+1", "-1+cmd|' /C calc'!A1", "@SUM(1)", "\t=1"]
    for i, task in enumerate([*formulas, "Toy-v1"]):
        write_run(tmp_path / f"{i}", config={"env": {"id": task}}, rows=rows_of(-5.0))
    page_of(tmp_path)
    lines = table(tmp_path / "report" / "summary.csv")
    assert {line["task"] for line in lines} == {*(f"'{each}" for each in formulas), "Toy-v1"}
    assert {float(line["return_worst"]) for line in lines} == {-5.5}


def test_a_sweep_tells_of_jobs_that_never_started_and_why_jobs_failed(tmp_path, capsys):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1, status="failed", rows=[], error="the simulator fell over")
    write_sweep(
        tmp_path,
        ("a", ["kl.coef=0", "seed=0"], "finished", None),
        ("b", ["kl.coef=0", "seed=1"], "failed", "the simulator fell over"),
        ("c", ["kl.coef=1", "seed=0"], "waiting", None),
        ("d", ["kl.coef=1", "seed=7"], "refused", "no GPU here"),
        ("e", ["kl.coef=2"], "finished", None),
    )
    _, page = page_of(tmp_path)
    out = capsys.readouterr().out
    counts = "1 finished, 1 refused, 1 waiting"
    assert f"2 runs in 1 setting; not counted: {counts}" in out
    jobs = [line.partition(": ") for line in page.jobs.splitlines()]
    assert {folder.rpartition("/")[2]: told for folder, _, told in jobs} == {
        "b": "Toy-v1, all runs, seed 1: failed, counted the simulator fell over",
        "c": "waiting ",
        "d": "refused no GPU here",
        "e": "finished ",
    }
    assert page.commands.splitlines()[0] == "python -m klrl -m kl.coef=0,1 seed=0,1"


def test_values_that_are_no_numbers_leave_their_cells_and_charts_out(tmp_path, charts):
    broken = [{**row, "reward/episode": float("nan"), "eval/return": None} for row in rows_of()]
    write_run(tmp_path / "a", rows=broken, config={"kl": {"coef": 1.0}})
    write_run(tmp_path / "b", rows=rows_of(10.0))
    write_run(tmp_path / "c", rows=[], config={"kl": {"coef": 2.0}})
    (tmp_path / "c" / "metrics.jsonl").unlink()
    write_run(tmp_path / "d", rows=[rows_of(1e308)[0]], config={"kl": {"coef": 3.0}})
    text, page = page_of(tmp_path)
    assert page.labels == ["kl.coef=3", "kl.coef=0.1", "kl.coef=1"]
    # Too large for the arithmetic of an axis.
    assert "no value on the axis: kl.coef=1, kl.coef=3<" not in text
    assert text.count("no value on the axis: kl.coef=3<") == 1
    drawn = [re.findall(r"s\d mean", page.charts["Training return"])]
    assert drawn == [["s0 mean"]]
    assert "Evaluation return" not in page.charts
    assert page.row("kl.coef=1", 3) == ["1", "", "1"]
    assert "c: Toy-v1, kl.coef=2, seed 0: finished, without rows" in page.jobs


def test_unfinished_runs_count_on_demand_alone(tmp_path, capsys):
    write_run(tmp_path / "a", status="interrupted")
    assert page_of(tmp_path)[1].labels == []
    assert "--unfinished counts runs" in capsys.readouterr().out
    _, page = page_of(tmp_path, "--unfinished")
    assert page.labels == ["all runs (0 of 1)"]
    assert "interrupted, counted" in page.jobs


def test_a_folder_of_broken_runs_alone_is_refused(tmp_path, capsys):
    (tmp_path / "manifest.json").write_text("{")
    code, _, err = said(capsys, "report", str(tmp_path))
    assert (code, "no run there can be read" in err) == (2, True)


def test_the_report_does_not_import_torch():
    code = "import sys, klrl.report.write, klrl.report.diff; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
