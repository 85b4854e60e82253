"""The results that ship (``benchmarks/shipped``): their sweeps, arithmetic, tables and pictures."""

import csv
import itertools
import json
import re
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest

from benchmarks.shipped import beside, compare, forgetting, page, transforms
from benchmarks.shipped.__main__ import RESULTS
from benchmarks.shipped.answers import Answers
from benchmarks.shipped.best_of_n import best_of, best_of_n_kl, chances, tilted
from benchmarks.shipped.sweeps import Sweep, by_labels, closing_return, words_of
from benchmarks.shipped.tables import Measure, Row, cell, markdown, worst
from klrl.config.overrides import expand, job_name, quote_paths, split_overrides, swept_keys
from klrl.report.runs import read_run
from tests.report.toys import ROWS, rows_of, write_run

pytestmark = pytest.mark.integration

SWEEPS = [sweep for result in RESULTS.values() for sweep in result.sweeps]
ENDED = {"ended": "2026-01-01T00:00:05+00:00"}


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


def test_the_optimums_effective_samples() -> None:
    """1 / sum w^2: all where the score says nothing, the tied best where c is small."""
    proxy = np.array([[0.0, 0.0, 1.0, 1.0, 1.0, 0.5]])
    assert tilted(proxy, proxy, 1e9).effective == pytest.approx(6)
    assert tilted(proxy, proxy, 1e-3).effective == pytest.approx(3)
    # The prompt with the fewest of ten is what counts: the lowest tenth.
    few = np.vstack([np.zeros((9, 6)), np.arange(6.0)])
    assert tilted(few, few, 1e-3).effective == pytest.approx(1)


def test_the_line_of_the_optimum_ends_where_samples_are_few() -> None:
    """Evenly spread scores without ties: 1 / sum w^2 falls with c and reaches 1."""
    scores = np.linspace(0, 1, 64)[None]
    rows = beside.optimum([(scores, scores)] * 3)
    counts = [row.values["effective"].min() for row in rows]
    assert min(counts) >= beside.LEAST
    assert 1 < len(rows) < len(beside.TEMPERATURES)
    following = beside.TEMPERATURES[len(rows)]
    assert tilted(scores, scores, following).effective < beside.LEAST


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


def test_a_table_has_a_head_and_no_cell_where_nothing_was_measured() -> None:
    row = Row({"rule": "held"}, {"x": np.array([0.0, 0.4])})
    assert cell(row, Measure("other", "", "")) == ""
    for title, unit, head in (
        ("in band", "share", "| rule | in band, share |"),
        ("KL(policy||base)", "nats", r"| rule | KL(policy\|\|base), nats |"),
    ):
        assert markdown([row], [Measure("x", title, unit)]).splitlines()[0] == head


def test_a_setting_that_lacks_a_seed_is_no_result(tmp_path: Path) -> None:
    measure = Measure("x", "", "")
    full, short = (Row({"a": str(n)}, {"x": np.zeros(n)}) for n in (3, 2))
    page.check_seeds([page.Section("T", rows=[full], measures=[measure])], 3)
    with pytest.raises(SystemExit, match="x of a=2 has 2 seeds of 3"):
        page.check_seeds([page.Section("T", rows=[full, short], measures=[measure])], 3)


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


def test_a_folders_name_gives_its_words_back() -> None:
    (name, _), *_ = jobs_of(Sweep("x", ("kl=legacy,retrieve", "kl.coef=0.1,1", "seed=0,1")))
    assert name == "kl=legacy,kl.coef=0.1,seed=0"
    assert words_of(name) == {"kl": "legacy", "kl.coef": "0.1"}


def toy_rows(language: bool) -> list[dict]:
    rows = rows_of(reward=0.5, kl=0.3)
    for i, row in enumerate(rows):
        row |= {
            "kl/ref/exact_seq": 1.0 + i / 10,
            "kl/ref/penalty": 0.03,
            **{f"kl/ref/k{k}": 0.3 for k in (1, 2, 3)},
        }
        if language:
            row["samples"] = row.pop("frames")
            row["policy/entropy"] = 1.7 - i / 10
    return rows


def write_samples(folder: Path) -> None:
    turns = [{"role": "user", "content": "Describe the rain."}]
    lines = [{"iteration": i, "prompt": turns, "response": f"Rain {i}."} for i in (1, 1, 2, 9)]
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def toy_plays(run, words=(), *, episodes, sampled=False) -> dict[str, float]:
    return {"eval/return": 0.5 + run.seed, "eval/gold": 0.1 * run.seed}


@pytest.mark.parametrize("number", sorted(RESULTS))
def test_a_page_says_what_it_concludes_and_what_it_cannot(number) -> None:
    result = RESULTS[number]
    readme = result.folder / "README.md"
    if not readme.exists():
        pytest.skip("its runs have not been made")
    by_hand, _, measured = readme.read_text(encoding="utf-8").partition(page.START)
    assert by_hand.startswith(f"# {result.title}\n\n{result.question}\n\n**What it says")
    assert f"{page.LIMITS}\n\n{result.limits}\n" in measured


@pytest.mark.parametrize("number", sorted(RESULTS))
def test_a_result_is_written_from_its_runs(number, tmp_path, monkeypatch) -> None:
    result = RESULTS[number]
    count = 0
    for sweep in result.sweeps:
        for name, words in jobs_of(sweep):
            language = any(word.startswith("experiment=") for word in words)
            seed = int(next(word for word in words if word.startswith("seed="))[5:])
            write_run(sweep.folder / name, seed=seed, rows=toy_rows(language), **ENDED)
            if language:
                write_samples(sweep.folder / name)
            count += 1
    scores = np.linspace(0, 1, 64)[None] * np.ones((2, 1))
    own = Answers(scores, 1 - scores, scores + 9, scores + 1, scores)
    for name in ("frontier.base_answers", "smollm.base_answers", "smollm.trained_answers"):
        monkeypatch.setattr(f"benchmarks.shipped.{name}", lambda *_: own)
    monkeypatch.setattr(page, "Plays", lambda path: toy_plays)
    monkeypatch.setattr(page, "FOLDER", tmp_path / "results")
    folder = page.write_result(result)
    page.write_index(tmp_path / "results")
    text = (folder / "README.md").read_text()
    told = round(0.5 * ROWS * count)
    assert f"{count} runs, {told:,} seconds of iterations" in text
    assert result.chosen in text
    assert f"## What it cannot say\n\n{result.limits}" in text
    for sweep in result.sweeps:
        assert sweep.name in text
    pictures = list(folder.glob("*.png"))
    assert all(p.stat().st_size > 10_000 and f"({p.name})" in text for p in pictures)
    assert pictures
    lines = list(csv.DictReader((folder / "figures.csv").read_text().splitlines()))
    assert {len(line["seeds"].split()) for line in lines} == {result.seeds}
    title = result.title.replace("|", r"\|")
    assert f"[{title}]({result.name}/README.md)" in (folder / "../README.md").read_text()


def test_parity_compares_row_by_row(tmp_path: Path) -> None:
    rows = rows_of()
    rows = [{**row, "kl/ref/penalty": 0.5} for row in rows]
    other = [*rows[:3], {**rows[3], "kl/ref/penalty": 0.25}, *rows[4:]]
    write_run(tmp_path / "a", rows=rows)
    write_run(tmp_path / "b", rows=other)
    found = transforms.differences(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert found.tolist() == [0, 0, 0, 0.25, *[0] * 16]


def test_runs_are_grouped_by_label_and_ordered_by_seed() -> None:
    sweep = Sweep("toy", ("kl.coef=0.1,1", "seed=0,1"), {"env": "toy"})
    for seed, coef in ((1, "0.1"), (0, "0.1"), (0, "1")):
        write_run(sweep.folder / f"kl.coef={coef},seed={seed}", seed=seed)
    groups = by_labels(sweep.runs(), "env", "kl.coef")
    assert {key: [run.seed for run in runs] for key, runs in groups.items()} == {
        ("toy", "0.1"): [0, 1],
        ("toy", "1"): [0],
    }
    write_run(sweep.folder / "kl.coef=1,seed=1", seed=1, status="failed")
    with pytest.raises(SystemExit, match=r"kl\.coef=1,seed=1: failed; a result is made of all"):
        sweep.runs()


def test_a_diverged_run_counts_where_a_sweep_says_that_it_may() -> None:
    sweep = Sweep("toy", ("seed=0,1",), {"env": "pendulum"}, may_diverge=True)
    infinite = "NonFiniteError: gradient is inf in minibatch 3 of epoch 2"
    write_run(sweep.folder / "seed=0,loss.beta_rule=forward")
    failed = {"seed": 1, "status": "failed"}
    write_run(sweep.folder / "seed=1,loss.beta_rule=forward", **failed, error=infinite)
    runs = sweep.runs()
    sweep.run(1)  # nothing is left to run, and the diverged one is not tried again
    assert not (sweep.folder / "sweep.json").exists()
    (told,) = compare.more(runs)
    assert "1 of forward's on pendulum; they count as they were at their last checkpoint" in told
    with pytest.raises(SystemExit, match="seed=1"):
        replace(sweep, may_diverge=False).runs()
    write_run(sweep.folder / "seed=2,loss.beta_rule=forward", **failed, error="OSError: no space")
    with pytest.raises(SystemExit, match="seed=2"):
        sweep.runs()


@pytest.mark.parametrize(("recorded", "asked"), [(100, 0), (20, 1), (None, 1)])
def test_the_closing_evaluation_is_the_recorded_one_if_it_has_100_episodes(
    recorded, asked, tmp_path
) -> None:
    rows = rows_of()
    if recorded is not None:
        rows[3] |= {"eval/return": 7.0, "eval/episodes": 100}  # one during the run
        rows[-1] |= {"eval/return": 8.0, "eval/episodes": recorded}
    run = read_run(write_run(tmp_path / "run", rows=rows, **ENDED))
    played = []

    def plays(run, words=(), *, episodes, sampled=False):
        played.append(episodes)
        return {"eval/return": 9.0}

    assert closing_return(run, plays) == (9.0 if asked else 8.0)
    assert played == [100] * asked


def test_how_near_a_controller_holds_by_hand(tmp_path) -> None:
    """KL / target of the last half is .8 or 1.2 in eight iterations, 1.3 and .7 in two."""
    ratios = [9.0] * 10 + [0.8, 1.2] * 4 + [1.3, 0.7]
    rows = [{**row, "kl/ref/exact": 0.3 * r} for row, r in zip(rows_of(), ratios, strict=True)]
    run = read_run(write_run(tmp_path / "run", rows=rows))
    told = [compare.MEASURED[key](run, 0.3, toy_plays) for key in ("ratio", "near")]
    assert told == pytest.approx([1.0, 0.8])


def test_the_mean_kl_old_leaves_the_first_ten_iterations_out(tmp_path) -> None:
    rows = [{**row, "kl/old/exact": 9.0 if i < 10 else i / 100} for i, row in enumerate(rows_of())]
    run = read_run(write_run(tmp_path / "run", rows=rows))
    # of .10, .11, ... .19
    assert compare.MEASURED["kl"](run, 0.02, toy_plays) == pytest.approx(0.145)


@pytest.mark.parametrize("sweep", RESULTS[8].sweeps, ids=lambda sweep: sweep.name)
def test_the_losses_are_compared_at_the_presets_init_std(sweep) -> None:
    from klrl import compose

    given = dict(word.split("=", 1) for word in sweep.words)
    preset = compose(f"env={given['env']}", "loss=clip", "kl=none").actor.init_std
    assert float(given["actor.init_std"]) == preset


def test_the_heavier_hopper_is_twice_as_heavy_in_its_torso_alone() -> None:
    import gymnasium

    forgetting.prepare()
    masses = []
    for words in ({}, {"xml_file": forgetting.HEAVY}):
        env = gymnasium.make("Hopper-v5", **words)
        masses.append(env.unwrapped.model.body_mass[1:].copy())
        env.close()
    assert masses[1] / masses[0] == pytest.approx([2, 1, 1, 1])


def test_the_pages_losses_on_the_old_task_are_those_of_the_figures() -> None:
    with (page.FOLDER / "forgetting" / "figures.csv").open(encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["measure"] == "old"]
    seeds = {(line["env"], line["kl.coef"]): line["seeds"].split() for line in lines}
    told = []
    for env in ("pendulum", "hopper"):
        pairs = zip(seeds[env, "base"], seeds[env, "0"], strict=True)
        lost = [float(base) - float(tuned) for base, tuned in pairs]
        assert len(lost) == 5
        told.append(f"{env} {min(lost):.0f} to {max(lost):.0f}")
    index = " ".join((page.FOLDER / "README.md").read_text("utf-8").split())
    assert f"({told[0]} points, {told[1]})" in index
