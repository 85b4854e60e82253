"""docs/results/staleness: each number of the page, recomputed from the committed runs.

Student's quantile and probability are those of nine degrees of freedom, in closed form.
"""

import json
import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
CELLS = ROOT / "benchmarks" / "results" / "staleness.jsonl"
PAGE = ROOT / "docs" / "results" / "staleness" / "README.md"
LAGS = (2, 4, 8, 16, 32)
ARMS = ("none", "clip", "truncate", "k3", "exact", "tv", "tv_exact")
#: Seeds -> t with P(|T| < t) = .95, of one degree of freedom less.
T95 = {4: 3.1824463, 5: 2.7764451, 6: 2.5705818, 7: 2.4469118, 8: 2.3646243, 9: 2.3060041}
T95 |= {10: 2.2621572}


def runs() -> dict:
    lines = [json.loads(line) for line in CELLS.read_text("utf-8").splitlines()]
    assert {line["commit"] for line in lines} == {"180b1e94191a"}
    found = {(line["arm"], line["lag"], line["seed"]): line for line in lines}
    assert len(found) == len(lines) == 120
    assert {seed for _, _, seed in found} <= set(range(200, 210))
    return found


def block(name: str) -> str:
    text = PAGE.read_text("utf-8")
    found = re.search(rf"<!-- table: {name} -->\n\n(.*?)\n\n<!-- end of table -->", text, re.DOTALL)
    assert found is not None
    return found[1]


def rows(name: str) -> list[list[str]]:
    """Cells of a table's lines, without its head."""
    lines = [line for line in block(name).splitlines() if line.startswith("| ")][2:]
    return [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines]


def interval(values) -> tuple[float, float, float]:
    x, n = np.array(values), len(values)
    reach = T95[n] * math.sqrt(((x - x.mean()) ** 2).sum() / (n - 1) / n)
    return x.mean(), x.mean() - reach, x.mean() + reach


def probability(values, null: float) -> float:
    """P(|T| > |t|) of nine degrees of freedom (Abramowitz and Stegun, 26.7.3)."""
    mean, low, _ = interval(values)
    angle = math.atan(abs(mean - null) / ((mean - low) / T95[10]) / 3)
    c = math.cos(angle)
    inside = angle + math.sin(angle) * (c + 2 / 3 * c**3 + 8 / 15 * c**5 + 16 / 35 * c**7)
    return 1 - 2 / math.pi * inside


def agrees(text: str, expected) -> bool:
    """Whether each number of a text is the expected one, rounded as printed."""
    found = re.findall(r"[-+]?\d+\.?\d*(?:e-?\d+)?%?", text)
    expected = [*expected]
    if len(found) == 1 and len(expected) == 3 and expected[2] - expected[1] < 1e-12:
        expected = expected[:1]
    if len(found) != len(expected):
        return False
    for told, value in zip(found, expected, strict=True):
        scale = 100 if told.endswith("%") else 1
        digits = len(told.rstrip("%").partition(".")[2])
        if float(told.rstrip("%")) != pytest.approx(value * scale, abs=0.5001 * 10**-digits):
            return False
    return True


def column(name: str, arm: str, lag: int, cells: dict) -> list[float]:
    found = [cells[key] for key in sorted(cells) if key[:2] == (arm, lag)]
    return [c[name] if name in c else c["by_k"][name][lag - 1] for c in found]


def primary(cells: dict) -> list[list[float]]:
    """A, B and C of each seed."""
    slopes, splits, ratios = [], [], []
    x = [math.log(lag - 1) for lag in LAGS]
    for seed in range(200, 210):
        y = [math.log(cells["none", lag, seed]["by_k"]["sampler_policy"][lag - 1]) for lag in LAGS]
        slopes.append(np.cov(x, y)[0, 1] / np.var(x, ddof=1))
        splits.append(sum(cells["none", 8, seed]["by_k"]["split_response"][1:8]) / 7)
        ratios.append(math.log(cells["exact", 16, seed]["score"] / cells["k3", 16, seed]["score"]))
    return [slopes, splits, ratios]


def test_the_outcomes_are_those_of_the_runs() -> None:
    of = primary(runs())
    found, lines = [interval(x) for x in of], rows("outcomes")
    p = [probability(x, null) for x, null in zip(of, (1.0, 0.1, 0.0), strict=True)]
    order = sorted(range(3), key=p.__getitem__)
    adjusted = [0.0] * 3
    for i, which in enumerate(order):
        adjusted[which] = min(1.0, max([p[j] * (3 - n) for n, j in enumerate(order[: i + 1])]))
    for line, expected, chance in zip(lines, found, adjusted, strict=True):
        assert agrees(line[1], expected)
        assert float(line[2]) == pytest.approx(chance, rel=0.05, abs=1e-12)
    (_, a_low, a_high), (_, b_low, _), (c, c_low, c_high) = found
    inside = ["inside" if a_low <= x <= a_high else "outside" for x in (1, 2)]
    told = f"1 (a random walk) is {inside[0]} the interval, 2 (a drift) is {inside[1]} it"
    words = [told, "unfit" if b_low > 0.1 else "not shown to be unfit", "open"]
    if max(abs(c_low), abs(c_high)) < math.log(1.05):
        words[2] = "equivalent"
    if adjusted[2] < 0.05:
        words[2] = f"superior: the mask by {'the exact KL' if c > 0 else 'k3'}"
    assert [line[3] for line in lines] == words
    text = " ".join(block("answer").split())
    assert len(re.findall(r"\.(?: |$)", text)) == 3
    assert all(word in text for word in words)


def test_the_answer_has_the_numbers_of_the_runs() -> None:
    cells = runs()
    a, b, c = (interval(x) for x in primary(cells))
    ends = [np.mean(column("sampler_policy", "none", lag, cells)) for lag in (2, 32)]
    off = [interval(errors("k3", lag, cells))[0] for lag in LAGS]
    text = " ".join(block("answer").split())
    text = re.sub(r"1 \(a random walk\)|2 \(a drift\)|k3", "", text)
    lags = (1, 3, 7, 15, 31)
    assert agrees(text, [1, 31, *ends, *a, *off, *lags, 1, 7, *b, 15, *map(math.exp, c)])


def errors(name: str, lag: int, cells: dict) -> list[float]:
    pairs = (column(each, "none", lag, cells) for each in (name, "sampler_policy"))
    return [x / exact - 1 for x, exact in zip(*pairs, strict=True)]


@pytest.mark.parametrize(
    ("table", "names"),
    [
        ("lag", ("sampler_policy", "policy_sampler", "tv", "ess", "largest")),
        (
            "masks",
            ("split_response", "kept_k3", "kept_exact", "split_token", "kept_tv", "kept_tv_exact"),
        ),
        ("errors", ("k1", "k2", "k3", "k3_clamped")),
    ],
)
def test_the_tables_by_lag_are_those_of_the_runs(table: str, names) -> None:
    cells = runs()
    for lag, line in zip(LAGS, rows(table), strict=True):
        assert int(line[0]) == lag - 1
        for name, text in zip(names, line[1:], strict=True):
            how = errors if table == "errors" else lambda *of: column(of[0], "none", *of[1:])
            assert agrees(text, interval(how(name, lag, cells)))


def test_the_scores_are_those_of_the_runs() -> None:
    cells, lines = runs(), rows("arms")
    expected = [(arm, 16) for arm in ARMS] + [("none", lag) for lag in (1, 2, 4, 8, 32)]
    for (arm, lag), line in zip(expected, lines, strict=True):
        score = column("score", arm, lag, cells)
        assert agrees(line[1], interval(score))
        assert agrees(line[2], [min(score)])
        assert agrees(line[3], interval(column("kl_ref", arm, lag, cells)))
        assert agrees(line[4], interval(column("sampler_policy", arm, lag, cells)))
    assert [line[0].rpartition("L = ")[2] for line in lines[7:]] == ["1", "2", "4", "8", "32"]


def test_a_divergence_is_not_negative_and_masks_keep_shares() -> None:
    """Of the cells themselves: Pinsker's inequality, and shares within 0 and 1."""
    for cell in runs().values():
        k = cell["by_k"]
        assert all(len(values) == cell["lag"] for values in k.values())
        for kl, tv in zip(k["sampler_policy"][1:], k["tv"][1:], strict=True):
            assert 2 * tv**2 <= kl * 1.001  # the mean of squares exceeds the square of the mean
        for name in ("kept_k3", "kept_exact", "kept_tv", "kept_tv_exact", "split_response"):
            assert all(0 <= x <= 1 for x in k[name])
    pairs = pairwise(np.mean(column("sampler_policy", "none", lag, runs())) for lag in LAGS)
    assert all(near < far for near, far in pairs)
