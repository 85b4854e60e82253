"""Simulators of other libraries against klrl's copies, in rollouts, evaluations and resumes."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import klrl
from klrl.base.errors import ConfigError
from klrl.config import AdvantageConfig
from klrl.control.env.contract import Misfit
from klrl.control.env.copies import VectorGymEnv, make_copies, transformed
from klrl.control.env.gym_vector import GymVector
from klrl.control.env.observation import layout_of
from klrl.control.run.advantage import gae
from klrl.control.run.rollout import VectorRollout, make_rollout
from klrl.report.diff import compare_bits
from klrl.train.callbacks import Callback
from tests.agents import agent_of, moved
from tests.control import simulators
from tests.control.test_resumption import PART, WHOLE, WORDS, interrupted, stir
from tests.runs.commands import exits, manifest_of, rows_of, timeless

HERE = "tests.control.simulators"
IDS = {
    "ends": "klrl-test/Ends-v0",
    "cartpole": "CartPole-v1",
    "catch": "klrl.control.env.catch:klrl/Catch-v0",
    "hopper": "Hopper-v5",
    "masked": "tests.control.toys:klrl-test/Masked-v0",
    "counts": "klrl-test/Counts-v0",
}


def vector(env: Any) -> GymVector:
    made = GymVector("env.target=own", env)
    made.prepare(layout_of("env.target=own", made.observation_space, made.action_space))
    return made


@pytest.mark.parametrize("mode", ["SAME_STEP", "DISABLED", "pool"])
@pytest.mark.parametrize("name", IDS)
def test_given_the_same_resets_it_gives_what_klrls_copies_give(name: str, mode: str) -> None:
    """All results of 120 steps of three copies, over their ends, to the bit."""
    seed, pooled = 7, mode == "pool"
    own = VectorGymEnv(IDS[name], 3, batch=False).simulators  # each has its own generator
    if pooled and name == "masked":
        pytest.skip("this pool has arrays alone")
    env = vector(simulators.pool(3, IDS[name]) if pooled else simulators.sync(3, mode, IDS[name]))
    assert own.observation_space.shape == env.observation_space.shape
    seen, shown = env.reset(None, [seed] * 3), own.reset(None, [seed, seed + 1, seed + 2])
    rng, ends = np.random.default_rng(0), 0
    for _ in range(120):
        np.testing.assert_array_equal(seen, shown)
        action = env.draw(seen, rng)
        results = env.step(action), own.step(action)
        for mine, theirs in zip(*results, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        seen, shown = results[0][0], results[1][0]
        ended = results[1][2] | results[1][3]
        ends += int(ended.sum())
        if ended.any():
            seen, shown = env.reset(ended), own.reset(ended, [None] * 3)
    assert ends > 3


@pytest.mark.parametrize("final", [True, False], ids=["final", "dropped"])
def test_a_truncation_bootstraps_from_the_last_observation_that_is_known(
    final, settings, capsys
) -> None:
    """Both kinds of ends in one rollout; advantages by the definition, in float64."""
    target = "sync" if final else "dropping"
    config = settings("env=custom", f"env.target={HERE}:{target}", "env.num_envs=4").env
    env = transformed(make_copies(config, seed=3))
    agent = agent_of(env, "categorical", normalize=False)
    moved(agent.modules)
    rollout = VectorRollout(env, agent, 12, torch.device("cpu"))
    batch, how = rollout.collect(), AdvantageConfig(gamma=0.9, lmbda=0.8, name="gae")
    gae(how, agent.critic, 1.0)(batch)
    after = batch["next"]
    assert after["terminated"].any()
    assert after["truncated"].any()
    with torch.no_grad():
        value, shown, then = (
            agent.critic.module(x).double()[..., 0]
            for x in (batch["observation"], batch["observation"], after["observation"])
        )
    for n in range(4):
        total = 0.0
        for t in reversed(range(12)):
            ended, terminal = bool(after["done"][n, t]), bool(after["terminated"][n, t])
            later = then[n, t] if final or not ended else shown[n, t]
            delta = float(after["reward"][n, t]) + 0.9 * (not terminal) * later - value[n, t]
            total = delta + 0.9 * 0.8 * (not ended) * total
            assert float(batch["advantage"][n, t]) == pytest.approx(float(total), abs=1e-5)
    ended = after["done"][..., 0]
    steps = after["observation"][..., 0][ended]
    assert set(steps.tolist()) == ({3.0, 5.0} if final else {2.0, 4.0})
    said = "its library gives no last observation" in capsys.readouterr().err
    assert said == (not final)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["dropping", "NaNEnds"])
def test_simulators_without_last_observations_train(name: str, capsys) -> None:
    keys = "env.observation_keys=[observation]" if name == "NaNEnds" else "actor=mlp"
    words = (*WORDS, "env=custom", f"env.target={HERE}:{name}", keys, "actor=mlp")
    klrl.run(*words, folder=PART)
    assert all(np.isfinite(list(row.values())).all() for row in rows_of(PART))
    assert capsys.readouterr().err.count("its library gives no last observation") == 1


@pytest.mark.integration
def test_a_step_may_return_its_own_buffer() -> None:
    """klrl keeps no array of a library's beyond the next call."""
    rows = []
    for copy in ("true", "false"):
        words = ("env=custom", f"env.target={HERE}:sync", f"env.args.copy={copy}", "actor=mlp")
        klrl.run(*WORDS, *words, folder=f"copy_{copy}")
        rows.append(
            [row["loss/critic"] for row in rows_of(Path(f"copy_{copy}")) if row["iteration"]]
        )
    assert rows[0] == rows[1] != []


@pytest.mark.integration
def test_simulators_that_exist_once_are_evaluated_in_place(capsys) -> None:
    """The next rollout begins new episodes, with draws of their own; the run repeats."""
    simulators.once.cache_clear()
    words = ("env=custom", f"env.target={HERE}:once", "env.num_envs=4", "actor=mlp")
    assert exits(*WORDS, *words, "hydra.run.dir=first") == 0
    assert "env.target returns the same simulators at each call" in capsys.readouterr().out
    assert exits(*WORDS, *words, "hydra.run.dir=second") == 0
    first, second = (
        [
            {k: v for k, v in row.items() if not k.startswith(("time", "run"))}
            for row in rows_of(Path(x))
        ]
        for x in ("first", "second")
    )
    assert first == second


@pytest.mark.integration
def test_a_batch_of_torchrls_continues_to_the_bit(capsys) -> None:
    words = ["env=pendulum_batch", "env.num_envs=4", "collector.steps=16"]
    stir()
    klrl.run(*WORDS, *words, folder=WHOLE)
    stir()
    interrupted(words)
    equal, told = compare_bits(WHOLE, PART)
    assert equal, told
    assert "new episodes" not in capsys.readouterr().out
    assert (manifest_of(PART)["repeatable"], manifest_of(PART)["resume"]) == ("yes", "exact")


class Kills(Callback):
    """Kills the process at the end of the fourth rollout, before its row and checkpoint."""

    def iterated(self, training: Any, row: Any, batch: Any) -> None:
        if training.counters.iteration == 4:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "resume"),
    [
        (["env=pendulum_batch", "env.num_envs=4", "collector.steps=16"], "exact"),
        (["env=custom", f"env.target={HERE}:sync", "actor=mlp"], "anew"),
    ],
)
def test_a_run_that_was_killed_goes_on(words, resume: str, capsys) -> None:
    """A TorchRL batch to the bit, a VectorEnv with new episodes, from the last checkpoint."""
    klrl.run(*WORDS, *words, folder=WHOLE)
    if not (pid := os.fork()):
        try:
            klrl.run(*WORDS, *words, folder=PART, callbacks=[Kills()])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert [row["iteration"] for row in rows_of(PART)][-1] == 3
    stir()
    capsys.readouterr()
    assert exits(f"resume={PART}") == 0
    assert manifest_of(PART)["resume"] == resume
    assert ("this run begins new episodes" in capsys.readouterr().out) == (resume == "anew")
    equal, told = compare_bits(WHOLE, PART)
    assert equal == (resume == "exact"), told
    before, after = timeless(rows_of(WHOLE)), timeless(rows_of(PART))
    assert [row["frames"] for row in after] == [row["frames"] for row in before]
    third = [row["iteration"] for row in before].index(4)
    assert before[:third] == after[:third]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("sync", "the state of a SyncVectorEnv cannot be saved"),
        ("cartpole", "a second object, restored from its state, continues differently"),
    ],
)
def test_others_begin_new_episodes_and_say_so(target: str, why: str, capsys) -> None:
    interrupted(["env=custom", f"env.target={HERE}:{target}", "actor=mlp"])
    told = capsys.readouterr().out
    begun, _, resumed = told.partition("resumed at 192 frames")
    assert f"resume: a later resume will begin new episodes: {why}" in begun
    assert f"resume: this run begins new episodes: {why}" in resumed
    assert (manifest_of(PART)["repeatable"], manifest_of(PART)["resume"]) == ("no", "anew")


def test_nan_in_one_copy_is_named(settings) -> None:
    words = (f"env.target={HERE}:Diverging", "env.num_envs=3")
    config = settings("env=custom", *words, "env.observation_keys=[observation]").env
    env = transformed(make_copies(config, seed=3))
    rollout = VectorRollout(env, agent_of(env), 12, torch.device("cpu"))
    said = r"observation of env.target=.*:Diverging \(copy 1\) is not finite after a step"
    with pytest.raises(FloatingPointError, match=said):
        rollout.collect()


@pytest.mark.integration
def test_a_batch_that_is_smaller_than_asked_records_and_evaluates_in_waves(capsys) -> None:
    """11 episodes of 4 simulators; a film needs one simulator."""
    words = ("env=custom", f"env.target={HERE}:four", "env.num_envs=4", "actor=mlp")
    klrl.run(*WORDS, *words, folder=PART)
    capsys.readouterr()
    for command in ("record", "evaluate"):
        assert exits(command, str(PART), "--episodes", "11") == 0
        assert "over 11 episodes" in capsys.readouterr().out
    assert exits("evaluate", str(PART), "--video") == 2
    assert "it is a batch, and a film shows one" in capsys.readouterr().err


def test_simulators_that_do_other_than_their_mode_says_are_refused() -> None:
    make = [partial(gymnasium.make, "CartPole-v1")] * 3
    env = vector(simulators.Deaf(make, autoreset_mode=AutoresetMode.DISABLED))
    env.reset(None)
    env.step(np.zeros(3, int))
    with pytest.raises(Misfit, match="reset_mask.* changed copies outside the mask"):
        env.reset(np.array([True, False, False]))
    env = vector(simulators.Numbered(make, autoreset_mode=AutoresetMode.SAME_STEP))
    with pytest.raises(Misfit, match="terminated has int64; bool is expected"):
        env.trial()
    own = simulators.sync(3)
    own.metadata = {"autoreset_mode": "SameStep"}
    with pytest.raises(ConfigError, match="autoreset_mode='SameStep'; give a member of"):
        GymVector("env.target=own", own)


def test_a_last_observation_that_was_dropped_once_counts_as_unknown() -> None:
    make = [partial(gymnasium.make, "klrl-test/Ends-v0")] * 3
    env, told = vector(simulators.Forgetting(make, autoreset_mode=AutoresetMode.SAME_STEP)), []
    env.reset(None, [7, 0, 0])
    for _ in range(40):
        _, _, terminated, truncated = env.step(np.zeros(3, int))
        told.append((bool(terminated.any()), bool(truncated.any()), env.final))
    first = next(i for i, (_, truncated, _) in enumerate(told) if truncated)
    assert [final for *_, final in told] == [True] * first + [False] * (40 - first)
    assert any(terminal and not truncated for terminal, truncated, _ in told[first:])


@pytest.mark.parametrize("collector", ["vector", "torchrl"])
@pytest.mark.parametrize("target", ["once", "again", "walk"])
def test_a_collector_begins_anew_after_another_use_of_its_simulators(
    target: str, collector: str, settings
) -> None:
    """The first steps show 0, then 1, also of an object in a new wrapper, or of one without N."""
    simulators.once.cache_clear()
    simulators.walk.cache_clear()
    words = (f"env.target={HERE}:{target}", "env.num_envs=4", f"collector={collector}")
    config = settings("env=custom", *words, "collector.steps=4")
    env = make_copies(config.env, seed=3)
    how = (agent_of(transformed(env)), (), torch.device("cpu"))
    rollout = make_rollout(config, env, *how)
    rollout.collect()
    other = make_copies(config.env, seed=0)
    assert other.notes[-1].startswith("environment: env.target returns the same simulators")
    other.reset_native()
    batch = rollout.collect()
    assert not batch["observation"][:, 0, 0].any()
    assert (batch["next", "observation"][:, 0, 0] == 1).all()
    assert (batch["next", "step_count"][:, 0] == 1).all()
    rollout.close()


def test_a_rollout_begins_anew_after_another_use_of_its_simulators(settings) -> None:
    simulators.once.cache_clear()
    config = settings("env=custom", f"env.target={HERE}:once", "env.num_envs=4").env
    env = transformed(make_copies(config, seed=3))
    rollout = VectorRollout(env, agent_of(env), 4, torch.device("cpu"))
    first = rollout.collect()
    assert rollout.collect()["observation"][:, 0, 0].any(), "episodes go on"
    other = make_copies(config, seed=0)
    assert other.notes[-1].startswith("environment: env.target returns the same simulators")
    other.reset_native()
    batch = rollout.collect()
    assert not batch["observation"][:, 0, 0].any()
    assert (batch["observation"][:, 0, 1] != first["observation"][:, 0, 1]).all(), "other draws"
    assert (batch["next", "step_count"][:, 0] == 1).all()


@pytest.mark.parametrize("steps", [1, 2])
def test_observations_may_be_any_view(settings, steps: int) -> None:
    config = settings("env=custom", f"env.target={HERE}:Views", "env.num_envs=2").env
    env = transformed(make_copies(config, seed=3))
    rollout = VectorRollout(env, agent_of(env, "categorical"), steps, torch.device("cpu"))
    for _ in range(6):
        before, after = rollout.collect(), rollout.collect()
        goes_on = ~before["next", "done"][:, -1, 0]
        shown, last = after["observation"][:, 0], before["next", "observation"][:, -1]
        assert torch.equal(shown[goes_on], last[goes_on])
    rollout.close()
