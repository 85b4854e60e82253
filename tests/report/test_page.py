"""The report's page as a reader has it: headless Chromium, from the disk."""

import pytest

from tests.report.chromium import CHROMIUM, NONE_HERE, chromium
from tests.report.toys import (
    MARKUP,
    page_of,
    rows_of,
    write_marked_up,
    write_run,
    write_runs,
    write_sweep,
)

pytestmark = [pytest.mark.integration, pytest.mark.skipif(CHROMIUM is None, reason=NONE_HERE)]

#: Widths of a desk and of a phone, in pixels.
WIDTHS = (1240, 420)


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
    page_of(root)
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


#: How many means and points are in sight in each chart, by task and title.
DRAWN = """[...document.querySelectorAll('section[id^=task]')].map(s => [
  s.querySelector('h2').textContent,
  Object.fromEntries([...s.querySelectorAll('figure')].map(f => [
    f.querySelector('figcaption').firstChild.textContent,
    [...f.querySelectorAll('.mean, .point')].filter(e => getComputedStyle(e).display !== 'none')
      .length]))])"""
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
    against = "Return against sqrt(KL(policy||reference))"
    toy = drawn["Toy-v1"]
    # The KL stands next to the return.
    assert [*toy][:3] == [against, "Training return", "KL(policy||reference)"]
    assert set(toy.values()) == {5}
    # At first seven curves are drawn; against KL all twelve settings.
    many = drawn["Many-v1"]
    assert (many.pop(against), set(many.values())) == (12, {7})
    words = drawn["sort_digits"]
    assert words["Gold score against sqrt(KL(policy||reference))"] == 2
    assert words["Sampled training gold score"] == 2
    # The coefficient 0 has no place on a logarithmic axis, and the page says so.
    assert words["kl.coef"] == 1
    captions = browser.ask("[...document.querySelectorAll('small')].map(e => e.textContent)")
    assert [each for each in captions if each.endswith("; no value on the axis: kl.coef=0")]
    if width == WIDTHS[0]:
        assert browser.ask(WIDER) == []
    assert browser.ask(CROWDED) == []
    assert browser.ask("document.documentElement.scrollWidth") == width
    # A dark scheme turns the charts' colours.
    turned = browser.ask("getComputedStyle(document.querySelector('figure svg')).filter")
    assert turned == {"light": "none", "dark": "invert(1) hue-rotate(180deg)"}[scheme]
    assert browser.said == []
    assert browser.requests == [page.as_uri()]


def test_boxes_choose_what_is_drawn(tab):
    def drawn():
        """Whether each mark is seen."""
        return tab.ask(
            "['.first .mean', '.against .point'].map(of => [...document.querySelectorAll("
            "`#task-2 ${of}`)].map(e => getComputedStyle(e).display !== 'none'))"
        )

    assert drawn() == [[True] * 10, [True] * 5]
    tab.click_on("#task-2 label input")
    # Against KL all stay: the front is that of all.
    curves, points = drawn()
    assert (sum(curves), sum(points)) == (8, 5)
    tab.click_on("#task-2 label input")
    assert drawn() == [[True] * 10, [True] * 5]
    assert tab.said == []


def test_tables_have_headers_and_charts_have_words(tab):
    tables = "document.querySelectorAll('table').length"
    assert tab.ask(f"{tables} === document.querySelectorAll('[role=region] thead').length")
    bare = "document.querySelectorAll('th:not([scope]), tr > td:first-child').length"
    assert tab.ask(bare) == 0
    labels = "[...document.querySelectorAll('figure svg')].map(e => e.getAttribute('aria-label'))"
    assert all(tab.ask(labels))


def test_markup_in_a_run_folder_stays_text_and_the_charts_are_drawn(browser, tmp_path, charts):
    page_of(write_marked_up(tmp_path))
    page = tmp_path / "report" / "report.html"
    browser.size(WIDTHS[0])
    browser.open(page.as_uri())
    assert browser.said == []
    assert browser.ask("window.planted === undefined && !document.getElementById('planted')")
    assert MARKUP in browser.ask("document.querySelector('main').textContent")
    drawn = dict(browser.ask(DRAWN))
    assert drawn[MARKUP]["Training return"] == 3
    assert browser.requests == [page.as_uri()]
