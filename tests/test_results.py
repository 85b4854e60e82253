"""The results that ship (``benchmarks/shipped``): their sweeps, arithmetic, published numbers."""

import itertools
import re
from math import log

import numpy as np
import pytest

from benchmarks.shipped import compare
from benchmarks.shipped.__main__ import RESULTS
from benchmarks.shipped.best_of_n import best_of, best_of_n_kl, chances, tilted
from benchmarks.shipped.sweeps import Sweep
from benchmarks.shipped.tables import Measure, Row, cell, worst
from klrl.config.overrides import expand, job_name, quote_paths, split_overrides, swept_keys
from klrl.report.runs import read_run
from tests.report.toys import rows_of, write_run

pytestmark = pytest.mark.integration

SWEEPS = [sweep for result in RESULTS.values() for sweep in result.sweeps]


def jobs_of(sweep: Sweep) -> list[tuple[str, list[str]]]:
    """(name of the folder, words) of each job, as ``python -m klrl -m`` makes them."""
    for other in SWEEPS:  # as after the sweeps before it: paths to their jobs are told by that
        (other.folder / "seed=0").mkdir(parents=True, exist_ok=True)
    (module, name), words = sweep.command(1)[:2], split_overrides(quote_paths(sweep.command(1)[3:]))
    assert (module, name, words.name) == ("-m", "klrl", sweep.name)
    swept = swept_keys(words.job)
    return [(job_name(job, swept), job) for job in expand(words.job)]


@pytest.mark.parametrize("n", range(1, 7))
def test_best_of_n_is_the_mean_over_every_choice_of_n(n) -> None:
    proxy = np.array([0.5, 0.9, 0.1, 0.9, 0.5, 0.9])
    gold = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    found = []
    for drawn in itertools.combinations(range(6), n):
        best = max(proxy[i] for i in drawn)
        tied = [i for i in drawn if proxy[i] == best]
        found.append((best, np.mean([gold[i] for i in tied])))  # ties by lot
    expected = np.mean(found, axis=0)
    assert best_of(proxy[None], gold[None], n) == pytest.approx(tuple(expected))
    assert chances(proxy, n).sum() == pytest.approx(1)


@pytest.mark.parametrize("n", range(1, 5))
def test_the_kl_of_best_of_n_is_that_of_every_draw(n) -> None:
    """Responses of probability .5, .3 and .2, the last two with one proxy; ties by lot."""
    base, proxy = np.array([0.5, 0.3, 0.2]), np.array([0.0, 1.0, 1.0])
    chosen = np.zeros(3)
    for drawn in itertools.product(range(3), repeat=n):
        best = [i for i in drawn if proxy[i] == max(proxy[list(drawn)])]
        for i in best:
            chosen[i] += np.prod(base[list(drawn)]) / len(best)
    assert chosen.sum() == pytest.approx(1)
    kept = chosen > 0
    expected = (chosen[kept] * np.log(chosen[kept] / base[kept])).sum()
    samples = np.repeat(proxy, [5, 3, 2])
    other = np.arange(10.0)  # a prompt without ties
    p = ((np.arange(10) + 1) / 10) ** n - (np.arange(10) / 10) ** n
    prompts = [expected, (p * np.log(10 * p)).sum()]
    assert best_of_n_kl(samples[None], n) == pytest.approx(expected)
    assert best_of_n_kl(np.stack([samples, other]), n) == pytest.approx(np.mean(prompts))
    assert expected <= log(n) - (n - 1) / n


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_the_kl_of_best_of_n_without_ties_is_the_known_bound(n) -> None:
    """log n - (n - 1) / n (Beirami et al. 2024), which many samples without ties come near."""
    found = best_of_n_kl(np.arange(100_000.0)[None], n)
    assert found == pytest.approx(log(n) - (n - 1) / n, abs=1e-3)


@pytest.mark.parametrize("c", [0.05, 0.3, 2.0])
def test_the_optimum_is_the_base_tilted_by_the_score(c) -> None:
    """Responses of probability .5, .3 and .2; their mean over two equal prompts is theirs."""
    base = np.array([0.5, 0.3, 0.2])
    proxy, gold = np.array([0.0, 1.0, 0.4]), np.array([0.2, 0.0, 1.0])
    pi = base * np.exp(proxy / c) / (base * np.exp(proxy / c)).sum()
    samples, meant = (np.repeat(x, [5, 3, 2])[None].repeat(2, 0) for x in (proxy, gold))
    found = tilted(samples, meant, c)
    assert found.proxy == pytest.approx(pi @ proxy)
    assert found.gold == pytest.approx(pi @ gold)
    assert found.kl == pytest.approx(pi @ np.log(pi / base))
    # max over pi of E[proxy] - c KL(pi || base) is c log E_base[exp(proxy / c)].
    assert found.proxy - c * found.kl == pytest.approx(c * log(base @ np.exp(proxy / c)))


#: Of a mean of .5 and s = .2 * sqrt(2.5): 2.7764 standard errors for five seeds.
REACH = 2.776445 * 0.2 * np.sqrt(2.5) / np.sqrt(5)
STUDENTS = rf"0\.5000 \[{0.5 - REACH:.4f}, {0.5 + REACH:.4f}\], IQM 0\.5000"


@pytest.mark.parametrize(
    ("values", "how", "text"),
    [
        # The mean of the middle three of five is the IQM.
        ([0.0, 0.4, 0.5, 0.6, 2.0], {}, r"0\.70 \[.*\], IQM 0\.50, worst 0\.00"),
        ([0.0, 0.4, 0.5, 0.6, 2.0], {"worst": ""}, r"0\.70 \[.*\], IQM 0\.50"),
        ([0.1, 0.3, 0.5, 0.7, 0.9], {"form": ",.4f", "worst": ""}, STUDENTS),
        # An interval ends where the measure does; below five seeds there is none.
        ([0, 1, 1, 1, 1], {"worst": "", "bounds": (0.0, 1.0)}, r"0\.80 \[0\.\d\d, 1\.00\], .*"),
        ([1.0, 2.0, 6.0], {}, r"1\.00 to 6\.00, mean 3\.00"),
        ([1.0, 1.001, 1.002], {}, r"1\.00"),
        ([-0.001], {}, r"0\.00"),
    ],
)
def test_a_cell_has_the_mean_its_interval_the_iqm_and_the_worst_seed(values, how, text) -> None:
    measure = Measure("x", "in band", "share", **how)
    assert re.fullmatch(text, cell(Row({}, {"x": np.array(values, dtype=float)}), measure))


def test_the_worst_seed_is_the_least_the_most_or_the_farthest_from_1() -> None:
    values = np.array([0.2, 1.1, 1.5])
    assert [worst(values, kind) for kind in ("low", "high", "far")] == [0.2, 1.5, 0.2]


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)
def test_klrl_accepts_the_words_of_every_sweep(sweep) -> None:
    from klrl.config.checks import to_config
    from klrl.config.compose import Composer, keys
    from klrl.config.rules.unread import check_all_read

    jobs, composer = jobs_of(sweep), Composer()
    assert len({name for name, _ in jobs}) == len(jobs)
    for _, words in (jobs[0], jobs[-1]):
        words = [f"++{word}" if word.startswith("env.kwargs.") else word for word in words]
        check_all_read(to_config(composer.explained(words)), keys(words))


def test_how_near_a_controller_holds_by_hand(tmp_path) -> None:
    """KL / target of the last half is .8 or 1.2 in eight iterations, 1.3 and .7 in two."""
    ratios = [9.0] * 10 + [0.8, 1.2] * 4 + [1.3, 0.7]
    rows = [{**row, "kl/ref/exact": 0.3 * r} for row, r in zip(rows_of(), ratios, strict=True)]
    run = read_run(write_run(tmp_path / "run", rows=rows))
    told = [compare.MEASURED[key](run, 0.3, pytest.fail) for key in ("ratio", "near")]
    assert told == pytest.approx([1.0, 0.8])


def test_the_mean_kl_old_leaves_the_first_ten_iterations_out(tmp_path) -> None:
    rows = [{**row, "kl/old/exact": 9.0 if i < 10 else i / 100} for i, row in enumerate(rows_of())]
    run = read_run(write_run(tmp_path / "run", rows=rows))
    # of .10, .11, ... .19
    assert compare.MEASURED["kl"](run, 0.02, pytest.fail) == pytest.approx(0.145)


@pytest.mark.parametrize("sweep", RESULTS[8].sweeps, ids=lambda sweep: sweep.name)
def test_the_losses_are_compared_at_the_presets_init_std(sweep) -> None:
    from klrl import compose

    given = dict(word.split("=", 1) for word in sweep.words)
    preset = compose(f"env={given['env']}", "loss=clip", "kl=none").actor.init_std
    assert float(given["actor.init_std"]) == preset
