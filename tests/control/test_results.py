"""Environments that break Gymnasium's contract, raise or hang, through the batched environment."""

import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from klrl.base.errors import FAILURES, ConfigError, EnvError, NonFiniteError
from klrl.config import EnvConfig
from klrl.control.env.copies import VectorGymEnv
from klrl.control.env.observation import layout_of
from klrl.control.run.job_checks import _check_a_step

ACTION = np.zeros((2, 1), np.float32)


class Faulty(gymnasium.Env):
    """The second copy returns something else from its third step, or does something else."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    made = 0

    def __init__(self, faults=None, act=None):
        self.faults, self.act = faults or {}, act
        self.copy, Faulty.made = Faulty.made, Faulty.made + 1

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.faults.get("reset", np.zeros(self.observation_space.shape, np.float32)), {}

    def step(self, action):
        self.steps += 1
        seen = np.zeros(self.observation_space.shape, np.float32)
        result = {"obs": seen, "reward": 0.5, "terminated": False}
        result["truncated"] = self.steps == 100
        if self.copy == 1 and self.steps == 3:
            if self.act:
                self.act()
            result |= self.faults
        return (*(result[key] for key in ("obs", "reward", "terminated", "truncated")), {})


def made(faults=None, act=None, step_timeout=None) -> VectorGymEnv:
    if "klrl-test/Faulty-v0" not in gymnasium.registry:
        gymnasium.register("klrl-test/Faulty-v0", Faulty, disable_env_checker=True)
    Faulty.made = 0
    kwargs = {"faults": faults, "act": act}
    return VectorGymEnv("klrl-test/Faulty-v0", 2, kwargs=kwargs, step_timeout=step_timeout)


def play(*how, **more) -> VectorGymEnv:
    env = made(*how, **more)
    env.reset_native()
    for _ in range(4):
        env.step_native(ACTION)
    return env


@pytest.mark.parametrize(
    ("faults", "named"),
    [
        ({"obs": np.float32(0.5)}, r"observation has shape \(\), but its space has shape \(3,\)"),
        ({"obs": np.zeros(3, np.complex64)}, r"observation is complex64 of shape \(3,\)"),
        ({"obs": "left"}, "observation is 'left' .str.; real numbers are expected"),
        ({"obs": [[1, 2], [3]]}, "observation is .*not an array"),
        ({"reward": 1j}, "reward is 1j .complex."),
        ({"reward": np.zeros(3)}, r"reward has shape \(3,\); one number is expected"),
        ({"terminated": "no"}, "terminated is 'no' .str.; True or False is expected"),
        ({"truncated": 2}, "truncated is 2 .int."),
    ],
    ids=str,
)
def test_a_wrong_result_is_refused_with_copy_and_step(faults, named) -> None:
    with pytest.raises(
        EnvError, match=rf"env.id=klrl-test/Faulty-v0: step 3 of copy 1: {named}"
    ) as refused:
        play(faults)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, FAILURES)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39], ids=str)
@pytest.mark.parametrize("what", ["obs", "reward"])
def test_a_value_that_is_not_finite_in_float32_is_named(what: str, value: float) -> None:
    name = {"obs": "observation"}.get(what, what)
    with pytest.raises(NonFiniteError, match=rf"{name} of klrl-test/Faulty-v0 \(copy 1\)"):
        made({what: np.full(3, value) if what == "obs" else value}).rollout(4)


def test_a_resets_observation_is_checked_too() -> None:
    with pytest.raises(EnvError, match=r"reset 0 of copy 0: observation has shape \(1,\)"):
        play({"reset": np.zeros(1)})


def test_other_spellings_of_the_same_are_taken() -> None:
    as_said = {"obs": [1.0, 2.0, 3.0], "reward": np.ones(1), "terminated": 1, "truncated": 0}
    env = play(as_said | {"terminated": np.array(True)})
    env = play(as_said)
    observations, rewards, terminated, truncated = env.step_native(ACTION)
    assert rewards.tolist() == [0.5, 0.5]
    assert not terminated.any()
    assert not truncated.any()
    assert observations.shape == (2, 3)


def test_what_it_raises_is_told_with_its_place() -> None:
    def broken() -> None:
        raise KeyError("seen")

    with pytest.raises(
        EnvError, match=r"step 3 of copy 1: raised KeyError: 'seen' \(test_results.py, line \d+\)"
    ):
        play(act=broken)


@pytest.mark.timeout(20)
def test_one_that_hangs_is_left_after_its_time() -> None:
    begun = time.monotonic()
    with pytest.raises(EnvError, match=r"step 3 of copy 1 took longer than env.step_timeout=0.2 s"):
        play(act=lambda: time.sleep(5), step_timeout=0.2)
    assert time.monotonic() - begun < 4
    play(step_timeout=5)


@pytest.mark.timeout(20)
def test_one_that_hangs_at_its_first_step_is_refused_beforehand() -> None:
    class Slow(Faulty):
        def step(self, action):
            time.sleep(5)

    config = EnvConfig("Slow", {}, 1, True, 1.0, step_timeout=0.2, name="gym")
    with pytest.raises(ConfigError, match=r"env.step_timeout=0.2: the first step of env.id=Slow"):
        _check_a_step(config, Slow(), None)


@pytest.mark.parametrize("image", [False, True])
def test_fractions_in_a_space_of_integers_are_refused(image: bool, monkeypatch) -> None:
    """They would be cut to whole numbers: 0.7 would be 0."""
    shape = (5, 4, 3) if image else (3,)
    monkeypatch.setattr(Faulty, "observation_space", spaces.Box(0, 255, shape, np.uint8))
    copy = Faulty({"reset": np.full(shape, 0.7)})
    layout = layout_of("env.id=X", copy.observation_space, copy.action_space)
    config = EnvConfig("Faulty", {}, 1, True, 1.0, step_timeout=None, name="gym")
    said = "its first step: observation has 0.7, which its space's uint8 cannot hold"
    with pytest.raises(ConfigError, match=said):
        _check_a_step(config, copy, layout)
    whole = np.full(shape, 7.0)
    monkeypatch.setattr(Faulty, "step", lambda self, action: (whole, 0.5, False, False, {}))
    copy = Faulty({"reset": whole})
    _check_a_step(config, copy, layout)


@pytest.mark.parametrize("number", [0.7, 300, np.nan])
@pytest.mark.parametrize(("result", "when"), [("reset", "reset 0 of"), ("obs", "step 3 of")])
@pytest.mark.parametrize("shape", [(3,), (5, 4, 3)])
def test_a_number_that_a_cast_would_change_is_refused_at_every_step(
    shape: tuple[int, ...], result: str, when: str, number: float, monkeypatch
) -> None:
    """A cast to uint8 makes 0.7 to 0, and 300 to 44."""
    monkeypatch.setattr(Faulty, "observation_space", spaces.Box(0, 255, shape, np.uint8))
    said = f"{when} copy .: observation has {number:g}, which its space's uint8 cannot hold"
    with pytest.raises(EnvError, match=said):
        play({result: np.full(shape, number)})
