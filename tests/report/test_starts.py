"""Runs that start each from the trained run of its own seed are the seeds of one setting."""

import pytest

from klrl.report.differences import differences_of
from klrl.report.measures import measured
from klrl.report.runs import find_runs
from klrl.report.settings import count_runs
from tests.report.toys import rows_of, write_run

pytestmark = pytest.mark.integration

SEEDS = [*range(5)]
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
    return count_runs(find_runs([str(root)]).runs)


@pytest.mark.parametrize(
    "init, reference, seeds, told",
    [
        (BASE, None, SEEDS, ("outputs/base/seed=*", None)),
        (BASE, BASE, SEEDS, ("outputs/base/seed=*", "outputs/base/seed=*")),
        # Each path is looked at by itself: one that all seeds share stays, as that of a single run.
        (BASE, "outputs/t/seed=0", SEEDS, ("outputs/base/seed=*", "outputs/t/seed=0")),
        ("outputs/base/seed=0", None, SEEDS, ("outputs/base/seed=0", None)),
        (BASE, None, [0], ("outputs/base/seed=0", None)),
        # The seed among other words.
        ("outputs/kl.coef=0.1,seed={}/", None, [1, 10], ("outputs/kl.coef=0.1,seed=*/", None)),
    ],
)
def test_paths_that_differ_in_the_runs_own_seed_make_one_setting(
    init, reference, seeds, told, tmp_path
):
    write(tmp_path / "own", init=init, reference=reference, seeds=seeds)
    (setting,) = settings_of(tmp_path)
    assert [run.seed for run in setting.runs] == seeds
    settings = setting.runs[0].settings
    found = settings.get("actor.init"), settings.get("reference.path")
    assert found == told
    write(tmp_path / "none", seeds=seeds)
    assert [[run.seed for run in each.runs] for each in settings_of(tmp_path)] == [seeds, seeds]


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
    assert [each.runs[0].settings["actor.init"] for each in settings_of(tmp_path)] == sorted(paths)


def test_seeds_that_start_from_runs_of_their_own_are_paired(tmp_path):
    for coef, init in ((0.1, BASE), (1.0, BASE), (2.0, "outputs/base/seed=0")):
        write(tmp_path, coef=coef, init=init)
    # Seed 1 starts from seed=1 in two of them, and from seed=0 in the third.
    pairs = differences_of(measured(settings_of(tmp_path)))
    assert {(min(each.a, each.b), max(each.a, each.b)): each.paired for each in pairs} == {
        (0, 1): True,
        (0, 2): False,
        (1, 2): False,
    }
