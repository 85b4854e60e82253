"""What a legal but hopeless environment is told before the run, in a line each."""

import math
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from torch import nn

from klrl.config import CNNActorConfig, Config, CustomActorConfig, GaussianActorConfig
from klrl.config.checks import to_config
from klrl.config.compose import compose
from klrl.config.explain import described
from klrl.control.env.copies import VectorGymEnv, make_copies
from klrl.control.policy.actor import make_agent, range_notes
from tests.config.test_yaml import ASKING, installed
from tests.control.toys import Drifting, Unseeded

TINY, HUGE = np.finfo(np.float32).min, np.finfo(np.float32).max


class Loc(nn.Module):
    """Begins with a mean of 500."""

    def __init__(self, inputs, outputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        nn.init.constant_(self.linear.bias, 500.0)

    def forward(self, seen):
        return self.linear(seen)


class Acting(gymnasium.Env):
    """Has any spaces."""

    def __init__(self, low, high, pictures: bool = False) -> None:
        self.action_space = spaces.Box(np.float32(low), np.float32(high))
        self.observation_space = spaces.Box(-1, 1, (2,))
        if pictures:
            self.observation_space = spaces.Box(0, 255, (40, 40, 3), np.uint8)


def range_lines(space, actor: str = "mlp", init_std: float = 1.0) -> list[str]:
    env = VectorGymEnv("X", 1, make=lambda: Acting(*space, pictures=actor == "cnn"))
    plain = ([8], "tanh", False)
    config = GaussianActorConfig(*plain, init_std=init_std, name=actor)
    if actor == "cnn":
        config = CNNActorConfig(*plain, init_std=1.0, arch="nature", scale=None, name="cnn")
    if actor == "custom":
        config = CustomActorConfig(
            *plain, init_std=init_std, target=f"{__name__}:Loc", name="custom", distribution="auto"
        )
    return range_notes(config, make_agent(config, env, normalize=True, separate=False), env)


TANH = "choose actor=tanh_normal"


@pytest.mark.parametrize(
    ("space", "how", "number", "cure"),
    [
        (([0], [1000]), {}, 0, TANH),
        (([100], [200]), {}, 0, TANH),
        (([-200], [-100]), {"actor": "normal"}, 0, TANH),
        (([-1, 0], [1, 1]), {}, 1, TANH),  # 66 % clipped
        (([-0.4], [0.4]), {}, 0, TANH),
        (([-50], [50]), {}, 0, TANH),
        (([100], [np.inf]), {}, 0, "rescale them by a wrapper"),
        (([0, 3], [1000, 3]), {}, 0, "rescale them by a wrapper"),
        (([0], [1000]), {"actor": "cnn"}, 0, "rescale them by a wrapper"),
        (([0], [1000]), {"actor": "custom"}, 0, "choose actor.distribution=tanh_normal"),
        (([0], [1000]), {"actor": "tanh_normal"}, None, ""),
        (([0], [1000]), {"actor": "custom", "init_std": 200.0}, None, ""),
        (([-0.4], [0.4]), {"init_std": 0.5}, None, ""),  # Humanoid: 42 % clipped
        (([-1, -2], [1, 2]), {}, None, ""),
        (([-10], [10]), {}, None, ""),
        (([-np.inf], [np.inf]), {}, None, ""),
        (([TINY], [HUGE]), {}, None, ""),
        (([-1, 3], [1, 3]), {}, None, ""),
    ],
    ids=str,
)
def test_a_gaussian_that_does_not_fit_its_range_is_told(space, how, number, cure) -> None:
    lines = range_lines(space, **how)
    assert len(lines) == (number is not None)
    for line in lines:
        assert line.startswith(f"actions: number {number} has the range {space[0][number]}")
        assert cure in line
        assert "\n" not in line


def test_the_told_share_is_that_of_clipped_actions() -> None:
    """Of a normal distribution by math.erf, and of its draws."""
    (line,) = range_lines(([-0.3], [0.6]), init_std=1.2)
    normal = [0.5 * (1 + math.erf(x / 1.2 / math.sqrt(2))) for x in (-0.3, 0.6)]
    share = 1 - (normal[1] - normal[0])
    draws = np.random.default_rng(0).normal(0, 1.2, 100_000)
    assert ((draws < -0.3) | (draws > 0.6)).mean() == pytest.approx(share, abs=0.01)
    assert f"0.75 standard deviations of the first policy, and {share:.0%} of its draws" in line


PRESETS = [("env", name) for name in described("env") if name != "gym"]
PRESETS += [("experiment", name) for name in described("experiment")]


@pytest.mark.integration
@pytest.mark.parametrize(("group", "preset"), PRESETS, ids=str)
def test_no_preset_is_told_anything(group: str, preset: str) -> None:
    config = to_config(compose([f"{group}={preset}", *ASKING.get((group, preset), [])]))
    if not isinstance(config, Config) or not installed(preset):
        pytest.skip("a language job, or its package is missing")
    config.actor.init = None
    env = make_copies(config.env, seed=0, num_envs=1)
    agent = make_agent(config.actor, env, normalize=True, separate=False)
    lines = range_notes(config.actor, agent, env)
    if preset != "minigrid":  # the same maze in each episode
        env.keep_episodes(lines.append)
    assert lines == []


# ------------------------------------------------------------------------------------ float32


class Showing(gymnasium.Env):
    """Shows ``of(t, rng)`` after 0, alone or under a key next to a picture; 15 steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, of, key: bool = False) -> None:
        self.of, self.key = of, key
        numbers = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        pictures = spaces.Box(0, 255, (4, 4, 3), np.uint8)
        self.observation_space = spaces.Dict(p=pictures, x=numbers) if key else numbers

    def seen(self):
        numbers = np.array([self.np_random.normal(), self.of(self.t, self.np_random)])
        return {"p": np.zeros((4, 4, 3), np.uint8), "x": numbers} if self.key else numbers

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.start = 0, self.np_random.uniform()
        return self.seen(), {}

    def step(self, action):
        self.t += 1
        return self.seen(), 0.0, self.t == 15, False, {}


@pytest.mark.parametrize("key", [False, True], ids=["vector", "key"])
@pytest.mark.parametrize(
    ("of", "coarse"),
    [
        (lambda t, rng: 1.7e9 + t, True),  # seconds since 1970; float32 has steps of 128
        (lambda t, rng: 1.7e18 + 1e9 * t, True),
        (lambda t, rng: 2.0**24 + t, True),
        (lambda t, rng: -1e8 + rng.uniform(-1, 1), True),
        (lambda t, rng: 1 + 1e-9 * t, True),
        (lambda t, rng: 2.0**24 - 20 + t, False),
        (lambda t, rng: 1.7e9 + 3600 * t, False),
        (lambda t, rng: 1e6 + rng.uniform(-1, 1), False),
        (lambda t, rng: 1e-30 * t, False),
        (lambda t, rng: 1 + 0.1**t, False),  # it comes to rest
        (lambda t, rng: 0.3 + 1e-16 * (t % 2), False),  # float64's own rounding
        (lambda t, rng: 1e9, False),
    ],
    ids=range(12),
)
def test_changes_that_float32_loses_are_told(of, coarse: bool, key: bool) -> None:
    lines: list[str] = []
    env = VectorGymEnv("X", 2, make=partial(Showing, of, key))
    assert env.keep_episodes(lines.append) == ""
    assert len(lines) == coarse, lines
    for line in lines:
        assert line.startswith("observation: number 1 is about ")
        assert "env.wrappers=" in line


# -------------------------------------------------------------------------------------- seeds


class OwnGenerator(Drifting):
    """Draws from a generator with a fixed seed, made with the copy or in each reset."""

    def __init__(self, each: bool = False) -> None:
        self.each, self.rng = each, np.random.default_rng(3)

    def noise(self) -> float:
        return float(self.rng.normal())

    def reset(self, *, seed=None, options=None):
        if self.each:
            self.rng = np.random.default_rng(3)
        return super().reset(seed=seed)


class Late(Drifting):
    """Begins at 0, and draws two of its steps alone."""

    def noise(self) -> float:
        return super().noise() if getattr(self, "steps", 0) > 5 else 0.0


class Coin(Drifting):
    """Half of the seeds play one episode, half another."""

    drift = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = float(self.np_random.integers(2))
        return np.array([self.position]), {}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (OwnGenerator, True),
        (partial(OwnGenerator, each=True), True),
        (lambda: gymnasium.make("FrozenLake-v1", is_slippery=False), True),
        (lambda: gymnasium.make("FrozenLake-v1"), False),
        (Drifting, False),
        (Late, False),
        (Coin, False),
        (Unseeded, False),
        (lambda: gymnasium.wrappers.NormalizeObservation(Drifting()), False),
    ],
    ids=range(9),
)
def test_copies_that_ignore_their_seeds_are_told(make, told: bool) -> None:
    lines: list[str] = []
    VectorGymEnv("X", 2, make=make).keep_episodes(lines.append)
    assert len(lines) == told, lines
    assert all("different seeds" in line and "reset(seed=seed)" in line for line in lines)


def test_a_run_prints_the_lines(tmp_path, capsys) -> None:
    from tests.conftest import QUICK
    from tests.runs.commands import said

    words = [w for w in QUICK if not w.startswith("env=")]
    toy = "env.target=tests.control.toys:Bounded"
    _, out, _ = said(capsys, *words, "env=custom", toy, "env.args.most=100", "hydra.run.dir=run")
    assert "actions: number 0 has the range -100 to 100, 200 standard deviations" in out
