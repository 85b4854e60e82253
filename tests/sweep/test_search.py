"""``search=optuna``: what is asked, what is told, what a second start does."""

import json
import math
from pathlib import Path

import optuna
import pytest

import klrl.train.loop
from klrl.base.errors import Interrupted, NonFiniteError
from klrl.config.overrides import parse
from klrl.runs.folder import run_id
from klrl.sweep.search import space_of, words
from tests.sweep.commands import sweep as exits

pytestmark = pytest.mark.integration

SEARCH = ("search=optuna", "eval.every=1", "kl.coef=tag(log, interval(0.001, 10))", "seed=0,1,2")


def score(config) -> float:
    """Best at kl.coef = 0.1; a seed moves it by itself."""
    return -((math.log10(config.kl.coef) + 1) ** 2) + config.seed


@pytest.fixture
def runs(monkeypatch) -> list[tuple[float, int]]:
    """Jobs that take no time: their evaluation return is :func:`score`."""
    began: list[tuple[float, int]] = []

    def start(config, files, **kwargs):
        began.append((config.kl.coef, config.seed))
        files.open(config)
        row = {"run": run_id(files.path), "frames": config.frames, "time/iteration": 0.0}
        row["eval/return"] = score(config)
        files.metrics.write_text(json.dumps(row) + "\n", encoding="utf-8")
        files.close("finished", frames=config.frames)

    monkeypatch.setattr(klrl.train.loop, "start", start)
    return began


def study() -> optuna.Study:
    backend = optuna.storages.journal.JournalFileBackend("outputs/a/study.journal")
    return optuna.load_study(study_name="klrl", storage=optuna.storages.JournalStorage(backend))


def test_a_trials_value_is_the_mean_over_its_seeds(runs, capfd) -> None:
    assert exits(*SEARCH, "search.trials=4") == 0
    assert len(runs) == 12
    trials = study().trials
    assert [t.state.name for t in trials] == ["COMPLETE"] * 4
    for trial in trials:
        coef = float(words(trial.params)[0].partition("=")[2])
        assert coef == pytest.approx(trial.params["kl.coef"], rel=5e-4), "four digits are kept"
        expected = -((math.log10(coef) + 1) ** 2) + (0 + 1 + 2) / 3
        assert trial.value == pytest.approx(expected, abs=1e-12)
        assert Path(f"outputs/a/kl.coef={coef!r},seed=1/metrics.jsonl").exists()
    best = max(t.value for t in trials)
    assert f"{best:.4g}" in capfd.readouterr().out.split("best of 4 trials")[1].splitlines()[1]


def test_a_search_that_was_stopped_goes_on_with_the_same_trial(runs, monkeypatch, capfd) -> None:
    real, calls = klrl.train.loop.start, []

    def stopped(config, folder, **kwargs):
        calls.append(config.seed)
        if len(calls) == 5:  # the second seed of the second trial
            raise Interrupted(2)
        return real(config, folder, **kwargs)

    monkeypatch.setattr(klrl.train.loop, "start", stopped)
    assert exits(*SEARCH, "search.trials=3") == 130
    first = [words(t.params) for t in study().trials]
    assert [t.state.name for t in study().trials] == ["COMPLETE", "RUNNING"]
    monkeypatch.setattr(klrl.train.loop, "start", real)
    assert exits(*SEARCH, "search.trials=3") == 0
    assert [t.state.name for t in study().trials] == ["COMPLETE"] * 3
    assert [words(t.params) for t in study().trials][:2] == first
    assert len(runs) == len(set(runs)) == 9, "no job ran twice"
    assert exits(*SEARCH, "search.trials=3") == 0
    assert len(runs) == 9
    assert exits(*SEARCH, "search.trials=4") == 0
    assert len(runs) == 12
    assert len({words(t.params)[0] for t in study().trials}) == 4


def test_a_seed_that_fails_fails_its_trial_alone(runs, monkeypatch, capfd) -> None:
    real = klrl.train.loop.start

    def sometimes(config, folder, **kwargs):
        if config.seed == 1 and len(runs) < 3:
            raise NonFiniteError("kl/ref/k1 is inf")
        return real(config, folder, **kwargs)

    monkeypatch.setattr(klrl.train.loop, "start", sometimes)
    assert exits(*SEARCH, "search.trials=2") == 1
    assert [t.state.name for t in study().trials] == ["FAIL", "COMPLETE"]
    assert "failed, 2 of 3 seeds have eval/return" in capfd.readouterr().out


def test_choices_and_minimising(runs) -> None:
    given = ("search=optuna", "kl=legacy,retrieve", "kl.coef=interval(0.05,0.2)", "seed=0")
    given = (*given, "eval.every=1")
    assert exits(*given, "search.trials=6", "search.at_once=3", "search.direction=minimize") == 0
    assert {t.params["kl"] for t in study().trials} <= {"legacy", "retrieve"}
    assert study().direction.name == "MINIMIZE"
    assert all(0.05 <= t.params["kl.coef"] <= 0.2 for t in study().trials)


def test_another_space_in_the_same_folder_is_refused(runs, capsys) -> None:
    assert exits(*SEARCH, "search.trials=1") == 0
    assert exits(*SEARCH, "search.trials=1", "frames=256") == 2
    assert "has a search with other overrides" in capsys.readouterr().err


def test_a_space_is_checked_at_its_ends() -> None:
    given = ["frames=8", "kl.coef=tag(log, interval(0.01, 1))", "kl=a,b", "seed=3,4"]
    space = space_of(parse(given))
    assert (space.fixed, space.seeds) == (["frames=8"], ["seed=3", "seed=4"])
    ends = {tuple(job) for job in space.ends()}
    assert ends == {
        ("frames=8", "kl.coef=0.01", "kl=a", "seed=3"),
        ("frames=8", "kl.coef=0.01", "kl=a", "seed=4"),
        ("frames=8", "kl.coef=1.0", "kl=a", "seed=3"),
        ("frames=8", "kl.coef=0.01", "kl=b", "seed=3"),
    }
