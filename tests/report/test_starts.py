"""Runs that start each from the trained run of its own seed are the seeds of one setting."""

import pytest

from klrl.report.differences import differences_of
from klrl.report.measures import summary_lines
from klrl.report.runs import find_runs
from klrl.report.settings import group_runs, names_of
from tests.report.toys import rows_of, write_run

pytestmark = pytest.mark.integration

SEEDS = range(5)
BASE = "outputs/base/seed={}"


def write(root, coef=0.1, seeds=SEEDS, init=None, reference=None):
    """A run per seed; ``{}`` in a path is its seed."""
    for seed in seeds:
        config = {"kl": {"coef": coef}}
        if init:
            config["actor"] = {"init": init.format(seed)}
        if reference:
            config["reference"] = {"name": "run", "path": reference.format(seed)}
        rows = rows_of(10 * coef + seed**2)
        write_run(root / f"{coef}_{seed}", seed=seed, rows=rows, config=config)


def settings_of(root):
    runs = find_runs([str(root)]).runs
    return group_runs(runs, names_of(runs))[0]


def seeds_by_name(root):
    return {each.name: [run.seed for run in each.runs] for each in settings_of(root)}


def test_paths_that_differ_in_the_runs_own_seed_make_one_setting(tmp_path):
    write(tmp_path / "own", init=BASE)
    write(tmp_path / "none")
    both = {"actor.init=outputs/base/seed=*": [*SEEDS], "no actor.init": [*SEEDS]}
    assert seeds_by_name(tmp_path) == both
    write(tmp_path / "reference", init=BASE, reference=BASE)
    (setting,) = settings_of(tmp_path / "reference")
    assert setting.settings["reference.path"] == "outputs/base/seed=*"


def test_seeds_that_start_from_runs_of_their_own_are_paired(tmp_path):
    write(tmp_path / "a", coef=0.1, init=BASE)
    write(tmp_path / "b", coef=1.0, init=BASE)
    write(tmp_path / "c", coef=2.0, init="outputs/base/seed=0")
    lines = summary_lines(settings_of(tmp_path))
    names = [line.setting.name for line in lines]
    assert names == [f"kl.coef={coef}" for coef in (0.1, 1, 2)]
    # Seed 1 starts from seed=1 in two of them, and from seed=0 in the third.
    paired = {(each.a, each.b): each.paired for each in differences_of(lines)}
    assert paired == {(0, 1): True, (0, 2): False, (1, 2): False}


def test_a_start_that_all_seeds_share_stays_as_it_is(tmp_path):
    write(tmp_path / "shared", init="outputs/base/seed=0")
    write(tmp_path / "none")
    shared = {"actor.init=outputs/base/seed=0": [*SEEDS], "no actor.init": [*SEEDS]}
    assert seeds_by_name(tmp_path) == shared


def test_each_path_is_looked_at_by_itself(tmp_path):
    write(tmp_path, init=BASE, reference="outputs/teacher/seed=0")
    (setting,) = settings_of(tmp_path)
    assert [run.seed for run in setting.runs] == [*SEEDS]
    assert setting.settings["actor.init"] == "outputs/base/seed=*"
    assert setting.settings["reference.path"] == "outputs/teacher/seed=0"


@pytest.mark.parametrize(
    "paths",
    [
        ["outputs/a/seed=0", "outputs/b/seed=1"],  # another start, whatever its seed
        ["outputs/base/seed=1", "outputs/base/seed=0"],  # of each other's seed
        ["outputs/base/seed=01", "outputs/base/seed=11"],
        ["outputs/base/env.seed=0", "outputs/base/env.seed=1"],
        ["outputs/base0", "outputs/base1"],
    ],
)
def test_paths_that_differ_otherwise_are_settings_of_their_own(paths, tmp_path):
    for seed, path in enumerate(paths):
        write(tmp_path, seeds=[seed], init=path)
    assert len(settings_of(tmp_path)) == 2
    assert [each.settings["actor.init"] for each in settings_of(tmp_path)] == sorted(paths)


def test_the_seed_may_stand_among_other_words_of_the_path(tmp_path):
    write(tmp_path, seeds=(1, 10), init="outputs/base/kl.coef=0.1,seed={}/")
    (setting,) = settings_of(tmp_path)
    assert setting.settings["actor.init"] == "outputs/base/kl.coef=0.1,seed=*/"


def test_a_single_run_keeps_its_path(tmp_path):
    write(tmp_path, seeds=[0], init=BASE)
    assert settings_of(tmp_path)[0].settings["actor.init"] == "outputs/base/seed=0"
