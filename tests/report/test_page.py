"""The report's page in headless Chromium: in frames of several widths, light and dark."""

import html
import json
import re
import shutil
import subprocess

import pytest

from tests.report.toys import page_of, rows_of, write_run, write_runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (Debian: apt-get install chromium)"),
]
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")

#: What a page looks like. ``crowded``: labels that overlap or stick out of their chart; ``over``:
#: pixels beyond the window; ``wider``: tables wider than their box; ``drawn``: how many means and
#: points each chart of a task shows.
LOOK = """
const seen = e => doc.defaultView.getComputedStyle(e).display !== 'none';
const every = (of, what) => [...of.querySelectorAll(what)], root = doc.documentElement;
every(doc, 'details').forEach(e => { e.open = true; });
const crowded = every(doc, 'figure svg').flatMap(svg => {
  const inside = svg.getBoundingClientRect();
  const boxes = every(svg, 'text').map(t => [t.textContent, t.getBoundingClientRect()]);
  const out = boxes.filter(([, b]) => b.left < inside.left - 1 || b.right > inside.right + 1
    || b.top < inside.top - 1 || b.bottom > inside.bottom + 1).map(([t]) => 'outside: ' + t);
  boxes.forEach(([t, a], i) => boxes.slice(i + 1).forEach(([u, b]) => {
    if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
      out.push(t + ' on ' + u); }));
  return out; });
const drawn = () => Object.fromEntries(every(doc, 'section[id^=task]').map(s => [
  s.querySelector('h2').textContent, Object.fromEntries(every(s, 'figure').map(f => [
    f.querySelector('figcaption').firstChild.textContent,
    every(f, '.mean, .point').filter(seen).length]))]));
const look = {crowded, drawn: drawn(), over: root.scrollWidth - root.clientWidth,
  wider: every(doc, '.scroll').filter(e => e.scrollWidth > e.clientWidth + 1).length,
  turned: doc.defaultView.getComputedStyle(doc.querySelector('figure svg')).filter,
  text: doc.body.textContent};
doc.querySelector('label input').click();
look.without = drawn();
return look;
"""


def looks(folder, *frames):
    """What ``report.html`` looks like in frames of (width, scheme)."""
    page = (folder / "report" / "report.html").read_text()
    text = json.dumps(page).replace("<", r"\u003c")
    (folder / "frames.html").write_text(f"""<!doctype html><body><pre></pre><script>
      Promise.all({json.dumps(frames)}.map(([width, scheme]) => new Promise(done => {{
        const frame = document.createElement('iframe');
        frame.style = `width: ${{width}}px; height: 900px; border: 0; color-scheme: ${{scheme}}`;
        frame.onload = () => done((doc => {{ {LOOK} }})(frame.contentDocument));
        frame.srcdoc = {text};
        document.body.append(frame);
      }}))).then(all => {{
        document.querySelectorAll('iframe, script').forEach(e => e.remove());
        document.querySelector('pre').textContent = JSON.stringify(all); }});</script>""")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    command += ["--virtual-time-budget=60000", (folder / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    (told,) = re.findall("<pre>(.*?)</pre>", done.stdout, re.S)
    return json.loads(html.unescape(told))


@pytest.mark.usefixtures("charts")
def test_a_page_is_legible_at_every_width_light_and_dark(tmp_path):
    """Three tasks: two modes with three seeds each, twelve settings, a language task with gold."""
    write_runs(tmp_path)
    for seed, reward in enumerate((30.0, 32.0, 34.0, 36.0, 38.0)):
        config = {"kl": {"coef": 10.0}}
        write_run(tmp_path / f"five_{seed}", seed=seed, rows=rows_of(reward, 9.0), config=config)
    for i in range(12):
        config = {"env": {"id": "Many-v1"}, "kl": {"coef": float(i)}}
        # Names of seven digits on the axis, that tell 32.0001 M from 32.0002 M.
        write_run(tmp_path / f"many_{i}", rows=rows_of(3.2e7 + 10.0 * i, 0.5 + i), config=config)
    for coef, kl in ((0.1, 1e-9), (0.0, 2.0)):
        row = {"reward/episode": -0.6, "reward/gold": 0.5 - coef, "kl/ref/exact_seq": kl}
        config = {"env": {"id": None, "name": "sort_digits"}, "kl": {"coef": coef}}
        rows = [{"samples": 100 * i, "kl/ref/coef": coef, **row} for i in range(1, 5)]
        write_run(tmp_path / f"words_{coef}", rows=rows, config=config)
    page_of(tmp_path)
    wide, phone, dark = looks(tmp_path, (1240, "light"), (420, "light"), (1240, "dark"))
    for look, width in ((wide, 1240), (phone, 420), (dark, 1240)):
        assert (look["crowded"], look["over"], look["wider"] > 0) == ([], 0, width == 420)
    assert (wide["turned"], dark["turned"]) == ("none", "invert(1) hue-rotate(180deg)")
    against = "Return against sqrt(KL(policy||reference))"
    toy, many, words = (wide["drawn"][of] for of in ("Toy-v1", "Many-v1", "sort_digits"))
    # The KL stands next to the return.
    assert [*toy][:3] == [against, "Training return", "KL(policy||reference)"]
    assert set(toy.values()) == {5}
    # At first seven curves are drawn; against KL all twelve settings.
    assert (many[against], many["Training return"]) == (12, 7)
    assert words["Gold score against sqrt(KL(policy||reference))"] == 2
    # The coefficient 0 has no place on a logarithmic axis, and the page says so.
    assert words["kl.coef"] == 1
    assert "no value on the axis: kl.coef=0" in wide["text"]
    # The first box hides its setting's curves; against KL it stays: the front is that of all.
    assert (wide["without"]["Many-v1"][against], wide["without"]["Toy-v1"][against]) == (12, 5)
    first = next(iter(wide["drawn"]))
    assert wide["without"][first]["Training return"] == wide["drawn"][first]["Training return"] - 1
