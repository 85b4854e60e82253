"""``klrl kl``: two policies apart, state by state, against sums, integrals and gymnasium alone."""

import json
import math
import shutil
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence

from klrl.api import load_run
from klrl.base.errors import ConfigError
from klrl.control.policy.distributions import Normal as NormalFamily
from klrl.control.run.evaluate import measure_of
from klrl.control.run.load import trained_agent
from klrl.kl.divergences import LARGEST_JS
from klrl.train.policy_kl import distance, kl_between
from tests.conftest import QUICK
from tests.runs.commands import exits, said

NAMES = ["reverse", "forward", "js", "tv"]
APART = ("optim.lr=0.02", "learner.epochs=4")


def trained(folder: str, *words: str) -> Path:
    assert exits(*QUICK, *words, f"hydra.run.dir={folder}") == 0
    return Path(folder)


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    """Two policies that moved apart; the second started from the first."""
    root, words = tmp_path_factory.mktemp("both"), ("env=cartpole", "frames=512", *APART)
    first = trained(f"{root}/first", *words)
    trained(f"{root}/second", *words, "seed=1", f"actor.init={first}")
    return root


@pytest.fixture
def cartpoles(both) -> tuple[Path, Path]:
    """Both in the current folder."""
    first, second = (Path(shutil.copytree(both / name, name)) for name in ("first", "second"))
    return first, second


def measured(one, other, states: torch.Tensor) -> dict[str, np.ndarray]:
    measure = measure_of(one.family, one.policy_net, other.policy_net, NAMES)
    return {name: value.numpy() for name, value in measure(states).items()}


def log_p(agent, states: torch.Tensor) -> torch.Tensor:
    return agent.policy_net(states)[0].detach().double().log_softmax(-1)


def test_of_categoricals_each_is_a_sum_over_the_actions(cartpoles) -> None:
    one, other = (trained_agent(run) for run in cartpoles)
    states = torch.randn(50, 4)
    found = measured(one, other, states)
    p, q = log_p(one, states), log_p(other, states)
    m = (p.exp() + q.exp()) / 2
    kls = [kl_divergence(Categorical(logits=a), Categorical(logits=b)) for a, b in ((p, q), (q, p))]
    js = sum((x.exp() * (x - m.log())).sum(-1) for x in (p, q)) / 2
    tv = (p.exp() - q.exp()).clamp(min=0).sum(-1)
    for name, expected in zip(NAMES, (*kls, js, tv), strict=True):
        assert found[name] == pytest.approx(expected.numpy(), abs=1e-9)
    assert found["reverse"].max() > 1e-3
    # Pinsker, and the bounds of both.
    assert (found["tv"] <= np.sqrt(found["reverse"] / 2)).all()
    assert (found["js"] <= LARGEST_JS * found["tv"]).all()


def gaussian(loc: float, scale: float):
    """A policy net whose Gaussian is the same in all states."""
    return lambda states: (torch.full_like(states, loc), torch.full_like(states, scale))


@pytest.mark.parametrize(
    ("loc", "scale"),
    [(0.3, 1.0), (0.0, 1.5), (-2.0, 0.4), (5.0, 1.0), (0.01, 1.001), (0.4, 9.0), (1e-9, 1.0)],
)
def test_of_gaussians_on_a_line_all_are_integrals(loc: float, scale: float) -> None:
    measure = measure_of(NormalFamily(), gaussian(0.0, 1.0), gaussian(loc, scale), NAMES)
    p, q = (Normal(*torch.tensor(x, dtype=torch.float64)) for x in ((0.0, 1.0), (loc, scale)))
    states = torch.zeros(1, 1, dtype=torch.float64)
    found = {name: float(value) for name, value in measure(states).items()}
    end = max(13.0, abs(loc) + 13 * scale)
    grid = torch.linspace(-end, end, 2_000_001, dtype=torch.float64)
    a, b = p.log_prob(grid).exp(), q.log_prob(grid).exp()
    m = (a + b) / 2
    js = 0.5 * (torch.xlogy(a, a / m) + torch.xlogy(b, b / m)).nan_to_num().sum() * grid.diff()[0]
    assert found["js"] == pytest.approx(float(js), abs=1e-9)
    tv = 0.5 * (a - b).abs().sum() * grid.diff()[0]
    assert found["tv"] == pytest.approx(float(tv), abs=1e-9)
    for name, expected in (("reverse", kl_divergence(p, q)), ("forward", kl_divergence(q, p))):
        assert found[name] == pytest.approx(float(expected), abs=1e-9)


def by_hand(player, one, other, episodes: int) -> tuple[float, float]:
    """KL(one||other) per state where ``player`` acts, in Gymnasium alone; with its error."""
    env = gymnasium.make("CartPole-v1")
    sums, steps = [], []
    for seed in range(episodes):
        seen, total, count, over = env.reset(seed=seed)[0], 0.0, 0, False
        while not over:
            state = torch.from_numpy(seen)[None]
            p, q = log_p(one, state), log_p(other, state)
            total, count = total + float((p.exp() * (p - q)).sum()), count + 1
            action = int(Categorical(logits=log_p(player, state)).sample())
            seen, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
        sums.append(total), steps.append(count)
    mean = sum(sums) / sum(steps)
    residuals = np.array(sums) - mean * np.array(steps)
    return mean, float(residuals.std() / math.sqrt(episodes) / np.mean(steps))


@pytest.mark.integration
@pytest.mark.parametrize("on", ["first", "second"])
def test_the_states_are_those_that_the_policy_named_visits(on, cartpoles) -> None:
    first, second = (trained_agent(run) for run in cartpoles)
    player = {"first": first, "second": second}[on]
    expected, error = by_hand(player, first, second, 50)
    found = kl_between("first", "second", on=on, episodes=50)
    name = f"KL(run||other) on {'run' if on == 'first' else 'other'}"
    one = found.distances[name]
    assert abs(one.mean - expected) < 4 * math.hypot(error, one.error)
    assert found.episodes == 50
    assert one.total == pytest.approx(one.mean * found.states / 50)


@pytest.mark.integration
def test_a_run_without_another_is_compared_with_its_reference(cartpoles) -> None:
    """Which is where the second started: the first."""
    alone, named = (kl_between("second", other, episodes=9) for other in (None, "first"))
    for mine, theirs in zip(alone.distances.values(), named.distances.values(), strict=True):
        assert mine == theirs
    assert next(iter(alone.distances)) == "KL(policy||reference) on policy"
    same = kl_between("first", "first", episodes=9)
    assert max(each.worst for each in same.distances.values()) < 1e-15
    assert next(iter(same.distances)) == "KL(run||other) on run"


@pytest.mark.integration
def test_the_error_of_the_mean_covers_it() -> None:
    """Episodes of unequal lengths, whose states are alike within one: 200 repeats."""
    rng = np.random.default_rng(0)

    def episodes(count: int) -> list[np.ndarray]:
        levels = rng.exponential(1.0, count)
        lengths = rng.integers(5, 50, count)
        return [x * rng.random(n) * n / 25 for x, n in zip(levels, lengths, strict=True)]

    true = distance(episodes(50_000)).mean
    found = [distance(episodes(60)) for _ in range(200)]
    assert np.mean([each.error for each in found]) == pytest.approx(
        np.std([each.mean for each in found]), rel=0.15
    )
    covered = np.mean([abs(each.mean - true) < 1.96 * each.error for each in found])
    assert 0.9 <= covered <= 0.98


def test_by_hand_the_mean_the_worst_and_the_sum() -> None:
    found = distance([np.array([1.0, 5.0]), np.array([0.0, 0.0, 3.0, 1.0])])
    assert (found.mean, found.worst, found.episode, found.step) == (10 / 6, 5.0, 0, 1)
    assert (found.total, found.total_error) == (5.0, 1.0)
    assert distance([np.array([2.0])]).error is None
    # Episodes of unequal lengths say the same of a state: the mean over states is certain.
    assert distance([np.full(n, 2.0) for n in (3, 9, 30)]).error == pytest.approx(0, abs=1e-12)


@pytest.mark.integration
def test_the_command_prints_a_table_and_json(cartpoles, capsys) -> None:
    assert exits("kl", "first", "--to", "second", "--episodes", "5") == 0
    told = capsys.readouterr().out
    assert told.startswith("first against second, last checkpoints: ")
    assert "\nKL(other||run) on run" in told
    assert exits("kl", "first", "--to", "second", "--episodes", "5", "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert row == load_run("first").kl("second", episodes=5).row
    assert row["episodes"] == 5


def test_a_policy_of_other_actions_is_refused(cartpoles) -> None:
    trained("pendulum")
    with pytest.raises(ConfigError, match="^other=.*/pendulum: its action distribution is norm"):
        kl_between("first", "pendulum")
    trained("free", "env=cartpole", "kl=none")
    with pytest.raises(
        ConfigError, match=r"^RUN=.*/free: has no reference \(kl=none\); name another policy"
    ):
        kl_between("free")


def test_in_python_a_refusal_names_the_argument(cartpoles) -> None:
    run = load_run("first")
    for given, named in (
        (("wrong",), "other=wrong: no"),
        (("~nobody-of-that-name/run",), "other=~nobody-of-that-name/run: no"),
        ((None, "kl.coef=1"), "kl.coef=1: eval"),
    ):
        with pytest.raises(ConfigError, match=f"^{named}"):
            run.kl(*given)
    with pytest.raises(ConfigError, match="^on=a--to=b: no such folder"):
        run.kl(on="a--to=b")


@pytest.mark.integration
def test_a_squashed_policy_of_other_bounds_is_refused(capsys) -> None:
    """The KL of the Gaussians before tanh is no KL of the actions if the bounds differ."""
    how = ("env=custom", "env.target=tests.control.toys:Bounded", "actor=tanh_normal")
    trained("wide", *how, "env.args={most: 2}"), trained("narrow", *how)
    for on in ("wide", "narrow"):
        with pytest.raises(ConfigError, match="^other=.*narrow: its range of actions is -1..1, "):
            kl_between("wide", "narrow", on=on)
    for setting in ("reference=checkpoint reference.path=wide", "actor.init=wide"):
        code, _, error = said(capsys, *QUICK, *how, *setting.split())
        told = "=wide: its range of actions is -2..2, but this run's is -1..1; give another run"
        assert (code, told in error) == (2, True), error
    # A policy keeps its bounds on a task with others, where it may also act for two others.
    trained("again", *how, "reference=checkpoint", "reference.path=narrow")
    for words, on in (([], "narrow"), ([], "wide"), (["env.args.most=2"], "narrow")):
        assert kl_between("narrow", "again", words, on=on, episodes=2).episodes == 2
    assert exits("evaluate", "narrow", "env.args.most=2", "--episodes", "2") == 0
