"""Episodes of an evaluation: from which states, how far, with which actions."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict
from torch.distributions import kl_divergence
from torchrl.envs import ExplorationType, set_exploration_type

from klrl.control.run.evaluate import evaluate_policy
from klrl.train.loop import Training
from klrl.train.scores import CLOSING, IN_RUN, Evaluation, EvaluationPlan, Size, Starts
from tests.agents import moved

CPU, FOUR = torch.device("cpu"), Size(4)


def play(run: Training, starts: Starts = IN_RUN, size: Size = FOUR, **how) -> Evaluation:
    plan = EvaluationPlan(starts, size, how.pop("sampled", False), CPU)
    return evaluate_policy(run.parts.agent, run.config.env, plan, **how)


def by_hand(run: Training, seed: int, states: list[np.ndarray] | None = None, **kwargs) -> float:
    """Gymnasium's return of the policy's mode, one step after the other; the states, if asked."""
    env = gymnasium.make(run.config.env.id, **kwargs)
    seen, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        if states is not None:
            states.append(seen)
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            policy_input = TensorDict({"observation": torch.tensor(seen)[None].float()}, [1])
            action = run.parts.actor(policy_input)["action"][0].numpy()
        if isinstance(env.action_space, Box):
            action = action.clip(env.action_space.low, env.action_space.high)
        seen, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    env.close()
    return total


@pytest.mark.parametrize(
    "words", [["env=pendulum"], ["env=cartpole"], ["actor=tanh_normal"], ["env=hopper"]]
)
def test_each_episode_is_gymnasiums_from_the_seed_of_its_number(words, settings) -> None:
    run = Training(settings(*words, "device=cpu"))
    result = play(run, CLOSING, Size(3))
    expected = [by_hand(run, seed) for seed in CLOSING.seeds(3)]
    assert result.returns == pytest.approx(expected, rel=1e-3)
    assert len(set(result.returns)) == 3


@pytest.mark.parametrize("words", [["env=pendulum"], ["env=cartpole"]])
def test_both_kls_to_the_reference_are_those_of_the_states_that_were_seen(words, settings) -> None:
    """Torch's own KLs in the states of Gymnasium's episodes, to a policy that was another once."""
    run = Training(settings(*words, "device=cpu"))
    moved(run.parts.agent.actor)
    reference = run.parts.reference.module
    seen: list[np.ndarray] = []
    for seed in CLOSING.seeds(3):
        by_hand(run, seed, seen)
    inputs = TensorDict({"observation": torch.tensor(np.stack(seen)).float()}, [len(seen)])
    with torch.no_grad():
        pi, ref = (policy.get_dist(inputs.clone()) for policy in (run.parts.actor, reference))
        pi, ref = (getattr(each, "base_dist", each) for each in (pi, ref))
        kls = [kl_divergence(*pair) for pair in ((pi, ref), (ref, pi))]
    means = [float(kl.reshape(len(seen), -1).sum(-1).mean()) for kl in kls]
    row = run.parts.evaluation(CLOSING, Size(3)).row
    assert [row["eval/kl_ref"], row["eval/kl_ref_forward"]] == pytest.approx(means, rel=2e-3)
    assert means[0] != pytest.approx(means[1], rel=4e-3)
    assert row["eval/kl_ref_se"] > 0


def test_start_states_are_the_same_whatever_the_runs_seed(settings) -> None:
    """A policy that always pushes as hard: runs differ in nothing but their seed."""
    returns = []
    for seed in (0, 1):
        run = Training(settings(f"seed={seed}"))
        head = run.parts.agent.policy_net.head
        with torch.no_grad():
            head.weight.zero_()
            head.bias.fill_(1.0)
        returns.append(play(run).returns)
    assert returns[0] == returns[1]
    assert play(run, CLOSING).returns != returns[0]
    assert play(run, Starts("evaluate", 3)).returns != play(run, Starts("evaluate", 4)).returns


class Counting(gymnasium.Env):
    """Ends by itself after ``length`` steps, or never; a step's reward is its action.

    Attributes:
        lengths: how long episodes are, in the order of their resets; then the last for ever.
        steps: of each copy in its last episode.
    """

    observation_space = Box(-1, 1, (1,), np.float32)
    action_space = Box(-9, 9, (1,), np.float32)
    lengths: tuple[int | None, ...] = (None,)
    resets = 0
    after_the_end = 0

    def reset(self, seed=None, options=None):
        """Ignore the seed."""
        kind = type(self)
        self._left = kind.lengths[min(kind.resets, len(kind.lengths) - 1)]
        kind.resets += 1
        self._over = False
        return np.zeros(1, np.float32), {}

    def step(self, action):
        type(self).after_the_end += self._over
        self._left = None if self._left is None else self._left - 1
        self._over = self._left == 0
        return np.zeros(1, np.float32), float(action[0]), self._over, False, {}


@pytest.fixture
def counting(settings):
    """A run on :class:`Counting`, with a new count."""

    def make(lengths: tuple[int | None, ...], limit: int | None = None) -> Training:
        gymnasium.registry.pop("Counting-v0", None)
        gymnasium.register("Counting-v0", Counting, max_episode_steps=limit)
        words = "env=gym", "env.id=Counting-v0", "collector.steps=32", "device=cpu"
        run = Training(settings(*words))
        with torch.no_grad():
            run.parts.agent.policy_net.head.weight.zero_()
            run.parts.agent.policy_net.head.bias.fill_(2.0)
        Counting.lengths, Counting.resets, Counting.after_the_end = lengths, 0, 0
        return run

    yield make
    gymnasium.registry.pop("Counting-v0", None)


def test_a_copy_whose_episode_ended_is_not_stepped_on(counting) -> None:
    result = play(counting((3, 1, 5, 2)), size=Size(4))
    assert result.returns == [6.0, 2.0, 10.0, 4.0]
    assert Counting.after_the_end == 0
    assert Counting.resets == 4


def test_episodes_that_never_end_are_cut_off_and_not_counted(counting, monkeypatch) -> None:
    monkeypatch.setattr("klrl.control.run.evaluate.MAX_STEPS", 50)
    result = play(counting((3, None, 50, 51)), size=Size(4))
    assert (result.returns, result.cut) == ([6.0, 100.0], 2)
    assert play(counting((None,)), size=Size(4)).row == {"eval/episodes": 0, "eval/cut": 4}


@pytest.mark.parametrize(
    ("steps", "lengths", "played"),
    [
        (None, [20], 8),
        (100, [20], 5),  # one wave, and nothing is left
        (100, [2], 8),  # five; 90 steps are left, enough for the other three
        (119, [20, 20, 20, 20, 1, 20], 6),  # five took 81: 38 are left, enough for one more
        (60, [2, 2, 2, 20], 5),  # three took 6: 54 are left, enough for two more
        (19, [2], 0),  # not even one surely fits
    ],
)
def test_a_wave_is_begun_while_it_surely_fits(counting, steps, lengths, played) -> None:
    """Eight episodes are wanted, each of at most 20 steps."""
    result = play(counting(tuple(lengths), limit=20), size=Size(8, steps))
    taken = [each / 2.0 for each in result.returns]
    assert taken == (lengths + lengths[-1:] * 8)[:played]
    assert steps is None or sum(taken) <= steps


def test_an_environment_without_a_limit_gets_the_steps_that_there_are(counting) -> None:
    """3,000 steps are reckoned as three episodes of 1,000, and each may take as many."""
    result = play(counting((1_000, 1_001, 10)), size=Size(3, 3_000))
    assert (result.returns, result.cut) == ([2_000.0, 20.0], 1)


def test_more_episodes_than_copies_are_the_same_episodes(settings, monkeypatch) -> None:
    run = Training(settings("+env.kwargs.max_episode_steps=10"))
    together = play(run, size=Size(7)).returns
    monkeypatch.setattr("klrl.control.run.evaluate.MAX_COPIES", 3)
    assert play(run, size=Size(7)).returns == pytest.approx(together, rel=1e-6)


def scale_of(run: Training) -> float:
    """Sigma of the action."""
    with torch.no_grad():
        return float(run.parts.agent.policy_net(torch.zeros(1, 1))[1])


@pytest.mark.parametrize("device", ["numpy", "torch"])
def test_sampled_actions_are_draws_of_the_policy(counting, monkeypatch, device) -> None:
    """An episode of one step returns its action: N(2, sigma), by 4,000 draws."""
    run = counting((1,), limit=5)
    if device == "torch":
        monkeypatch.setattr("klrl.control.policy.acting.runs_in_numpy", lambda net: False)
    scale = scale_of(run)
    before = torch.get_rng_state()
    result = play(run, size=Size(4_000), sampled=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert result.mean == pytest.approx(2.0, abs=4 * scale / np.sqrt(4_000))
    assert result.std == pytest.approx(scale, rel=4 / np.sqrt(8_000))
    assert result.how == "sampled"
    torch.rand(1)
    few = [play(run, starts, Size(50), sampled=True) for starts in (IN_RUN, IN_RUN, CLOSING)]
    assert few[0].returns == few[1].returns != few[2].returns


def test_noise_goes_on_from_block_to_block(counting, monkeypatch) -> None:
    """The sum of 600 draws: with the noise of 250 steps again and again it would spread more."""
    run = counting((600,), limit=600)
    returns = play(run, size=Size(400), sampled=True).returns
    scale = scale_of(run)
    assert np.std(returns, ddof=1) == pytest.approx(scale * np.sqrt(600), rel=0.15)
