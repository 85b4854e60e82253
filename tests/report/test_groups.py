"""Runs are the seeds of one setting if a sweep takes their jobs for one; each has its own name."""

from dataclasses import asdict

import pytest

from klrl.config.compose import job_config
from klrl.report.runs import find_runs
from klrl.report.settings import count_runs
from tests.report.toys import write_run

pytestmark = pytest.mark.integration

OWN = "controller=custom controller.target=rule:Rule"
SORT = "experiment=sort_digits"
OLD = None  # a run of klrl before that setting


@pytest.fixture(autouse=True)
def rule(tmp_path, monkeypatch) -> None:
    (tmp_path / "rule.py").write_text("class Rule:\n    def __init__(self, scale=1): pass\n")
    monkeypatch.syspath_prepend(tmp_path)


def settings_of(root, words, other, edits):
    """The report's settings of three runs of each job; ``edits`` change those of the first."""
    for i, each in enumerate((words, other)):
        settings = asdict(job_config(each.split()))
        for key, value in edits.items() if i == 0 else ():
            group, name = key.split(".")
            settings[group][name] = value
            if value is OLD:
                del settings[group][name]
        for seed in range(3 * i, 3 * i + 3):
            write_run(root / str(seed), seed=seed, config={**settings, "seed": seed})
    return count_runs(find_runs([str(root)]).runs)


@pytest.mark.parametrize(
    "words, other, edits",
    [
        ("", "", {"eval.sampled": OLD}),
        ("", "", {"env.wrappers": OLD, "kl.divergence": OLD}),
        (SORT, SORT, {"actor.init_which": OLD}),
        (OWN, OWN, {"controller.path": "/elsewhere"}),  # where the code was found
        (OWN, OWN, {"controller.args": {"scale": 1.0}}),
        ("eval.every=0", "eval.every=0", {"eval.episodes": 77}),
        (SORT, f"{SORT} collector.samples_every=7", {}),
        ("logger=none", "logger=wandb", {}),
    ],
)
def test_jobs_that_a_sweep_takes_for_one_make_one_setting(words, other, edits, tmp_path) -> None:
    (setting,) = settings_of(tmp_path / "runs", words, other, edits)
    assert [run.seed for run in setting.runs] == [*range(6)]


@pytest.mark.parametrize(
    "words, other, edits, names",
    [
        ("", "eval.sampled=true", {"eval.sampled": OLD},
         ["eval.sampled=false", "eval.sampled=true"]),
        (OWN, f"{OWN} ++controller.args.scale=1.5", {"controller.path": "/elsewhere"},
         ["controller.args.scale=1", "controller.args.scale=1.5"]),
        ("eval.every=5", "eval.every=5 eval.episodes=7", {},
         ["eval.episodes=20", "eval.episodes=7"]),
        ("kl.coef=0.1", "kl.coef=0.1000001", {}, ["kl.coef=0.1", "kl.coef=0.1000001"]),
    ],
)  # fmt: skip
def test_other_jobs_make_settings_of_other_names(words, other, edits, names, tmp_path) -> None:
    found = settings_of(tmp_path / "runs", words, other, edits)
    assert {each.name: len(each.runs) for each in found} == dict.fromkeys(names, 3)
