"""The report's page as a reader has it: headless Chromium, from the disk."""

import re

import pytest

from klrl.cli.report import main
from tests.report.chromium import CHROMIUM, NONE_HERE, chromium
from tests.report.toys import MARKUP, rows_of, write_marked_up, write_run, write_runs, write_sweep

pytestmark = [pytest.mark.integration, pytest.mark.skipif(CHROMIUM is None, reason=NONE_HERE)]

#: Widths of a desk and of a phone, in pixels.
WIDTHS = (1240, 420)
LEGACY = "kl=legacy kl.coef=0.1"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Three tasks: two modes with three seeds each, a language task with gold, twelve settings."""
    root = tmp_path_factory.mktemp("sweep")
    write_runs(root)
    for seed, reward in enumerate((30.0, 32.0, 34.0, 36.0, 38.0)):
        rows = rows_of(reward, 9.0)
        config = {"kl": {"coef": 10.0}}
        write_run(root / f"five_{seed}", seed=seed, rows=rows, config=config)
    for i in range(12):
        config = {"env": {"id": "Many-v1"}, "kl": {"coef": float(i)}}
        # Names of seven digits on the axis, that tell 32.0001 M from 32.0002 M.
        write_run(root / f"many_{i}", rows=rows_of(3.2e7 + 10.0 * i, 0.5 + i), config=config)
    for coef, kl in ((0.1, 1e-9), (0.0, 2.0)):
        row = {"reward/episode": -0.6, "reward/gold": 0.5 - coef, "kl/ref/exact_seq": kl}
        config = {"env": {"id": None, "name": "sort_digits"}, "kl": {"coef": coef}}
        rows = [{"samples": 100 * i, "kl/ref/coef": coef, **row} for i in range(1, 5)]
        write_run(root / f"words_{coef}", rows=rows, config=config)
    write_sweep(root, ("never", ["kl.coef=3"], "waiting", None))
    main([str(root)])
    return root / "report" / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture
def tab(browser, page):
    browser.scheme("light")
    browser.size(WIDTHS[0])
    browser.open(page.as_uri())
    return browser


#: How many marks of each kind each chart has, by task and title.
DRAWN = """[...document.querySelectorAll('section[id^=task]')].map(s => [
  s.querySelector('h2').textContent,
  Object.fromEntries([...s.querySelectorAll('figure')].map(f => [
    (f.querySelector('svg text') ?? f).textContent,
    ['mean', 'band', 'seed', 'point', 'up', 'dot', 'failed']
      .map(c => f.querySelectorAll('.' + c).length)]))])"""
OPEN = "document.querySelectorAll('details.more').forEach(each => { each.open = true; })"
FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
#: Tables that are wider than their box.
WIDER = """[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1)
  .map(e => e.getAttribute('aria-label'))"""
#: Names on an axis that lie on each other, and text that sticks out of its chart.
CROWDED = """[...document.querySelectorAll('figure svg')].flatMap(svg => {
  const inside = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll('text')];
  const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
  const out = boxes.filter(([, b]) => b.left < inside.left - 1 || b.right > inside.right + 1
    || b.top < inside.top - 1 || b.bottom > inside.bottom + 1).map(([t]) => 'outside: ' + t);
  boxes.forEach(([t, a], i) => boxes.slice(i + 1).forEach(([u, b]) => {
    if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
      out.push(t + ' on ' + u); }));
  return out; })"""


def test_the_harness_hears_errors_and_requests(browser):
    browser.open("data:text/html,<script>console.error('one'); fetch('data:,x'); two()</script>")
    assert browser.said[0] == "one"
    assert "two is not defined" in browser.said[1]
    assert browser.requests[1:] == ["data:,x"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_chart_is_drawn_without_a_word_or_a_request(width, scheme, browser, page):
    browser.size(width)
    browser.scheme(scheme)
    browser.open(page.as_uri())
    folded = dict(browser.ask(DRAWN))["Toy-v1"]
    assert list(folded)[:2] == ["Return against sqrt(KL(policy||reference))", "Training return"]
    assert sum(map(sum, list(folded.values())[2:])) == 0
    browser.ask(OPEN)
    browser.ask(FRAME)
    drawn = dict(browser.ask(DRAWN))
    # Lines, bands, lines of seeds, points, intervals, seeds, failed ones.
    toy = drawn["Toy-v1"]
    # Three seeds each, and one that failed; five of the last.
    assert toy.pop("Return against sqrt(KL(policy||reference))") == [0, 0, 0, 5, 1, 17, 1]
    # Lines of the seeds where it is a result, and of the failed one a second, broken; else dots.
    assert toy.pop("Training return")[:3] == [5, 1, 19]
    assert [counts[:3] + counts[5:] for counts in toy.values()] == [[5, 1, 0, 17, 1]] * 5
    if width == WIDTHS[0]:
        assert browser.ask(WIDER) == []
    assert drawn["Many-v1"]["Return against sqrt(KL(policy||reference))"][3:6] == [12, 0, 12]
    assert drawn["Many-v1"]["Training return"] == [7, 0, 7, 0, 0, 0, 0]
    words = drawn["sort_digits"]
    assert words["Gold score against sqrt(KL(policy||reference))"][3] == 2
    assert words["Sampled training gold score"][0] == 2
    # The coefficient 0 has no place on a logarithmic axis, and the page says so.
    assert words["kl.coef"][0] == 1
    said = "[...document.querySelectorAll('figure p')].map(p => p.textContent)"
    assert browser.ask(said) == ["Not above 0, so not drawn: kl.coef=0"]
    assert "NaN" not in browser.ask("document.querySelector('main').innerHTML")
    assert browser.ask(CROWDED) == []
    assert browser.ask("document.documentElement.scrollWidth") == width
    assert browser.said == []
    assert [address for address in browser.requests if not address.startswith("data:")] == [
        page.as_uri()
    ]


def test_pointing_at_a_setting_shows_its_values(tab):
    legacy = tab.ask(
        f"[...document.querySelectorAll('#task-2 label')].findIndex("
        f"l => l.textContent === '{LEGACY} (3 of 4)')"
    )
    tab.point(*tab.middle(f"#task-2 figure g.setting:nth-of-type({legacy + 1}) .point"))
    tip = tab.ask("getComputedStyle(tip).display === 'block' && tip.textContent").splitlines()
    assert tip[0] == f"{LEGACY} (3 of 4)"
    assert tip[1].endswith("KL in nats per frame: 1.75 (1 to 2)")
    assert tip[2:] == [
        "final return per episode: 73.6 (-16 to 110)",
        "range of 4 seeds; 3 of 4 finished",
    ]
    tab.point(1, 1)
    assert tab.ask("getComputedStyle(tip).display") == "none"


def test_values_that_were_tapped_stay_until_the_page_is_scrolled(tab):
    shown = "getComputedStyle(tip).display"
    tab.size(WIDTHS[1], 800)
    tab.tap(*tab.middle("#task-2 .results figure:nth-of-type(2) svg"))
    assert tab.ask(shown) == "block"
    assert "Training return, return per episode: " in tab.ask("tip.textContent")
    # In the next frame of the browser.
    tab.ask("new Promise(done => { addEventListener('scroll', done); scrollBy(0, 50); })")
    assert tab.ask(shown) == "none"


def test_arrow_keys_read_the_values(tab):
    tab.ask("document.querySelectorAll('#task-2 figure svg[role=img]')[1].focus()")
    for name in ("ArrowRight", "ArrowRight", "ArrowDown"):
        tab.key(name)
    tip = tab.ask("tip.textContent").splitlines()
    # The second setting's second point: after 200 frames, 18 below the last; IQM 4 above seed 0.
    assert tip[:2] == ["kl=legacy kl.coef=1", "frames: 200"]
    assert tip[2] == "Training return, return per episode: 36 (32 to 42)"
    tab.key("Escape")
    assert tab.ask("getComputedStyle(tip).display") == "none"


def test_boxes_choose_what_is_drawn(tab):
    lines = "document.querySelectorAll('#task-2 figure:nth-of-type(2) .mean').length"
    faint = "document.querySelectorAll('#task-2 .faint').length"
    assert (tab.ask(lines), tab.ask(faint)) == (5, 0)
    tab.click_on("#task-2 label input")
    assert (tab.ask(lines), tab.ask(faint)) == (4, 1)
    tab.click_on("#task-2 button[data-all='0']")
    assert tab.ask(lines) == 0
    assert "nothing to draw, since no setting is chosen" in tab.ask(
        "document.querySelector('#task-2').innerText"
    )
    tab.click_on("#task-2 button[data-all='1']")
    assert (tab.ask(lines), tab.ask(faint)) == (5, 0)
    assert tab.said == []


def test_the_seven_best_are_drawn_at_first_and_come_first(tab):
    boxes = tab.ask(
        "[...document.querySelectorAll('#task-0 label')]"
        ".map(l => [l.textContent, l.firstChild.checked])"
    )
    assert boxes == [[f"kl.coef={i}", i >= 5] for i in (*range(5, 12), *range(5))]


def test_tables_have_headers_and_charts_have_words(tab):
    tables = "document.querySelectorAll('table').length"
    assert tab.ask(f"{tables} === document.querySelectorAll('[role=region] thead').length")
    assert tab.ask("document.querySelectorAll('td').length") > 0
    bare = "document.querySelectorAll('th:not([scope]), tr > td:first-child').length"
    assert tab.ask(bare) == 0
    labels = tab.ask(
        "[...document.querySelectorAll('figure svg')].map(e => e.getAttribute('aria-label'))"
    )
    assert all(re.match(r"\S.*: .+ against .+, \d+ settings", label) for label in labels)


def test_markup_in_a_run_folder_stays_text_and_the_charts_are_drawn(browser, tmp_path):
    main([str(write_marked_up(tmp_path / "runs")), "-o", str(tmp_path / "report")])
    page = tmp_path / "report" / "report.html"
    browser.size(WIDTHS[0])
    browser.open(page.as_uri())
    assert browser.said == []
    assert browser.ask("window.planted === undefined && !document.getElementById('planted')")
    assert browser.ask("document.images.length + document.scripts.length") == 3
    assert MARKUP in browser.ask("document.querySelector('main').textContent")
    drawn = dict(browser.ask(DRAWN))
    assert drawn[MARKUP]["Training return"][0] == 3
    browser.point(*browser.middle("#task-0 figure .point"))
    assert browser.ask("tip.textContent").count("\n") == 3
    assert [each for each in browser.requests if not each.startswith("data:")] == [page.as_uri()]
