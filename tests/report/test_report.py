"""The report's command: what it reads, counts, names and refuses; what page and CSV hold."""

import csv
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from klrl.cli.report import main
from klrl.report.runs import command_line, find_runs, read_columns
from klrl.report.settings import group_runs, name_settings, names_of
from tests.report.toys import (
    MARKUP,
    Page,
    page_of,
    rows_of,
    write_marked_up,
    write_run,
    write_runs,
    write_sweep,
)

pytestmark = pytest.mark.integration

# -------------------------------------------------------------------------------------- run folders


def test_checkpoints_and_overlapping_paths_are_no_further_runs(tmp_path):
    run = write_run(tmp_path / "s" / "a")
    (run / "checkpoints" / "last" / "1").mkdir(parents=True)
    (run / "checkpoints" / "last" / "1" / "manifest.json").write_text("{}")
    found = find_runs([str(tmp_path), str(run)])
    assert (len(found.runs), found.skipped) == (1, [])


def test_seeds_and_loggers_make_no_setting_and_a_run_again_replaces(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, config={"logger": {"name": "wandb"}})
    again = write_run(tmp_path / "c", seed=1, started="2026-02-01T00:00:00+00:00")
    write_run(tmp_path / "d", seed=0, config={"kl": {"coef": 1.0}})
    runs = find_runs([str(tmp_path)]).runs
    settings, replaced = group_runs(runs, names_of(runs))
    assert [s.name for s in settings] == ["kl.coef=0.1", "kl.coef=1"]
    assert [run.path for run in settings[0].runs] == [tmp_path / "a", again]
    assert [run.path for run in replaced] == [tmp_path / "b"]


def test_names_leave_out_what_divides_nothing_further():
    settings = [
        {"loss.dtarg": 0.01, "loss.name": "klpen"},
        {"loss.clip": 0.2, "loss.name": "clip"},
        {"loss.clip": 0.3, "loss.name": "clip"},
    ]
    assert name_settings(settings) == [
        "loss.name=klpen",
        "loss.name=clip loss.clip=0.2",
        "loss.name=clip loss.clip=0.3",
    ]


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


def test_an_older_run_without_a_newer_setting_is_named_by_its_version():
    settings = [{"kl.coef": 0.1, "numerics": 1}, {"kl.coef": 0.1, "new": 2, "numerics": 2}]
    assert name_settings(settings) == ["numerics=1", "numerics=2"]
    assert name_settings([{"a": 1}, {"a": 1, "b": None}]) == ["no b", "b=null"]


@pytest.mark.parametrize("group", ["launcher", "search", "sweep"])
def test_how_jobs_are_run_tells_no_settings_apart(group, tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, config={group: {"name": "joblib", "jobs": 2}})
    write_run(tmp_path / "c", seed=2, config={group: "again"})
    runs = find_runs([str(tmp_path)]).runs
    settings, _ = group_runs(runs, names_of(runs))
    assert [(s.name, len(s.runs)) for s in settings] == [("all runs", 3)]


def test_commands_have_no_paths_of_the_machine():
    words = ["-m", "kl.coef=0,1", "env.kwargs={a: 1}"]
    told = "python -m klrl -m kl.coef=0,1 'env.kwargs={a: 1}'"
    assert command_line(["/venv/bin/python", "-m", "klrl", *words]) == told
    assert command_line(["/venv/bin/python", "/venv/bin/klrl", *words]) == told


def test_a_cut_off_last_line_is_left_out_and_absent_values_are_nan(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"frames": 1, "a": 2}\n{"frames": 2}\n{"frames": 3, "a"')
    columns = read_columns(file)
    np.testing.assert_array_equal(columns["frames"], [1, 2])
    np.testing.assert_array_equal(columns["a"], [2, np.nan])


def test_the_manifest_tells_the_domain_and_an_older_run_its_columns(tmp_path):
    words = [{"samples": i, "reward/episode": 1.0} for i in range(1, 5)]
    write_run(tmp_path / "a", rows=words, domain="language")
    write_run(tmp_path / "b", rows=words)
    write_run(tmp_path / "c", domain="control")
    write_run(tmp_path / "d")
    runs = find_runs([str(tmp_path)]).runs
    assert [run.domain.name for run in runs] == ["language", "language", "control", "control"]
    assert [run.axis for run in runs] == ["samples", "samples", "frames", "frames"]


@pytest.mark.parametrize(
    "more, told",
    [
        ({"domain": "chess"}, r"names the domain 'chess', which this klrl does not know"),
        ({"domain": "language"}, r"metrics.jsonl: its rows have no samples"),
        ({"rows": [{"reward/raw": 1.0}]}, r"metrics.jsonl: its rows have no frames"),
    ],
)
def test_a_run_without_its_axis_is_named_and_skipped(more, told, tmp_path):
    write_run(tmp_path / "a", **more)
    found = find_runs([str(tmp_path)])
    assert found.runs == []
    assert re.search(told, found.skipped[0])


def test_a_running_job_whose_process_is_gone_was_interrupted(tmp_path):
    write_run(tmp_path / "a", status="running", pid=1, pid_started="another process")
    assert find_runs([str(tmp_path)]).runs[0].status == "interrupted"


# -------------------------------------------------------------------------------------- the command


@pytest.fixture
def sweep(tmp_path):
    return write_runs(tmp_path / "sweep")


def test_the_page_holds_the_numbers_and_nothing_from_outside(sweep, capsys):
    text, page = page_of(sweep)
    told = capsys.readouterr()
    assert "13 runs in 4 settings\n" in told.out
    assert re.search(r"skipped .*broken.metrics.jsonl: its rows have no frames", told.err)
    for link in page.links:
        anchored = link.startswith("#") and link[1:] in page.ids
        assert anchored or link == "data:," or (sweep / "report" / link).is_file(), link
    assert "http" not in text.replace("http-equiv", "")
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttp|import\(", text)

    # Final: mean of the last two rows is half below the last. The failed seed's is its fourth.
    chart = json.loads(page.data)[0]["charts"][0]
    series = {each["i"]: each for each in chart["series"]}
    names = json.loads(page.data)[0]["settings"]
    at = names.index("kl=legacy kl.coef=0.1 (3 of 4)")
    assert series[at]["points"] == [[1.75, 73.625, None, None, 4, None, None]]
    assert series[at]["seeds"] == [[99.5], [101.5], [109.5], [-16]]
    assert series[at]["places"] == [2, 2, 2, 1]
    assert json.loads(page.data)[0]["failed"][at] == [None, None, None, 400]
    assert chart["front"] == []
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
    assert page.cells[i + 2 : i + 5] == [
        "3",
        "4",
        "iteration 5: the loss is nan; try a smaller optim.lr <",
    ]
    assert "python -m klrl kl.coef=0.1 seed=0" in text
    assert "/somewhere" not in text


def test_points_against_kl_have_the_interval_of_the_roots(tmp_path):
    for seed, kl in enumerate((1.0, 9.0, 4.0, 4.0, 4.0)):
        write_run(tmp_path / f"{seed}", seed=seed, rows=rows_of(10.0, kl))
    _, page = page_of(tmp_path)
    point = json.loads(page.data)[0]["charts"][0]["series"][0]["points"][0]
    # Roots 1, 3, 2, 2, 2: standard error sqrt(1 / 2 / 5), times 2.776445.
    assert point[:5] == [2, 9.5, 9.5, 9.5, 5]
    assert point[5:] == pytest.approx([2 - 2.776445 * 0.1**0.5, 2 + 2.776445 * 0.1**0.5], abs=1e-5)


def test_the_gold_score_has_curves_a_frontier_and_a_column(tmp_path):
    # (kl.coef, KL, reward, gold): more KL, more reward, and too much of it for the gold score.
    table = [(1.0, 1.0, 0.5, 0.4), (0.1, 4.0, 0.8, 0.7), (0.0, 9.0, 0.9, 0.2)]
    for coef, kl, reward, gold in table:
        row = {"reward/episode": reward, "reward/gold": gold, "kl/ref/exact_seq": kl}
        rows = [{"samples": 10 * i, **row} for i in range(1, 5)]
        rows[-1]["eval/gold"] = gold + 0.05
        config = {"env": {"id": None, "name": "sort_digits"}, "kl": {"coef": coef}}
        write_run(tmp_path / "words" / f"{coef}", rows=rows, config=config)
    write_run(tmp_path / "control")
    _, page = page_of(tmp_path)
    control, words = json.loads(page.data)
    assert "Gold" not in str(control)
    charts = {chart["title"].partition(" against")[0]: chart for chart in words["charts"]}
    assert [each["points"][0][1] for each in charts["Gold score"]["series"]] == [0.2, 0.7, 0.4]
    of = words["settings"].index("kl.coef=0")
    assert charts["Sampled training gold score"]["series"][of]["points"][-1][:2] == [40, 0.2]
    assert charts["Greedy evaluation gold score"]["series"][of]["points"] == [
        [40, 0.25, None, None, 1]
    ]
    with (tmp_path / "report" / "summary.csv").open() as file:
        lines = {(line["task"], line["setting"]): line for line in csv.DictReader(file)}
    assert float(lines["sort_digits", "kl.coef=0"]["gold"]) == pytest.approx(0.2)
    assert [line["gold"] for key, line in lines.items() if key[0] == "Toy-v1"] == [""]


def test_a_spreadsheet_reads_no_text_as_a_formula_and_every_number_as_one(tmp_path):
    formulas = ['=HYPERLINK("http://x")', "+1", "-1+cmd|' /C calc'!A1", "@SUM(1)", "\t=1"]
    for i, task in enumerate([*formulas, "Toy-v1"]):
        write_run(tmp_path / f"{i}", config={"env": {"id": task}}, rows=rows_of(-5.0))
    main([str(tmp_path), "-o", str(tmp_path / "report")])
    with (tmp_path / "report" / "summary.csv").open(newline="") as file:
        lines = {line["task"]: line for line in csv.DictReader(file)}
    assert set(lines) == {*(f"'{each}" for each in formulas), "Toy-v1"}
    assert {float(line["worst_return"]) for line in lines.values()} == {-5.5}


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


def test_a_sweep_without_any_run_has_a_page(tmp_path):
    write_sweep(tmp_path, ("a", ["seed=0"], "waiting", None))
    assert "waiting" in page_of(tmp_path)[1].cells


@pytest.mark.parametrize("text", ["{", "[]", '{"jobs": [{"status": "waiting"}]}', '{"jobs": [1]}'])
def test_a_broken_sweep_is_named_and_skipped(text, tmp_path, capsys):
    write_run(tmp_path / "a")
    (tmp_path / "sweep.json").write_text(text)
    main([str(tmp_path)])
    told = capsys.readouterr()
    assert re.fullmatch(r"klrl report: skipped .*sweep.json: the list of jobs is .*\n", told.err)
    assert "1 run in 1 setting" in told.out


def test_csv_and_pictures_lie_beside_the_page(sweep, pictures, tmp_path):
    main([str(sweep), "-o", str(tmp_path / "there")])
    for link in Page((tmp_path / "there" / "report.html").read_text()).links:
        assert link.startswith(("#", "data:,")) or (tmp_path / "there" / link).is_file(), link
    with (tmp_path / "there" / "summary.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 4
    assert (lines[0]["seeds"], lines[0]["finished"]) == ("4", "3")
    assert (float(lines[0]["return"]), float(lines[0]["return_iqm"])) == (73.625, 100.5)
    assert (float(lines[0]["worst_return"]), float(lines[0]["kl_ref"])) == (-16, 3.25)
    for name in ("curves", "frontier", "more"):
        stem = tmp_path / "there" / f"Toy_v1_{name}"
        assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in stem.with_suffix(".svg").read_text()[:1000]


@pytest.mark.slow
def test_tasks_of_like_names_have_files_of_their_own(pictures, tmp_path):
    for i, name in enumerate(("a-b", "a/b", "a b", "-")):
        write_run(tmp_path / f"{i}", config={"env": {"id": name}})
    main([str(tmp_path)])
    pages = Page((tmp_path / "report" / "report.html").read_text())
    pictures = [link for link in pages.links if link.endswith(".png")]
    assert len(set(pictures)) == 12
    assert all((tmp_path / "report" / name).is_file() for name in pictures)


def test_values_that_are_no_numbers_leave_their_cells_and_charts_out(tmp_path):
    broken = [{**row, "reward/episode": float("nan"), "eval/return": None} for row in rows_of()]
    write_run(tmp_path / "a", rows=broken, config={"kl": {"coef": 1.0}})
    write_run(tmp_path / "b", rows=rows_of(10.0))
    write_run(tmp_path / "c", rows=[], config={"kl": {"coef": 2.0}})
    (tmp_path / "c" / "metrics.jsonl").unlink()
    _, page = page_of(tmp_path)
    task = json.loads(page.data)[0]
    assert task["settings"] == ["kl.coef=0.1", "kl.coef=1 (none has a return)"]
    assert [series["i"] for series in task["charts"][0]["series"]] == [0]
    assert "Evaluation return" not in {chart["title"] for chart in task["charts"]}
    i = page.cells.index("kl.coef=1")
    assert page.cells[i + 1 : i + 4] == ["1|none has a return", "", "1"]
    assert "finished, without rows" in page.cells


def test_runs_without_kl_and_language_runs_have_a_page(tmp_path):
    bare = [{"frames": row["frames"], "reward/raw": 1.0} for row in rows_of()]
    write_run(tmp_path / "bare", rows=bare, config={"kl": {"name": "none"}})
    words = [
        {"samples": i, "frames": 9 * i, "reward/episode": 1.0, "kl/ref/exact_seq": 9.0}
        for i in range(1, 5)
    ]
    write_run(tmp_path / "words", rows=words, config={"env": {"id": None, "name": "sort_digits"}})
    text, page = page_of(tmp_path)
    tasks = json.loads(page.data)
    assert "<h2>sort_digits</h2>" in text
    assert tasks[0]["charts"][0]["series"] == []
    assert tasks[1]["charts"][0]["series"][0]["points"][0][:2] == [3.0, 1.0]
    assert tasks[1]["charts"][0]["x"] == "sqrt(KL(policy||reference)), KL in nats per response"


def test_unfinished_runs_count_on_demand_alone(tmp_path, capsys):
    write_run(tmp_path / "a", status="interrupted")
    assert json.loads(page_of(tmp_path)[1].data) == []
    assert "--unfinished counts runs" in capsys.readouterr().out
    _, page = page_of(tmp_path, "--unfinished")
    assert len(json.loads(page.data)) == 1
    assert "interrupted; counted" in page.cells


def test_a_folder_of_broken_runs_alone_is_refused(tmp_path, capsys):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "broken")])
    assert "no run there can" in capsys.readouterr().err


def test_the_report_does_not_import_torch():
    code = "import sys, klrl.report.write, klrl.report.diff; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_string_of_a_run_folder_becomes_markup(tmp_path):
    """As a browser reads it: no element and no attribute is there that klrl did not write."""
    from html.parser import HTMLParser

    class Elements(HTMLParser):
        def __init__(self):
            super().__init__()
            self.scripts, self.tags, self.handlers, self.text = [], set(), [], ""

        def handle_starttag(self, tag, attributes):
            self.tags.add(tag)
            self.handlers += [key for key, _ in attributes if key.startswith("on")]
            assert ("id", "planted") not in attributes

        def handle_data(self, text):
            self.text += text
            if self.get_starttag_text().startswith("<script"):
                self.scripts.append(text)

    main([str(write_marked_up(tmp_path / "runs")), "-o", str(tmp_path / "report")])
    text = (tmp_path / "report" / "report.html").read_text()
    page = Elements()
    page.feed(text)
    assert "img" not in page.tags
    assert page.handlers == []
    assert text.count("<script") == text.count("</script") == 3
    assert text.count("<style") == text.count("</style") == 1
    # It is all there, as text.
    assert MARKUP in page.text
    assert any(MARKUP in name for task in json.loads(Page(text).data) for name in task["settings"])


def test_the_page_has_a_policy_that_lets_its_own_scripts_run_and_nothing_else(tmp_path):
    import base64
    import hashlib

    write_run(tmp_path / "run")
    text, _ = page_of(tmp_path)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert text.index(policy) < min(text.index("<style"), text.index("<script"))

    def digests(tag):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        hashed = (hashlib.sha256(each.encode()).digest() for each in texts)
        return [f"'sha256-{base64.b64encode(each).decode()}'" for each in hashed]

    assert rules.pop("script-src").split() == digests("script")
    assert rules.pop("style-src").split() == digests("style")
    assert rules == {
        "default-src": "'none'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not re.search(r"<[^>]* style=", text), "the policy would not apply it"
