"""Single episodes: played again from seed and actions they are, to the byte, what they were."""

import random
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, RecordEpisodeStatistics

from klrl.base.errors import EnvError
from klrl.base.seeds import derived_seed
from klrl.control.env.copies import VectorGymEnv
from klrl.control.env.episodes import why_unrepeatable
from tests.control.toys import Dice, Drifting, Masked, Unseeded

IDS = (
    *("Pendulum-v1", "CartPole-v1", "Acrobot-v1", "MountainCarContinuous-v0", "FrozenLake-v1"),
    *(
        "Taxi-v4",
        "klrl.control.env.catch:klrl/Catch-v0",
        "HalfCheetah-v5",
        "Hopper-v5",
        "Walker2d-v5",
    ),
    *("Ant-v5", "Humanoid-v5", "Swimmer-v5", "Reacher-v5", "InvertedDoublePendulum-v5"),
)
#: Steps of two copies; in most of the tasks episodes end in between, and none begins at the end.
STEPS = 45


def played(env: VectorGymEnv, steps: int, seed: int = 7) -> list[bytes]:
    """Answers to random actions; episodes that end are followed by others."""
    torch.manual_seed(seed)
    told = []
    for _ in range(steps):
        results = env.step_native(env.action_spec.rand().numpy())
        told += [result.tobytes() for result in results]
        ended = results[2] | results[3]
        if ended.any():
            told.append(env.reset_native(ended).tobytes())
    return told


def kept(env_id: str, seed: int = 3, **how: Any) -> VectorGymEnv:
    env = VectorGymEnv(env_id, 2, seed=seed, **how)
    assert env.keep_episodes() == ""
    return env


@pytest.mark.parametrize("env_id", IDS)
def test_other_copies_go_on_with_the_same_bytes(env_id: str) -> None:
    first, second = kept(env_id), kept(env_id, seed=4)
    for env, steps in ((first, STEPS), (second, 9)):
        env.reset_native()
        played(env, steps)
    for _ in range(2):  # what was played again can be saved again
        state = first.episodes()
        assert state is not None
        second.play_again(state)
        assert played(first, 40) == played(second, 40)


def test_what_is_held_of_an_episode_is_its_seed_and_actions() -> None:
    """Gymnasium's own copy, given these alone, sees what the copy saw last."""
    env = kept("CartPole-v1", seed=11)
    env.reset_native()
    played(env, STEPS)
    state = env.episodes()
    assert state is not None
    assert min(state["numbers"]) > 0, "first episodes would hide a wrong count"
    assert len(set(state["begun"])) == 2, "as would those that begin together"
    for i, (number, begun) in enumerate(zip(state["numbers"], state["begun"], strict=True)):
        own = gymnasium.make("CartPole-v1")
        own.reset(seed=derived_seed(11 + i, "episode", number))
        for action in state["actions"][begun:, i]:
            seen = own.step(int(action))[0]
        np.testing.assert_array_equal(seen, env.simulators.rows["seen"][i])


def test_each_episode_of_a_copy_has_another_seed_and_none_of_another_copys() -> None:
    starts = []
    for seed in (3, 3, 4):
        env = VectorGymEnv("Pendulum-v1", 2, seed=seed)
        starts.append(np.stack([env.reset_native().copy() for _ in range(3)]))
    np.testing.assert_array_equal(starts[0], starts[1])
    np.testing.assert_array_equal(starts[0][:, 1], starts[2][:, 0])  # seed + copy
    assert len(np.unique(starts[0].reshape(6, 3), axis=0)) == 6


@pytest.mark.parametrize("other", [{"seen": 1e-9}, {"paid": 1e-9}, {"ends": 60}])
def test_a_result_that_differs_is_found(other: dict[str, float]) -> None:
    """One that no later result tells: of what was seen, of what was paid, of an end."""

    class Once(Drifting):
        def step(self, action: int) -> Any:
            observation, reward, *_ = super().step(action)
            last = now and self.steps == 20
            shown = observation + (now.get("seen", 0) if last else 0)
            paid = reward + (now.get("paid", 0) if last else 0)
            return shown, paid, bool(last and "ends" in now), False, {}

    now: dict[str, float] = {}
    env = kept("Once", make=Once)
    env.reset_native()
    played(env, 30)
    state = env.episodes()
    assert state is not None
    env.play_again(state)
    now.update(other)
    with pytest.raises(EnvError, match="env.id=Once: copy 0 does not repeat its recorded episode"):
        env.play_again(state)


class Counting(Drifting):
    """What it pays counts its episodes."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episodes += 1
        return super().reset(seed=seed)

    def step(self, action: int) -> Any:
        observation, _, *rest = super().step(action)
        return observation, self.episodes, *rest


class Lasting(Drifting):
    """A new episode begins where the last one ended."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.position += (before := getattr(self, "last", 0.0))
        self.last = before + 1
        return np.array([self.position]), {}


class Reseeding(Drifting):
    """It seeds a generator that all copies draw from."""

    def noise(self) -> float:
        return float(np.random.normal())

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        np.random.seed(seed)
        return super().reset(seed=seed)


BEGINS = "after the same seeded reset, a used copy differs from a new one"
DIFFERS = "two copies with the same seed and actions differ in step 1"
STATE = "; it keeps state across resets, which the new copies of an evaluation lack"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Drifting, ""),
        (lambda: RecordEpisodeStatistics(Drifting()), ""),
        (lambda: gymnasium.make("Ant-v5"), ""),
        (lambda: NormalizeReward(Drifting()), DIFFERS + STATE),
        (lambda: NormalizeObservation(Drifting()), BEGINS + STATE),
        (Counting, DIFFERS + STATE),
        (Lasting, BEGINS + STATE),
        (Reseeding, DIFFERS),
        (Unseeded, BEGINS),
        (Dice, BEGINS),
    ],
)
def test_what_repeats_itself(make: Any, why: str) -> None:
    assert why_unrepeatable(make) == why


class ByLuck(Masked):
    """Pays by a generator of the operating system."""

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, random.SystemRandom().random(), *rest


@pytest.mark.parametrize("where", ["observation", "info", "several"])
@pytest.mark.parametrize(("toy", "why"), [(Masked, ""), (ByLuck, DIFFERS)])
def test_an_environment_is_given_no_action_that_it_excludes(where: str, toy: Any, why: str) -> None:
    mask = "info" if where == "info" else "auto"
    env = VectorGymEnv("X", 2, make=lambda: toy(where, strict=True), action_mask=mask)
    assert env.keep_episodes() == why


def test_a_copy_that_fails_cannot_be_played_again_and_says_so() -> None:
    class Raising(Drifting):
        def step(self, action: int) -> Any:
            raise RuntimeError("no\nstep")

    assert why_unrepeatable(Raising) == "a second copy of the environment raises an error: no"
    env = VectorGymEnv("X", 2, make=Raising)
    assert env.keep_episodes() == "a second copy of the environment raises an error: no"
    env.reset_native()
    assert env.episodes() is None


def test_a_proof_draws_from_no_generator_of_the_run() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()]
    assert why_unrepeatable(Dice)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_too_long_an_episode_is_not_held_and_the_next_one_is(monkeypatch) -> None:
    monkeypatch.setattr("klrl.control.env.episodes.LONGEST", 5)
    env = kept("X", make=Drifting)
    env.reset_native()
    for steps in range(8):
        assert (env.episodes() is None) == (steps > 5)
        env.step_native(np.zeros(2, np.int64))
    env.reset_native(np.array([True, False]))
    assert env.episodes() is None, "the other copy's is too long"
    env.reset_native(np.array([False, True]))
    env.step_native(np.zeros(2, np.int64))
    state = env.episodes()
    assert state is not None
    assert (state["begun"], len(state["actions"])) == ([0, 0], 1)
    env.play_again(state)
