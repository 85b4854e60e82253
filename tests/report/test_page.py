"""The report's page as a reader has it: headless Chromium, from the disk."""

import re

import pytest

from klrl.report.__main__ import main
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


#: How many settings have marks of each kind in sight in each chart, by task and title.
DRAWN = """[...document.querySelectorAll('section[id^=task]')].map(s => [
  s.querySelector('h2').textContent,
  Object.fromEntries([...s.querySelectorAll('figure')].map(f => [
    f.querySelector('figcaption').textContent,
    ['mean', 'band', 'seed', 'point', 'up', 'dot', 'failed']
      .map(c => f.querySelectorAll(`.${c}:not(.off)`).length)]))])"""
OPEN = "document.querySelectorAll('details.more').forEach(each => { each.open = true; })"
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
    browser.ask(OPEN)
    drawn = dict(browser.ask(DRAWN))
    # Settings with lines, bands, lines of seeds, points, intervals, seeds, failed seeds.
    toy = drawn["Toy-v1"]
    assert list(toy)[:2] == ["Return against sqrt(KL(policy||reference))", "Training return"]
    assert toy.pop("Return against sqrt(KL(policy||reference))") == [0, 0, 0, 5, 1, 5, 1]
    # A line for all seeds where it is a result; else dots.
    assert toy.pop("Training return") == [5, 1, 5, 0, 0, 0, 1]
    assert list(toy.values()) == [[5, 1, 0, 0, 0, 5, 1]] * 5
    assert drawn["Many-v1"]["Return against sqrt(KL(policy||reference))"][3:6] == [7, 0, 7]
    assert drawn["Many-v1"]["Training return"] == [7, 0, 7, 0, 0, 0, 0]
    words = drawn["sort_digits"]
    assert words["Gold score against sqrt(KL(policy||reference))"][3] == 2
    assert words["Sampled training gold score"][0] == 2
    # The coefficient 0 has no place on a logarithmic axis, and the page says so.
    assert words["kl.coef"][0] == 1
    said = "[...document.querySelectorAll('figure p')].map(p => p.textContent)"
    assert browser.ask(said) == ["Without a value that the axes can show: kl.coef=0"]
    if width == WIDTHS[0]:
        assert browser.ask(WIDER) == []
    assert browser.ask(CROWDED) == []
    assert browser.ask("document.documentElement.scrollWidth") == width
    # The colours are those of the reader's scheme.
    ink = "getComputedStyle(document.querySelector('figure svg text')).fill"
    assert browser.ask(ink) == {"light": "rgb(27, 27, 27)", "dark": "rgb(232, 232, 232)"}[scheme]
    assert browser.said == []
    assert browser.requests == [page.as_uri()]


def test_pointing_at_a_setting_shows_its_values(tab):
    i = tab.ask(
        "[...document.querySelectorAll('#task-2 label')]"
        f".find(l => l.textContent.endsWith('{LEGACY} (3 of 4)')).firstChild.value"
    )
    tab.point(*tab.middle(f"#task-2 .against .point[data-s='{i}']"))
    assert tab.ask("getComputedStyle(tip).display") == "block"
    assert tab.ask("tip.textContent").splitlines() == [
        f"{LEGACY} (3 of 4)",
        "sqrt(KL(policy||reference)), KL in nats per frame: 1.75 (1 to 2)",
        "final return per episode: 73.6 (-16 to 110)",
        "range of 4 seeds; 3 of 4 finished",
    ]
    # The mark is around the point, and hides with the values.
    mark, point = (tab.middle(f"#task-2 .against .{of}") for of in ("mark", f"point[data-s='{i}']"))
    assert mark == pytest.approx(point, abs=1)
    tab.point(1, 1)
    assert tab.ask("getComputedStyle(tip).display") == "none"


def test_arrow_keys_read_the_values(tab):
    tab.ask("document.querySelectorAll('#task-2 figure svg')[1].focus()")
    for name in ("ArrowRight", "ArrowRight", "ArrowDown"):
        tab.key(name)
    tip = tab.ask("tip.textContent").splitlines()
    # The second setting's second point: after 200 frames, 18 below the last; seeds add 0, 2, 10.
    assert tip[:2] == ["kl=legacy kl.coef=1", "frames: 200"]
    assert tip[2] == "Training return, return per episode: 36 (32 to 42)"
    tab.key("Escape")
    assert tab.ask("getComputedStyle(tip).display") == "none"
    # Against KL every arrow goes to the next setting.
    tab.ask("document.querySelectorAll('#task-2 figure svg')[0].focus()")
    names = []
    for name in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        tab.key(name)
        names.append(tab.ask("tip.textContent").splitlines()[0])
    assert len(set(names[:3])) == 3
    assert names[3] == names[1]


def test_boxes_choose_what_is_drawn_and_read(tab):
    def drawn():
        """How much of each mark is seen: 1, 0 if it is hidden."""
        return tab.ask(
            "['.curves .mean', '.against .point'].map(of => [...document.querySelectorAll("
            "`#task-2 > .charts ${of}`)].map(e => getComputedStyle(e))"
            ".map(s => s.display === 'none' ? 0 : +s.opacity))"
        )

    assert drawn() == [[1] * 5, [1] * 5]
    tab.click_on("#task-2 label input")
    # Against KL what is not chosen is faint.
    assert [sorted(of) for of in drawn()] == [[0, 1, 1, 1, 1], [0.35, 1, 1, 1, 1]]
    tab.ask("document.querySelectorAll('#task-2 figure svg')[1].focus()")
    tab.key("ArrowRight")
    first, second = tab.ask(
        "[...document.querySelectorAll('#task-2 label span')].slice(0, 2).map(l => l.textContent)"
    )
    assert tab.ask("tip.textContent").splitlines()[0] == second != first
    tab.click_on("#task-2 button[data-all='']")
    assert drawn() == [[0] * 5, [0.35] * 5]
    tab.click_on("#task-2 button[data-all='1']")
    assert drawn() == [[1] * 5, [1] * 5]
    assert tab.said == []


def test_tables_have_headers_and_charts_have_words(tab):
    tables = "document.querySelectorAll('table').length"
    assert tab.ask(f"{tables} === document.querySelectorAll('[role=region] thead').length")
    bare = "document.querySelectorAll('th:not([scope]), tr > td:first-child').length"
    assert tab.ask(bare) == 0
    labels = tab.ask(
        "[...document.querySelectorAll('figure svg')].map(e => e.getAttribute('aria-label'))"
    )
    assert all(re.match(r"\S.*: .+ against .+, \d+ settings", label) for label in labels)
    ids = tab.ask("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(set(ids)) == len(ids)


def test_markup_in_a_run_folder_stays_text_and_the_charts_are_drawn(browser, tmp_path, charts):
    main([str(write_marked_up(tmp_path / "runs")), "-o", str(tmp_path / "report")])
    page = tmp_path / "report" / "report.html"
    browser.size(WIDTHS[0])
    browser.open(page.as_uri())
    assert browser.said == []
    assert browser.ask("window.planted === undefined && !document.getElementById('planted')")
    assert MARKUP in browser.ask("document.querySelector('main').textContent")
    drawn = dict(browser.ask(DRAWN))
    assert drawn[MARKUP]["Training return"][0] == 3
    browser.point(*browser.middle("#task-0 figure .point"))
    assert MARKUP in browser.ask("tip.textContent")
    assert browser.requests == [page.as_uri()]
