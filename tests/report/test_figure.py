"""``klrl figure`` and ``klrl.Sweep``: numbers against the rows they were written from."""

import re
import sys
import types
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex

import klrl
from klrl.base.errors import ConfigError
from tests.conftest import QUICK
from tests.report.toys import ROWS, rows_of, write_run
from tests.runs.commands import exits

#: kl.coef -> the final return of each seed; return and KL rise by one per row.
RETURNS = {0.1: (100.0, 104.0), 1.0: (50.0, 60.0)}


@pytest.fixture
def sweep() -> klrl.Sweep:
    """Four runs of two settings and a running one; the KL of row i is i."""
    for coef, returns in RETURNS.items():
        for seed, final in enumerate((*returns, *[0.0] * (coef == 1))):
            rows = [{**row, "kl/ref/exact": float(row["iteration"])} for row in rows_of(final)]
            write_run(
                Path("sweep") / f"{coef}-{seed}",
                seed=seed,
                rows=rows,
                config={"kl": {"coef": coef}},
                **({"status": "interrupted"} if seed == 2 else {}),
            )
    return klrl.Sweep("sweep")


def lines(figure, kind: str) -> list:
    return [line for line in figure.subfigs[0].axes[0].lines if str(line.get_gid()).endswith(kind)]


def test_a_curve_is_the_mean_over_seeds(sweep) -> None:
    figure = sweep.figure()
    means = lines(figure, "mean")
    assert [to_hex(line.get_color()) for line in means] == ["#0072b2", "#d55e00"]
    for line, (first, second) in zip(means, RETURNS.values(), strict=True):
        assert list(line.get_xdata()) == [100 * i for i in range(1, ROWS + 1)]
        middle = (first + second) / 2
        assert list(line.get_ydata()) == [middle - ROWS + i for i in range(1, ROWS + 1)]
    assert len(lines(figure, "seed")) == 4
    assert len(lines(klrl.Sweep("sweep", unfinished=True).figure(), "seed")) == 5
    assert figure.get_size_inches()[0] == 3.3


def test_smoothing_takes_the_latest_values(sweep) -> None:
    first, last = lines(sweep.figure("kl/ref/exact", smooth=3), "mean")[0].get_ydata()[[0, -1]]
    assert first == 1.0  # fewer than three values
    assert last == pytest.approx((18 + 19 + 20) / 3)
    assert list(lines(sweep.figure(x="iteration"), "mean")[0].get_xdata()) == [*range(1, ROWS + 1)]


def test_a_metric_against_another_is_a_point_per_setting(sweep) -> None:
    points = lines(sweep.figure(x="kl/ref/exact"), "point")
    # The last tenth of 20 rows: KLs 19 and 20, returns up to 1 less than the final ones.
    at = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in points]
    assert at == [(19.5, 101.5), (19.5, 54.5)]


def test_svg_and_pdf_have_words_labels_with_units_and_the_asked_width(sweep) -> None:
    words = ["kl.coef=0.1", "kl.coef=1", "Frames (environment steps)", "KL(policy||reference)"]
    for name in ("a.svg", "b.svg", "a.pdf", "b.pdf"):
        assert exits("figure", "sweep", "--x", "frames", "--y", "kl/ref/exact", "--out", name) == 0
        assert Path(name).read_bytes() == Path(f"a{Path(name).suffix}").read_bytes()
    root = ElementTree.parse("a.svg").getroot()
    assert root.get("width") == f"{3.3 * 72:g}pt"
    texts = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {*words, "(nats per frame)"} <= {*texts}
    pdf = Path("a.pdf").read_bytes()
    assert re.search(rb"/MediaBox \[ 0 0 237\.6 ", pdf)
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL)
    pages = b"".join(zlib.decompress(each) for each in streams if each[:1] == b"x")
    # A character is two bytes in a string of the page; kerning breaks words in parts.
    shown = re.sub(rb"\)\s-?[\d.]+\s\(", b"", pages.replace(b"\0", b"")).replace(b"\\", b"")
    for each in words:
        assert each.encode() in shown
    assert b"/Type3" not in pdf
    assert b"/CIDFontType2" in pdf, "a TrueType font"


WRITABLE = "give a file in a folder that can be written"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--y kl/ref/exat", "y=kl/ref/exat: no run has this metric; did you mean kl/ref/exact?\n"),
        ("--x framse", "x=framse: no run has this metric; did you mean frames?\n"),
        ("--width 0", "width=0: give 1 to 50 inches\n"),
        ("--smooth 0", "smooth=0: give 1 or more\n"),
        ("--out a.tif", "out=a.tif: give a file that ends with .pdf, .svg, .png\n"),
        ("--out no/a.svg", f"out=no/a.svg: No such file or directory; {WRITABLE}\n"),
        ("--out folder.svg", f"out=folder.svg: Is a directory; {WRITABLE}\n"),
    ],
)
def test_wrong_options_write_nothing(sweep, capsys, options: str, told: str) -> None:
    Path("folder.svg").mkdir()
    before = sorted(Path().rglob("*"))
    assert exits("figure", "sweep", *options.split()) == 2
    assert capsys.readouterr().err == f"klrl figure: {told}"
    assert sorted(Path().rglob("*")) == before


def test_a_sweep_as_columns(sweep) -> None:
    assert repr(sweep) == "Sweep('sweep': 4 finished, 1 interrupted)"
    rows = sweep.frame()
    assert len(rows["frames"]) == 5 * ROWS
    chosen = (rows["setting"] == "kl.coef=0.1") & (rows["seed"] == 1)
    assert list(rows["reward/episode"][chosen]) == [104.0 - ROWS + i for i in range(1, ROWS + 1)]
    about = sweep.summary()
    assert list(about["setting"]) == ["kl.coef=0.1", "kl.coef=1"]
    assert list(about["return"]) == [101.5, 54.5]
    assert np.isnan(about["return_low"]).all(), "two seeds give no interval"
    page = sweep.report()
    assert page == Path("sweep/report/report.html")
    head, *written = (page.parent / "summary.csv").read_text("utf-8").splitlines()
    assert head.split(",") == list(about)
    assert [float(row.split(",")[4]) for row in written] == [101.5, 54.5]


def test_a_notebook_shows_tables_without_markup_of_others(sweep) -> None:
    table = ElementTree.fromstring(sweep._repr_html_().replace("<br>", ""))
    assert [row[0].text for row in table] == ["setting", "kl.coef=0.1", "kl.coef=1"]
    write_run(Path("<b>"), rows=rows_of(7.0))
    cells = [
        [cell.text for cell in row] for row in ElementTree.fromstring(klrl.Run("<b>")._repr_html_())
    ]
    assert cells[:4] == [
        ["run", "<b>"],
        ["status", "finished"],
        ["frames", "2000"],
        ["return", "7"],
    ]


def test_columns_are_pandas_where_it_is_installed(sweep, monkeypatch) -> None:
    stub = types.SimpleNamespace(DataFrame=lambda columns: ("frame", list(columns)))
    monkeypatch.setitem(sys.modules, "pandas", stub)
    kind, names = sweep.runs[0].frame()
    assert kind == "frame"
    assert names == list(rows_of()[0])


def test_a_failed_folder_is_refused() -> None:
    write_run(Path("runs/a"), rows=[], status="running")
    with pytest.raises(ConfigError, match="no run to draw; --unfinished counts"):
        klrl.Sweep("runs").figure()
    with pytest.raises(ConfigError, match="nope: no such folder"):
        klrl.Sweep("nope")


@pytest.mark.integration
def test_multirun_runs_every_combination_and_skips_what_is_finished(capsys) -> None:
    words = (*QUICK, "seed=0,1", "frames=64")
    sweep = klrl.multirun(*words, "sweep=mine")
    assert [run.config.seed for run in sweep.runs] == [0, 1]
    assert [str(run) for run in sweep.runs] == ["outputs/mine/seed=0", "outputs/mine/seed=1"]
    started = [run.manifest["started"] for run in sweep.runs]
    assert [run.manifest["started"] for run in klrl.multirun(*words, "sweep=mine").runs] == started
    assert "2 jobs: 2 finished" in capsys.readouterr().out
    another = klrl.multirun(*QUICK, "frames=64", "seed=7")
    assert another.folder.name.endswith("_sweep")
    assert [run.config.seed for run in another.runs] == [7]
    with pytest.raises(ConfigError, match="already has a run; give another folder"):
        klrl.multirun(*words, folder="outputs/mine")
    with pytest.raises(ConfigError, match="'env=pendulum'.*: not a setting"):
        klrl.multirun(["env=pendulum"])
