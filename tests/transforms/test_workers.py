"""KL transforms inside the workers of batched environments: the numbers of one process.

Whatever fails, the workers are closed: Python waits for them at its end, so a failure would show
as a suite that hangs.
"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial

import pytest
import torch
from torch import nn
from torchrl.envs import (
    EnvBase,
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
    check_env_specs,
    step_mdp,
)

from klrl.kl import SendToWorkers
from klrl.kl.policies import score
from tests.agents import agent_of, apart, gym, make_env
from tests.transforms.heads import TwoHeads, two_headed_actor
from tests.transforms.test_control_family import case
from tests.transforms.toys import COEF, charge

#: Forked workers start in a moment; spawned ones import torch first.
Workers = partial(ParallelEnv, 2, mp_start_method="fork")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:no .*log_prob.* for some actions:UserWarning"),
]
#: A policy of two heads -> the key above its actions; ``one key``: its only action key.
HEADS = {"two heads": "agent", "one key": "action"}
GYM = {"pendulum": "Pendulum-v1", "tanh": "Pendulum-v1", "cartpole": "CartPole-v1"}


def policies(where: str) -> tuple[nn.Module, nn.Module]:
    """(a policy, its reference), the same each time."""
    torch.manual_seed(0)
    if where in HEADS:
        return apart(two_headed_actor(HEADS[where], one_key=where == "one key"))
    family = "tanh_normal" if where == "tanh" else "mlp"
    return apart(agent_of(make_env(gym(GYM[where], 1), seed=0), family).actor)


def worker(where: str, name: str, send: bool, shared: nn.Module | None = None) -> EnvBase:
    """An environment whose own transforms charge the KL."""
    actor, reference = policies(where)
    reward = ("agent", "reward") if where in HEADS else "reward"
    transform = charge(name, actor if shared is None else shared, reference, reward)
    inside = (SendToWorkers(actor), transform) if send else (transform,)
    if where in HEADS:
        env = TransformedEnv(TwoHeads(below=HEADS[where]))
        for part in inside:
            env.append_transform(part)
        return env
    return make_env(gym(GYM[where], 1), seed=3, transforms=inside)


def collect(env: EnvBase, actor: nn.Module, steps: int = 6):
    with closing(env), torch.no_grad():
        return env.rollout(steps, actor, break_when_any_done=False)


def check_log_probs(batch, actor: nn.Module, keys: Sequence[object] = ()) -> None:
    """The log-probs are those of the actions beside them, when the actor scores them again."""
    keys = keys or [key for key in actor.log_prob_keys if key is not None]
    found = sum(batch[key].reshape(batch.shape) for key in keys)
    with torch.no_grad():
        again = score(actor, batch)
    torch.testing.assert_close(found, again, atol=1e-5, rtol=1e-5, msg="another action's log-prob")


NEEDS = [("legacy", True), ("constrained", True), ("constrained, exact", True), ("parts", False)]


@pytest.mark.parametrize(
    ("where", "name", "send"),
    [("pendulum", *need) for need in NEEDS]
    + [pytest.param("cartpole", *need, marks=pytest.mark.slow) for need in NEEDS]
    + [("tanh", "legacy", True), ("tanh", "parts", True)],
)
def test_workers_charge_what_one_process_charges_for_the_same_actions(where, name, send) -> None:
    actor, _ = policies(where)
    batch = collect(Workers(partial(worker, where, name, send)), actor)
    check_log_probs(batch, actor)
    assert batch["next", "kl"].abs().min() > 1e-6
    for index in range(2):
        single = worker(where, name, send)
        state = single.reset()
        for step in range(batch.shape[-1]):
            theirs = batch[index, :, step]
            state.update(theirs.select(*actor.out_keys))
            mine = single.step(state)
            for key in ("observation", "kl", "reward"):
                found = theirs["next", key]
                torch.testing.assert_close(found, mine["next", key], atol=1e-6, rtol=1e-6)
            state = step_mdp(mine)


@pytest.mark.parametrize("name", ["legacy", "constrained, exact"])
@pytest.mark.parametrize("where", HEADS)
def test_nested_keys_and_heads_reach_the_workers(name: str, where: str) -> None:
    actor, reference = policies(where)
    batch = collect(Workers(partial(worker, where, name, True)), actor)
    keys = [(HEADS[where], head) for head in ("move", "press")]
    check_log_probs(batch, actor, [(*key[:-1], f"{key[-1]}_log_prob") for key in keys])
    heads = [model.get_dist(batch.copy()).dists for model in (actor, reference)]
    pairs = [(heads[0][key], heads[1][key], batch[key]) for key in keys]
    if name == "legacy":
        kl = sum(p.log_prob(action) - q.log_prob(action) for p, q, action in pairs)
    else:
        kl = sum(torch.distributions.kl_divergence(p, q) for p, q, _ in pairs)
    torch.testing.assert_close(batch["next", "kl"].squeeze(-1), kl, atol=1e-5, rtol=1e-4)
    raw = -(batch[keys[0]] ** 2).sum(-1, keepdim=True)
    charged = raw - COEF * batch["next", "kl"]
    torch.testing.assert_close(batch["next", "agent", "reward"], charged, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", ["pendulum", "cartpole", *HEADS])
def test_what_is_sent_is_in_the_specs(where: str) -> None:
    check_env_specs(worker(where, "constrained, exact", True))
    with closing(Workers(partial(worker, where, "constrained, exact", True))) as several:
        check_env_specs(several)


@pytest.mark.parametrize("name", ["legacy", "constrained, exact"])
def test_no_action_is_charged_with_the_log_prob_of_another(name: str) -> None:
    actor, _ = policies("pendulum")
    with closing(Workers(partial(worker, "pendulum", name, True))) as several:
        for env in (several, worker("pendulum", name, True)):
            first = env.rand_step(env.reset())["next"]
            assert first["kl"].isnan().all()
            told = [actor, env.rand_action, actor]
            state, found = env.reset(), []
            for act in told:
                with torch.no_grad():
                    done = env.step(act(state))
                found.append(done["next", "kl"].isnan())
                state = step_mdp(done)
            assert [bool(kl.all()) for kl in found] == [False, True, False]
            assert not found[0].any()
            assert not found[2].any()


@pytest.mark.parametrize("kind", [SerialEnv, partial(ParallelEnv, mp_start_method="fork")])
def test_without_shared_buffers_the_whole_transition_is_sent(kind) -> None:
    actor, reference = policies("pendulum")
    env = kind(2, partial(worker, "pendulum", "legacy", False), use_buffers=False)
    batch = collect(env, actor)
    kl = batch["action_log_prob"] - reference.log_prob(batch.copy())
    torch.testing.assert_close(batch["next", "kl"].squeeze(-1), kl, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["legacy", "constrained", "constrained, exact"])
def test_the_remedy_is_named_where_the_log_prob_was_left_behind(name: str, capfd) -> None:
    actor, _ = policies("pendulum")
    env = Workers(partial(worker, "pendulum", name, False))
    with pytest.raises(RuntimeError, match="worker \\d"):
        collect(env, actor)
    told = [line for line in capfd.readouterr().err.splitlines() if "no action_log_prob" in line]
    assert all("in a worker of ParallelEnv" in line for line in told)
    assert "klrl.kl.SendToWorkers(actor)" in told[0]


def test_a_shared_policy_is_followed_by_retrieval_in_the_workers() -> None:
    actor, reference = policies("pendulum")
    actor.share_memory()
    kls = []
    with closing(Workers(partial(worker, "pendulum", "parts", False, actor))) as env:
        for _ in range(2):
            with torch.no_grad():
                batch = env.rollout(4, actor)
                kl = actor.log_prob(batch.copy()) - reference.log_prob(batch.copy())
                for parameter in actor.parameters():
                    parameter.add_(0.2)
            torch.testing.assert_close(batch["next", "kl"].squeeze(-1), kl, atol=1e-5, rtol=1e-5)
            kls.append(float(kl.abs().mean()))
    assert kls[1] > 1.5 * kls[0]


def test_only_what_is_asked_for_is_sent_and_mistakes_are_named() -> None:
    env, actor, _, _ = case("pendulum")
    sent = TransformedEnv(env, SendToWorkers(actor, ["action_log_prob"]))
    assert set(sent.full_state_spec.keys(True, True)) == {"action_log_prob"}
    assert sent.reset()["action_log_prob"].isnan().all()
    assert not list(SendToWorkers(actor).parameters())
    for keys, words in (
        (["value"], "does not write it"),
        (["observation"], "already has this key"),
    ):
        with pytest.raises(KeyError, match=words):
            _ = TransformedEnv(case("pendulum")[0], SendToWorkers(actor, keys)).full_state_spec
