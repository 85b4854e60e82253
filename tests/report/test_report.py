"""The report's command: what it reads, counts, names and refuses; what page and CSV hold."""

import base64
import csv
import hashlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from klrl.report.__main__ import main
from klrl.report.charts import against_kl
from klrl.report.measures import summary_lines
from klrl.report.runs import find_runs
from klrl.report.settings import group_runs, name_settings, names_of
from tests.report.toys import (
    MARKUP,
    page_of,
    rows_of,
    told,
    write_marked_up,
    write_run,
    write_runs,
    write_sweep,
)

pytestmark = pytest.mark.integration


def settings_of(root):
    runs = find_runs([str(root)]).runs
    return group_runs(runs, names_of(runs))


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
    settings, replaced = settings_of(tmp_path)
    assert [s.name for s in settings] == ["kl.coef=0.1", "kl.coef=1"]
    paths = [run.path for run in settings[0].runs]
    assert paths == [
        tmp_path / "a",
        again,
        *(tmp_path / g for g in ("launcher", "search", "sweep")),
    ]
    assert [run.path for run in replaced] == [tmp_path / "b"]


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


def test_a_preset_is_named_as_it_was_typed(tmp_path):
    argv = ["python", "-m", "klrl"]
    for i, (typed, rule) in enumerate((("klpen", "doubling"), ("klpen_held", "held"))):
        config = {"loss": {"name": "klpen", "beta_rule": rule, "beta_max": 1.0 + i}}
        write_run(tmp_path / f"{i}", config=config, argv=[*argv, "kl=legacy", f"loss={typed}"])
    # A resume changed the loss after that.
    config = {"loss": {"name": "clip"}}
    write_run(tmp_path / "2", config=config, argv=[*argv, "loss=klpen_held"])
    runs = find_runs([str(tmp_path)]).runs
    assert set(names_of(runs).values()) == {"loss=klpen", "loss=klpen_held", "loss=clip"}


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
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttp|import\(", text)
    for name in ("curves", "frontier", "more"):
        assert (folder / f"Toy_v1_{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / f"Toy_v1_{name}.svg").read_text()[:1000]


def test_the_page_holds_the_numbers(report):
    _, text, page = report
    # Final: mean of the last two rows is half below the last. The failed seed's is its fourth.
    label = "kl=legacy kl.coef=0.1 (3 of 4)"
    ((root, gain),) = told(dict(page.charts)["Return against sqrt(KL(policy||reference))"], label)
    # Roots 2, 2, 2, 1; returns 99.5, 101.5, 109.5, -16.
    assert root == "1.75 (1 to 2)"
    assert gain == "73.6 (-16 to 110)\nrange of 4 seeds; 3 of 4 finished"
    # Below five seeds the range comes first; IQM: the mean of 99.5 and 101.5; the KL's range.
    i = page.cells.index("kl=legacy kl.coef=0.1")
    row = ["3 of 4", "-16 to 110|mean 74", "100", "-16", "1.0 to 4.0|mean 3.2"]
    assert page.cells[i + 1 : i + 6] == row
    i = page.cells.index("kl=retrieve kl.coef=1", page.cells.index("kl=retrieve"))
    assert page.cells[i + 1 : i + 7] == ["0.01", "0.1", "1", "1", "200", "10"]
    # sqrt(KL) from 1 to 2: levels at 1.25, 1.5, 1.75; returns between 53.5 and 103.5.
    i = page.cells.index("kl=legacy")
    values = [cell.partition("|mean ")[2] for cell in page.cells[i + 1 : i + 4]]
    assert values == ["66.0", "78.5", "91.0"]
    assert "KL = 1.56<small>nats per frame</small>" in text
    i = page.cells.index("failed; counted")
    error = "iteration 5: the loss is nan; try a smaller optim.lr <"
    assert page.cells[i + 2 : i + 5] == ["3", "4", error]
    assert "python -m klrl kl.coef=0.1 seed=0" in page.commands
    assert "broken/metrics.jsonl: its rows have no frames" in text
    assert "/somewhere" not in text


def test_the_summary_has_the_numbers_in_full(report):
    lines = table(report[0] / "summary.csv")
    assert len(lines) == 4
    assert (lines[0]["seeds"], lines[0]["finished"]) == ("4", "3")
    assert (float(lines[0]["return"]), float(lines[0]["return_iqm"])) == (73.625, 100.5)
    assert (float(lines[0]["worst_return"]), float(lines[0]["kl_ref"])) == (-16, 3.25)


def test_a_curve_is_drawn_where_its_axes_say_and_the_script_reads_it_there(report):
    _, text, page = report
    (svg,) = re.findall(r"<figcaption>Training return</figcaption>(.*?)</figure>", text, re.S)
    label = "kl=retrieve kl.coef=1"
    (of,) = [
        each for each in dict(page.charts)["Training return"]["series"] if each["name"] == label
    ]
    (path,) = re.findall(rf'class="mean" data-s="{of["i"]}"><path d="([^"]*)"', svg)
    x, y = np.array(re.findall(r"[-.\d]+", path), float).reshape(-1, 2).T
    np.testing.assert_allclose([point[:2] for point in of["points"]], np.c_[x, y], atol=0.06)
    (seeds,) = re.findall(rf'class="seed" data-s="{of["i"]}"><path d="([^"]*)"', svg)
    assert seeds.count("M") == 3
    # Names of the ticks, and the lines of the grid.
    below = re.findall(r'text-anchor="middle" x="([.\d]+)"[^>]*>([.\d]+)(k?)<', svg)
    below = [(float(at), float(name) * (1000 if k else 1)) for at, name, k in below]
    beside = re.findall(r'text-anchor="end"[^>]*>(-?\d+)<', svg)
    grid = re.findall(r'd="M [.\d]+ ([.\d]+) L [.\d]+ \1 " [^>]*stroke="var\(--line\)"', svg)
    frames = np.polyval(np.polyfit(*np.array(below).T, 1), x)
    np.testing.assert_allclose(frames, 100 * np.arange(1, 21), atol=1)
    returns = np.polyval(np.polyfit(np.array(grid, float), np.array(beside, float), 1), y)
    # The mean of what seeds add, 0, 2 and 10, to a return that rises by 1 to 40.
    np.testing.assert_allclose(returns, np.arange(21, 41) + 4, atol=0.1)


def test_the_same_runs_make_the_same_bytes(report, tmp_path, pictures):
    folder = report[0]
    main([str(folder.parent), "-o", str(tmp_path)])
    for name in ("report.html", "Toy_v1_curves.svg", "Toy_v1_more.svg"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_the_page_has_a_policy_that_lets_its_own_script_run_and_nothing_else(report):
    text = report[1]
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert text.index(policy) < min(text.index("<style"), text.index("<script"))
    for tag in ("script", "style"):
        (own,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert rules.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert rules == {
        "default-src": "'none'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not re.search(r"<[^>]* style=", text), "the policy would not apply it"


def test_no_string_of_a_run_folder_becomes_markup(tmp_path):
    """As a browser reads it: no element and no handler is there that klrl did not write."""
    page = page_of(write_marked_up(tmp_path))[1]
    assert "planted" not in page.ids
    assert page.handlers == []
    assert (page.tags["img"], page.tags["script"], page.tags["style"]) == (0, 2, 1)
    # It is all there, as text.
    assert any(MARKUP in cell for cell in page.cells)
    assert any(MARKUP in label for label in page.labels)
    assert MARKUP in page.commands


def test_no_string_of_a_run_folder_turns_or_hides_text(tmp_path, capsys):
    """Bidi overrides, zero width characters and terminal escapes: in the page, its data, stdout."""
    text, page = page_of(write_marked_up(tmp_path, "\u202e\u200bx\x1b[2J"))
    shown = [text, capsys.readouterr().out]
    data = re.search(r'id="data">(.*?)</script>', text).group(1)
    shown.append(json.dumps(json.loads(data), ensure_ascii=False).replace(r"\u001b", "\x1b"))
    for each in shown:
        assert not set(each) & set("\u202e\u200b\x1b")
    assert any(r"\u202e\u200bx\x1b[2J" in cell for cell in page.cells)


# -------------------------------------------------------------------------------------- the command


def test_points_against_kl_have_the_interval_of_the_roots(tmp_path):
    for seed, kl in enumerate((1.0, 9.0, 4.0, 4.0, 4.0)):
        write_run(tmp_path / f"{seed}", seed=seed, rows=rows_of(10.0, kl))
    (chart,) = against_kl(summary_lines(settings_of(tmp_path)[0]), {})
    (point,) = chart.series[0]
    assert (point.x, point.y.value, point.y.seeds) == (2, 9.5, 5)
    # Roots 1, 3, 2, 2, 2: standard error sqrt(1 / 2 / 5), times 2.776445.
    ends = [2 - 2.776445 * 0.1**0.5, 2 + 2.776445 * 0.1**0.5]
    assert [point.across.low, point.across.high] == pytest.approx(ends, abs=1e-5)


def test_the_gold_score_has_curves_a_frontier_and_a_column(tmp_path, charts):
    # (kl.coef, KL, reward, gold): more KL, more reward, and too much of it for the gold score.
    runs = [(1.0, 1.0, 0.5, 0.4), (0.1, 4.0, 0.8, 0.7), (0.0, 9.0, 0.9, 0.2)]
    for coef, kl, reward, gold in runs:
        row = {"reward/episode": reward, "reward/gold": gold, "kl/ref/exact_seq": kl}
        rows = [{"samples": 10 * i, **row} for i in range(1, 5)]
        rows[-1]["eval/gold"] = gold + 0.05
        config = {"env": {"id": None, "name": "sort_digits"}, "kl": {"coef": coef}}
        write_run(tmp_path / "words" / f"{coef}", rows=rows, config=config)
    html, page = page_of(tmp_path)
    words = dict(page.charts)
    assert "proxy of the gold score" in html
    golds = words["Gold score against sqrt(KL(policy||reference))"]
    assert golds["x"] == "sqrt(KL(policy||reference)), KL in nats per response: "
    points = {name: told(golds, f"kl.coef={name}") for name in ("0", "0.1", "1")}
    assert points == {
        "0": [("3", "0.2\n1 seed")],
        "0.1": [("2", "0.7\n1 seed")],
        "1": [("1", "0.4\n1 seed")],
    }
    training = told(words["Sampled training gold score"], "kl.coef=0")
    assert training[-1] == ("40", "0.2\n1 seed")
    assert told(words["Greedy evaluation gold score"], "kl.coef=0") == [("40", "0.25\n1 seed")]
    lines = {line["setting"]: line for line in table(tmp_path / "report/summary.csv")}
    assert float(lines["kl.coef=0"]["gold"]) == pytest.approx(0.2)


@pytest.mark.parametrize("task", [{"id": "Toy-v1"}, {"id": None, "name": "sort_digits"}])
def test_a_page_without_a_gold_score_does_not_mention_one(tmp_path, task):
    row = {"reward/episode": 0.5, "kl/ref/exact": 0.1, "eval/return": 0.6, "eval/kl_ref": 0.2}
    axis = "frames" if task["id"] else "samples"
    rows = [{axis: 10 * i, **row} for i in range(1, 5)]
    write_run(tmp_path / "run", rows=rows, config={"env": task})
    html, page = page_of(tmp_path)
    assert sum("against sqrt(KL" in name for name, _ in page.charts) == 2
    assert "gold score" not in html.lower()


def test_a_spreadsheet_reads_no_text_as_a_formula_and_every_number_as_one(tmp_path):
    formulas = ['=HYPERLINK("http://x")', "+1", "-1+cmd|' /C calc'!A1", "@SUM(1)", "\t=1"]
    for i, task in enumerate([*formulas, "Toy-v1"]):
        write_run(tmp_path / f"{i}", config={"env": {"id": task}}, rows=rows_of(-5.0))
    main([str(tmp_path)])
    lines = table(tmp_path / "report" / "summary.csv")
    assert {line["task"] for line in lines} == {*(f"'{each}" for each in formulas), "Toy-v1"}
    assert {float(line["worst_return"]) for line in lines} == {-5.5}


def test_tasks_of_like_names_have_charts_of_their_own(tmp_path):
    for i, name in enumerate(("a-b", "a/b", "a b", "-")):
        write_run(tmp_path / f"{i}", config={"env": {"id": name}})
    text = page_of(tmp_path)[0]
    keys = re.findall(r'data-chart="([^"]*)"', text)
    assert len(set(keys)) == len(keys) > 20


def test_a_sweep_tells_of_jobs_that_never_started_and_why_jobs_failed(tmp_path, capsys):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1, status="failed", rows=[])
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
    counts = "1 refused, 1 waiting, 1 finished, but there is no run folder"
    assert f"2 runs in 1 setting; not counted: {counts}" in out
    i = page.cells.index("failed; counted")
    jobs = [page.cells[k : k + 5] for k in range(i, i + 24, 6)]
    assert jobs == [
        ["failed; counted", "all runs", "1", "0", "the simulator fell over"],
        ["refused", "kl.coef=1", "7", "", "no GPU here"],
        ["waiting", "kl.coef=1", "0", "", ""],
        ["finished, but there is no run folder", "kl.coef=2", "", "", ""],
    ]
    assert page.commands.splitlines()[0] == "python -m klrl -m kl.coef=0,1 seed=0,1"


def test_values_that_are_no_numbers_leave_their_cells_and_charts_out(tmp_path, charts):
    broken = [{**row, "reward/episode": float("nan"), "eval/return": None} for row in rows_of()]
    write_run(tmp_path / "a", rows=broken, config={"kl": {"coef": 1.0}})
    write_run(tmp_path / "b", rows=rows_of(10.0))
    write_run(tmp_path / "c", rows=[], config={"kl": {"coef": 2.0}})
    (tmp_path / "c" / "metrics.jsonl").unlink()
    write_run(tmp_path / "d", rows=[rows_of(1e308)[0]], config={"kl": {"coef": 3.0}})
    text, page = page_of(tmp_path)
    assert page.labels == ["kl.coef=0.1", "kl.coef=1 (none has a return)", "kl.coef=3"]
    assert [series["i"] for series in page.charts[0][1]["series"]] == [0]
    # Too large for the arithmetic of an axis.
    assert text.count("Without a value that the axes can show: kl.coef=3<") == 2
    assert "Evaluation return" not in dict(page.charts)
    i = page.cells.index("kl.coef=1")
    assert page.cells[i + 1 : i + 4] == ["1|none has a return", "", "1"]
    assert "finished, without rows" in page.cells


def test_unfinished_runs_count_on_demand_alone(tmp_path, capsys):
    write_run(tmp_path / "a", status="interrupted")
    assert page_of(tmp_path)[1].labels == []
    assert "--unfinished counts runs" in capsys.readouterr().out
    _, page = page_of(tmp_path, "--unfinished")
    assert page.labels == ["all runs (0 of 1)"]
    assert "interrupted; counted" in page.cells


def test_a_folder_of_broken_runs_alone_is_refused(tmp_path, capsys):
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
    assert "no run there can be read" in capsys.readouterr().err


def test_the_report_does_not_import_torch():
    code = "import sys, klrl.report.write, klrl.report.diff; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
