"""``reference=custom`` and ``klrl kl --to module:name``, against torch's own KLs."""

from pathlib import Path

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import distributions as d
from torch import nn
from torchrl.modules import IndependentNormal, NormalParamExtractor, ProbabilisticActor, TanhNormal

import klrl
from klrl.base.errors import ConfigError
from klrl.config import OwnPart
from klrl.control.env.copies import VectorGymEnv
from klrl.control.policy.own import own_reference
from klrl.control.run.evaluate import measure_of
from klrl.train.policy_kl import kl_between
from klrl.train.verify import Record, verify_record
from tests.agents import agent_of, moved
from tests.conftest import QUICK
from tests.runs.commands import exits, rows_of, said, timeless


def scores(observation, seed: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(observation.shape[-1], width, generator=generator)
    return observation @ weight.to(observation)


def parameters(observation) -> tuple[torch.Tensor, torch.Tensor]:
    return scores(observation, 1, 6), scores(observation, 2, 6).tanh().exp()


def normal(observation):
    return d.Independent(d.Normal(*parameters(observation)), 1)


def transformed(observation):
    return d.TransformedDistribution(normal(observation), d.TanhTransform())


def squashed(observation, low: float = -1.0):
    return TanhNormal(*parameters(observation), low=low, high=1.0)


def categorical(observation):
    return d.Categorical(logits=scores(observation, 3, 3))


def one_hot(observation):
    return d.OneHotCategorical(logits=scores(observation, 3, 3))


def heads(observation):
    """Of 3, 2 and 4 actions, padded."""
    logits = scores(observation, 4, 12).unflatten(-1, (3, 4))
    unknown = torch.arange(4) >= torch.tensor([3, 2, 4])[:, None]
    return d.Independent(d.Categorical(logits=logits.masked_fill(unknown, -1e9)), 1)


def unpadded(observation):
    return d.Independent(d.Categorical(logits=scores(observation, 4, 12).unflatten(-1, (3, 4))), 1)


def bits(observation):
    return d.Independent(d.Bernoulli(logits=scores(observation, 5, 3)), 1)


def plain(dist):
    """As torch compares them: without a tanh, one-hot actions by number, in float64."""
    dist = getattr(dist, "base_dist", dist) if not isinstance(dist, d.Independent) else dist
    inner = dist.base_dist if isinstance(dist, d.Independent) else dist
    if hasattr(inner, "loc"):
        return d.Independent(d.Normal(inner.loc.double(), inner.scale.double()), 1)
    logits = inner.logits.double()
    if isinstance(inner, d.Bernoulli):  # of the numbers 0 and 1
        logits = torch.stack([torch.zeros_like(logits), logits], -1)
    inner = d.Categorical(logits=logits)
    return d.Independent(inner, 1) if isinstance(dist, d.Independent) else inner


@pytest.mark.parametrize(
    ("target", "action", "actor"),
    [
        *((normal, "box", "normal"), (transformed, "box", "tanh_normal")),
        *((squashed, "box", "tanh_normal"), (categorical, "from_five", "mlp")),
        *((one_hot, "from_five", "mlp"), (heads, "multi_discrete", "mlp")),
        (bits, "multi_binary", "mlp"),
    ],
)
def test_both_kls_are_torchs(target, action: str, actor: str) -> None:
    torch.manual_seed(0)
    env = VectorGymEnv(
        "tests.control.toys:klrl-test/Copying-v0", 1, kwargs={"action": action}, seed=0
    )
    agent = agent_of(env, actor, normalize=False)
    moved(agent.actor)
    own = own_reference("reference", OwnPart(f"{__name__}:{target.__name__}"), agent)
    states = torch.randn(20, agent.policy_net.inputs)
    measure = measure_of(agent.family, agent.policy_net, own[0].module, ["reverse", "forward"])
    with torch.no_grad():
        p = agent.family.distribution(
            **dict(zip(agent.family.param_keys, agent.policy_net(states), strict=True))
        )
    p, q = plain(p), plain(target(states))
    found = measure(states)
    for name, pair in (("reverse", (p, q)), ("forward", (q, p))):
        torch.testing.assert_close(found[name], d.kl_divergence(*pair), atol=1e-9, rtol=1e-6)
    assert found["reverse"].min() > 1e-3


def test_other_numbers_of_heads_and_weight_on_padding_are_refused() -> None:
    how = {"action": "multi_discrete"}
    agent = agent_of(VectorGymEnv("tests.control.toys:klrl-test/Copying-v0", 1, kwargs=how, seed=0))
    for target, line in ((categorical, r"shape \(6, 3\)"), (unpadded, "whose log-probs are not")):
        with pytest.raises(ConfigError, match=line):
            own_reference("reference", OwnPart(f"{__name__}:{target.__name__}"), agent)


def by_key(observation):
    """Also writes to its observation, which must leave the rollout alone."""
    assert observation["inner.number"].shape[1:] == (4,)
    return d.Categorical(logits=observation["bright"].mul_(2)[:, :3])


def flat(observation):
    assert observation.shape[-1] == 2, "the mask is klrl's to apply"
    return d.Categorical(logits=observation.new_zeros(len(observation), 6))


def test_it_gets_the_keys_of_an_observation_and_klrl_applies_the_mask() -> None:
    for name, function, how in (("Keyed", by_key, {"image": False}), ("Masked", flat, {})):
        env = VectorGymEnv(f"tests.control.toys:klrl-test/{name}-v0", 2, kwargs=how, seed=0)
        agent = agent_of(env)
        own = own_reference("reference", OwnPart(f"{__name__}:{function.__name__}"), agent)
        seen = env.rollout(3, auto_cast_to_device=False)["observation"]
        before = seen.clone()
        (logits,) = own[0].module(seen)
        assert torch.equal(seen, before)
        assert logits.shape[:-1] == seen.shape[:-1]
        if name == "Masked":
            assert torch.equal(logits == -1e9, seen[..., -6:] == 0)
            assert (logits.softmax(-1).max(-1).values == 1 / 3).all()


MINE = """
import torch
from torch.distributions import Independent, Normal

seen = []

def upright(observation, gain: float = 1.0):
    seen.append(observation)
    cos, sin, speed = observation.unbind(-1)
    torque = -gain * (torch.atan2(sin, cos) + speed / 2).unsqueeze(-1)
    return Independent(Normal(torque, 0.5 + torque.abs() / 4), 1)
"""


def far(observation):
    loc = observation[..., 2:]
    loc = torch.where(loc.abs() > 3, torch.nan, loc)
    return d.Independent(d.Normal(loc, torch.ones_like(loc)), 1)


def test_a_mean_that_is_nan_in_some_states_is_named_by_reference_and_key(capsys) -> None:
    target = f"{__name__}:far"
    assert exits(*QUICK, "hydra.run.dir=run") == 0
    for words, name in (
        ((*QUICK, "reference=custom", f"reference.target={target}"), f"reference.target={target}"),
        (("kl", "run", "--to", target, "--episodes", "1"), f"other={target}"),
    ):
        code, _, error = said(capsys, *words)
        assert code == 1
        assert f"failed: {name}: gave loc=[nan] for observation=[" in error.splitlines()[-1]


@pytest.mark.integration
def test_klrl_kl_is_the_hand_computation_and_the_record_is_true() -> None:
    Path("anchored.py").write_text(MINE, encoding="utf-8")
    words = ("reference=custom", "reference.target=anchored:upright", "eval.final=3")
    assert exits(*QUICK, *words, "eval.every=1", "hydra.run.dir=run") == 0
    import anchored

    policy = klrl.load_policy("run")
    for to, name in (("anchored:upright", "KL(run||other) on run"), (None, None)):
        anchored.seen.clear()
        found = kl_between("run", to, episodes=1)
        one = found.distances[name or "KL(policy||reference) on policy"]
        states = anchored.seen[-1]  # the trial's come before
        assert len(states) == found.states == 200
        with torch.no_grad():
            loc, scale = (each.double() for each in policy[0].module(states))
            ref = anchored.upright(states).base_dist
        p, q = d.Normal(loc, scale), d.Normal(ref.loc.double(), ref.scale.double())
        by_hand = d.kl_divergence(p, q).sum(-1)
        assert one.mean == pytest.approx(float(by_hand.mean()), abs=1e-9)
        assert one.worst == pytest.approx(float(by_hand.max()), abs=1e-9)
    row = rows_of(Path("run"))[-1]
    assert row["eval/kl_ref"] > 0.1
    verify_record(Path("run"), klrl.load_run("run").config, "cpu", record := Record())
    assert not record.problems
    assert "eval/kl_ref" in " ".join(record.looked)


def teacher(path: str):
    """A TorchRL actor with weights from a file."""
    network = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    network.load_state_dict(torch.load(path))
    module = TensorDictModule(network, ["observation"], ["loc", "scale"])
    return ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=IndependentNormal
    )


@pytest.mark.integration
def test_the_weights_of_an_actor_of_torchrl_are_in_the_checkpoint() -> None:
    def write(seed: int) -> None:
        torch.manual_seed(seed)
        torch.save(nn.Sequential(nn.Linear(3, 2)).state_dict(), "teacher.pt")

    write(0)
    words = (*QUICK, "reference=custom", f"reference.target={__name__}:teacher")
    words = (*words, "reference.args.path=teacher.pt")
    words = (*words, "optim.lr=0.01", "optim.lr_floor=0.01")
    for folder, frames in (("run", 128), ("whole", 192)):
        assert exits(*words, f"frames={frames}", f"hydra.run.dir={folder}") == 0
    before = kl_between("run", episodes=2).row
    write(1)
    assert kl_between("run", episodes=2).row == before
    assert exits("resume=run", "frames=192") == 0
    resumed, whole = (timeless(rows_of(Path(each))) for each in ("run", "whole"))
    assert resumed == whole
