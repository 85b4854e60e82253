"""``benchmarks/pages/predictors.py``: R^2, intervals and verdict on cells with a known answer."""

import numpy as np
import pytest

from benchmarks.pages import predictors as analysis
from benchmarks.pages.__main__ import FOLDER
from benchmarks.pages.predictors import ARMS, KLS, PREDICTORS, TASKS, Points
from klrl.report.statistics import holm, two_sided

SETTINGS = ("rl 0", "rl 1", "rl 3", "distill reverse", "distill forward", "clone")


def made(loss, bases=10, **z) -> Points:
    """Points of predictors z [bases, settings], and of losses."""
    nothing = np.random.default_rng(3).normal(size=(bases, len(SETTINGS)))
    return Points(SETTINGS, {key: z.get(key, nothing) for key in PREDICTORS}, loss)


def numpys(x, y) -> float:
    """R^2 by numpy's own regression."""
    left = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
    return 1 - left.var() / y.var()


@pytest.mark.parametrize("per_arm", [False, True])
def test_r_squared_is_that_of_numpys_regression(per_arm) -> None:
    """Of the bases as they are, and of a resample, whose bases are repeated."""
    rng = np.random.default_rng(0)
    z, y = rng.lognormal(size=(2, 4, 6))
    counts = np.array([[1, 1, 1, 1], [2, 0, 1, 1]])
    found = analysis.r2(made(y, 4, weights=z), "weights", counts, per_arm)
    for times, value in zip(counts, found, strict=True):
        of = np.repeat(np.arange(4), times)
        x, arm = z[of].ravel(), np.tile([0, 0, 0, 1, 2, 3], 4)
        columns = [np.ones(24), x, x**2, *((arm == a) * 1.0 for a in (1, 2, 3) if per_arm)]
        assert value == pytest.approx(numpys(np.stack(columns, 1), y[of].ravel()), abs=1e-9)


def test_an_arm_is_its_settings() -> None:
    z = np.arange(60.0).reshape(10, 6)
    of = [made(z, weights=z).arm(arm) for arm in ARMS]
    assert [p.settings for p in of] == [SETTINGS[:3], SETTINGS[5:], SETTINGS[3:4], SETTINGS[4:5]]
    assert of[0].y.tolist() == z[:, :3].tolist()
    assert of[1].z["weights"].tolist() == z[:, 5:].tolist()


def test_points_are_losses_on_the_old_task_and_roots_of_kls() -> None:
    policy = {**dict.fromkeys(KLS, 0.25), "weights": 3.0, "new": -200.0, "old": -500.0}
    line = {"policies": {"base": {"old": -180.0}, "expert": policy, "rl 0": policy}}
    found = analysis.points([line])
    assert (found.settings, found.y.tolist()) == (("rl 0",), [[320.0]])
    assert {key: value.item() for key, value in found.z.items()} == {
        **dict.fromkeys(KLS, 0.5), "weights": 3.0, "new": -200.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kl", "weights", "said"),
    [
        (0.1, 2.0, "supported"),
        (2.0, 0.1, "refuted"),
        (0.6, 0.6, "undecided"),
        (2.0, 2.0, "refuted"),  # neither predicts
    ],
)
def test_the_verdict_where_it_is_known(kl, weights, said) -> None:
    """Predictors that are the loss and noise of so much; the answer is in the noise."""
    rng, tasks = np.random.default_rng(6), {}
    for task in TASKS:
        y = rng.normal(size=6) + 0.5 * rng.normal(size=(10, 6))  # the settings decide
        noisy = {k: y + s * rng.normal(size=y.shape) for k, s in
                 (("new_forward", kl), ("weights", weights))}  # fmt: skip
        tasks[task] = made(y, **noisy)
    assert analysis.verdict(tasks).endswith(said)
    fewer = {**tasks, "hopper": made(tasks["hopper"].y[:9], 9)}
    assert analysis.verdict(fewer).endswith("nothing before all bases are in")


def test_a_threshold_that_no_kl_could_meet_refutes_nothing() -> None:
    """The bases decide the losses: the settings' means explain next to nothing."""
    rng, tasks = np.random.default_rng(6), {}
    for task in TASKS:
        y = rng.normal(size=(10, 1)) + 0.1 * rng.normal(size=(10, 6))
        noisy = {key: y + 5 * rng.normal(size=y.shape) for key in ("new_forward", "weights")}
        tasks[task] = made(y, **noisy)
    assert "undecided: no KL could have met the threshold" in analysis.verdict(tasks)
    share = np.mean([p.y.mean(0).var() / p.y.var() for p in tasks.values()])
    assert share < 0.1
    assert analysis.verdict(tasks).endswith(f"{share:.2f}")


def test_an_interval_is_the_percentiles_of_the_resamples() -> None:
    assert analysis.interval(np.array([7.0, *range(101)])) == pytest.approx((7.0, 2.5, 97.5))


def test_the_index_tells_the_study_as_its_cells_do() -> None:
    found = analysis.read_cells(FOLDER / "predictors")["pendulum"]
    told = []
    for name in ("rl 0", "rl 1"):
        lost = [line["return"] - line["policies"][name]["old"] for line in found]
        told.append(np.mean(lost))
    index = " ".join((FOLDER / "README.md").read_text("utf-8").split())
    without = f"lose on average {told[0]:.0f} points of return on the old task"
    assert f"{without}; with `kl.coef=1` they gain {-told[1]:.0f}." in index


def test_the_page_tells_paired_differences_and_shares_as_its_cells_do() -> None:
    """Of the loss: each expert arm less ``rl 0``; what the means of settings and bases explain."""
    page = " ".join((FOLDER / "predictors" / "README.md").read_text("utf-8").split())
    settings, bases = [], []
    for task, lines in analysis.read_cells(FOLDER / "predictors").items():
        p = analysis.points(lines)
        loss = dict(zip(p.settings, p.y.T, strict=True))
        for arm in ("distill reverse", "distill forward", "clone"):
            paired = loss[arm] - loss["rl 0"]
            error = paired.std(ddof=1) / len(paired) ** 0.5
            assert f"{paired.mean():+,.0f} ({error:.0f})" in page, (task, arm)
        settings.append(p.y.mean(0).var() / p.y.var())
        bases.append(p.y.mean(1).var() / p.y.var())
    first, second, third = (f"{share:.2f}"[1:] for share in settings)
    assert f"({first}, {second} and {third} on the three tasks)" in page
    assert f"explains {min(bases):.2f} to {max(bases):.2f}.".replace(" 0", " ") in page


def test_the_page_tells_ranks_and_what_survives_holm_as_its_cells_do() -> None:
    page = " ".join((FOLDER / "predictors" / "README.md").read_text("utf-8").split())
    ordered, p = dict.fromkeys(("new_forward", "weights", "kl.coef"), 0), {}
    for task, lines in analysis.read_cells(FOLDER / "predictors").items():
        of = analysis.points(lines).arm("rl ")
        coef = np.array([float(setting.split()[1]) for setting in of.settings])
        for base, y in enumerate(of.y):
            z = {"kl.coef": -coef, **{key: of.z[key][base] for key in ("new_forward", "weights")}}
            for key in ordered:
                ranks = [np.argsort(np.argsort(each)) for each in (z[key], y)]
                ordered[key] += np.corrcoef(*ranks)[0, 1] > 0
        for i, setting in enumerate(of.settings[1:], 1):
            paired = of.y[:, 0] - of.y[:, i]
            t = paired.mean() / (paired.std(ddof=1) / len(paired) ** 0.5)
            p[task, setting] = float(two_sided(t, len(paired) - 1))
        if task == "hopper":
            base = np.repeat([line["return"] for line in lines], 8)
            share = np.corrcoef(base, analysis.points(lines).y.ravel())[0, 1] ** 2
            words = f"The base's own return explains {share:.2f} on hopper"
            assert words.replace(" 0", " ") in page
    assert ordered == dict.fromkeys(ordered, 27)
    assert "positive in 27 of 30 bases" in page
    adjusted = dict(zip(p, holm(list(p.values())), strict=True))
    (survives,) = [key for key, value in adjusted.items() if value < 0.05]
    assert survives == ("hopper", "rl 3")
    assert f"(p = {adjusted[survives]:.3f})".replace(" 0", " ") in page
