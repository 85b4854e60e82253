"""Observations of several parts: packed without loss, read by key, masked; images as images."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torchrl.envs import check_env_specs

from klrl.api import compose
from klrl.base.errors import ConfigError, EnvError
from klrl.config import ActorConfig, CNNActorConfig
from klrl.control.env.catch import Catch
from klrl.control.env.copies import VectorGymEnv, make_copies
from klrl.control.env.observation import layout_of
from klrl.control.policy.actor import make_agent
from klrl.control.policy.encoders import images_of
from klrl.control.policy.networks import Agent
from klrl.control.run.job_checks import check_env
from klrl.control.run.rollout import VectorRollout
from klrl.control.run.step import Columns
from klrl.kl import KLConstrainedTransform, KLRewardTransform
from tests.agents import agent_of, apart, gym, make_env
from tests.control.toys import unpacked

CPU, T = torch.device("cpu"), "tests.control.toys:klrl-test"
TWO = spaces.Discrete(2)
MANY = spaces.Discrete(2**24 + 1)
#: One of each kind, in an order that transport does not keep.
PARTS = {
    "action_mask": spaces.MultiBinary(2),
    "grid": spaces.MultiDiscrete([3, 300], start=[1, -5]),
    "image": spaces.Box(0, 255, (5, 4, 3), np.uint8),
    "inner": spaces.Dict(bits=spaces.MultiBinary(3), n=spaces.Discrete(4, start=-2)),
    "matrix": spaces.Box(-9, 9, (2, 3), np.float64),
}


def made(env_id: str, num_envs: int = 2, **how: object) -> VectorGymEnv:
    return VectorGymEnv(f"{T}/{env_id}-v0", num_envs, seed=1, **how)


def agent_for(env) -> Agent:
    if not env.layout.images:
        return agent_of(env, "categorical")
    config = CNNActorConfig([8], "relu", True, init_std=1.0, arch="impala", scale=None, name="cnn")
    return make_agent(config, env, normalize=True, separate=False)


# ----------------------------------------------------------------------------------- transport


def test_nothing_is_lost_on_the_way() -> None:
    space = spaces.Dict(PARTS)
    space.seed(0)
    layout = layout_of("env.id=X", space, TWO)
    assert [entry.kind for entry in layout.entries] == [
        *("vector", "vector", "index", "index", "image", "mask"),
    ]
    assert (layout.size, layout.vectors, layout.masked) == (6 + 3 + 2 + 1 + 60 + 2, 9, 2)
    assert layout.dtype == "float32"  # numbers among bytes
    for _ in range(20):
        shown = space.sample()
        shown["action_mask"][0] = 1
        parts = unpacked(layout, layout.pack(shown))
        np.testing.assert_array_equal(parts["image"], shown["image"])
        np.testing.assert_allclose(parts["matrix"], shown["matrix"], rtol=1e-6)
        np.testing.assert_array_equal(parts["inner.bits"], shown["inner"]["bits"])
        np.testing.assert_array_equal(parts["grid"] + [1, -5], shown["grid"])
        assert parts["inner.n"] - 2 == shown["inner"]["n"]
        np.testing.assert_array_equal(parts["action_mask"], shown["action_mask"])


@pytest.mark.parametrize(
    ("shape", "high", "how", "pixels"),
    [
        ((8, 8, 12), 1, "auto", (12, 8, 8)),
        ((12, 8, 8), 1, "auto", (12, 8, 8)),
        ((10, 10, 16), 1, "auto", (16, 10, 10)),
        ((19, 19, 17), 3, "auto", (17, 19, 19)),
        ((6, 7, 2), 1, "auto", (2, 6, 7)),
        ((6, 7, 30), 1, "auto", (30, 6, 7)),
        ((9, 9, 9), 1, "auto", (9, 9, 9)),
        ((10, 9, 14), 1, "auto", (14, 10, 9)),
        ((20, 10, 7), 1, "auto", (7, 20, 10)),
        ((7, 10, 20), 15, "auto", (7, 10, 20)),
        ((4, 8, 8, 12), 1, "auto", (48, 8, 8)),
        ((84, 84, 4), 255, "auto", (4, 84, 84)),
        ((4, 84, 84), 255, "auto", (4, 84, 84)),
        ((42, 42, 1), 255, "auto", (1, 42, 42)),
        ((3, 84, 84, 3), 255, "auto", (9, 84, 84)),
        ((8, 8, 12), 255, "auto", (8, 8, 12)),  # as before; the printed line says so
        ((8, 8, 12), 255, "last", (12, 8, 8)),
        ((12, 8, 8), 1, "last", (8, 12, 8)),
        ((84, 84, 4), 255, "first", (84, 84, 4)),
        ((4, 8, 8, 12), 1, "first", (32, 8, 12)),
        ((84, 84), 255, "last", (1, 84, 84)),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", [False, True], ids=["alone", "key"])
def test_channels_are_found_told_and_chosen(shape, high, how, pixels, key) -> None:
    space = spaces.Box(0, high, shape, np.uint8)
    space.seed(0)
    given = spaces.Dict(board=space, x=spaces.Box(-1, 1, (2,))) if key else space
    layout = layout_of("env.id=X", given, TWO, "auto", how)
    (entry,) = layout.images
    assert entry.pixels == pixels
    last = entry.channels_last
    told = f"bytes up to {high}, read as {'x'.join(map(str, pixels))} (env.channels="
    assert told + ("last" if last else "first") in layout.line
    board = space.sample()
    frames = board.reshape(-1, *shape[-3:]) if len(shape) > 2 else board[None, None]
    by_hand = np.moveaxis(frames, -1, 1) if last else frames
    found = images_of(entry, torch.from_numpy(board.reshape(1, -1)), high)
    expected = torch.from_numpy(by_hand.reshape(1, *pixels)).float() / high
    torch.testing.assert_close(found, expected)
    assert layout.random_transports(np.random.default_rng(0), 50)[:, -board.size :].max() == high


@pytest.mark.parametrize(
    ("space", "embedded"),
    [
        (spaces.Discrete(4096), False),
        (spaces.Discrete(4097, start=-5), True),
        (spaces.MultiDiscrete([4000, 96]), False),
        (spaces.MultiDiscrete([[4000, 50], [40, 7]], start=[[1, 2], [3, 4]]), True),
        (spaces.MultiBinary(5000), False),
        (spaces.Box(-1, 1, (5000,)), False),
    ],
    ids=str,
)
def test_many_numbers_are_embedded_instead_of_one_hot(space, embedded: bool) -> None:
    layout = layout_of("env.id=X", space, TWO)
    assert (layout is not None) == embedded
    if layout is not None:
        space.seed(0)
        value = space.sample()
        assert layout.size == np.size(value)
        np.testing.assert_array_equal(unpacked(layout, layout.pack(value))[""] + space.start, value)


def test_bytes_travel_as_bytes() -> None:
    """A quarter of the memory of a rollout; minibatches too."""
    env = VectorGymEnv("klrl.control.env.catch:klrl/Catch-v0", 2, seed=0)
    assert env.reset()["observation"].dtype == torch.uint8
    check_env_specs(env)
    every = torch.arange(256, dtype=torch.uint8).expand(3, 256)
    odd = torch.randint(0, 256, (3, 2, 5), dtype=torch.uint8)
    frames = {
        "x": every,
        "reward": torch.randn(3),
        "odd": odd,
        "action": torch.tensor([4, 5, 2**24]),
    }
    frames["square"] = torch.randn(3, 2, 4)
    columns = Columns(frames)
    rows = columns.pack(frames)
    assert rows.shape == (3, 64 + 1 + 3 + 1 + 8)
    order = torch.tensor([2, 0, 1])
    back = columns.unpack(rows[order])
    for key, value in frames.items():
        torch.testing.assert_close(back[key], value[order], rtol=0, atol=0)
    with pytest.raises(TypeError, match="e is torch.float64"):
        Columns({"e": torch.zeros(2, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"grid": np.array([0, 0])}, r"observation's grid is \[0, 0\], outside its space"),
        ({"action_mask": np.zeros(2)}, "action_mask allows no action, but the episode has not end"),
        ({"action_mask": np.ones(3)}, r"action_mask has shape \(3,\), but its space has shape \(2"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_is_no_observation_is_told_in_a_line(change, named) -> None:
    class Wrong(gymnasium.Env):
        observation_space, action_space = spaces.Dict(PARTS), TWO

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample() | {
                "action_mask": np.ones(2, np.int8)
            } | change, {}

    gymnasium.registry.pop("klrl-test/Wrong-v0", None)
    gymnasium.register("klrl-test/Wrong-v0", Wrong, disable_env_checker=True)
    env = VectorGymEnv("klrl-test/Wrong-v0", 1)
    with pytest.raises(EnvError, match=f"env.id=klrl-test/Wrong-v0: reset 0 of copy 0: {named}"):
        env.reset_native()


# ------------------------------------------------------------------------------------ encoders


@pytest.mark.parametrize("how", [{}, {"as_tuple": True}, {"image": False}], ids=str)
def test_every_key_is_read(how) -> None:
    """A policy's output moves with every entry, and an entry's place with its key."""
    torch.manual_seed(0)
    env = made("Keyed", kwargs=how)
    net = agent_for(env).policy_net
    (seen,) = torch.from_numpy(env.layout.random_transports(np.random.default_rng(0), 1))
    before = net(seen)[0]
    for entry, place in env.layout.places():
        changed = seen.clone()
        changed[place] = (changed[place] + 1) % (entry.counts[0] if entry.counts else 256)
        assert (net(changed)[0] - before).abs().max() > 1e-7, entry


def test_only_vectors_are_normalised() -> None:
    env = make_env(gym(f"{T}/Keyed-v0", image=False), seed=0)
    agent = agent_for(env)
    batch = env.rollout(30, agent.actor, break_when_any_done=False)["observation"]
    agent.normalizer.update(batch)
    count = env.layout.vectors
    flat = batch.reshape(-1, batch.shape[-1])
    normalized = agent.normalizer(flat)
    expected = (flat[:, :count] - flat[:, :count].mean(0)) / flat[:, :count].std(0, correction=0)
    torch.testing.assert_close(normalized[:, :count], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(normalized[:, count:], flat[:, count:])


# --------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("where", ["observation", "info", "several"])
def test_an_excluded_action_has_no_probability(where: str) -> None:
    """In the rollout, in the reference, in the TorchRL transforms' KL, and in the mode."""
    torch.manual_seed(0)
    mask = "info" if where == "info" else "auto"
    config = replace(gym(f"{T}/Masked-v0", 4, where=where), action_mask=mask)
    env = make_env(config, seed=0)
    agent = agent_for(env)
    _, reference = apart(agent.actor, 0.5)
    rollout = VectorRollout(env, agent, 40, CPU)
    batch = rollout.collect()
    allowed = batch["observation"][..., -env.layout.masked :] != 0
    assert batch["next", "reward"].min() >= 0  # -1 is the price of an excluded action
    family = agent.family
    factors = (
        (lambda x: x.unflatten(-1, (2, 6))) if where == "several" else (lambda x: x.unsqueeze(-2))
    )
    policy = {"logits": batch["logits"]}
    ref = {"logits": reference.get_dist_params(batch.select("observation"))["logits"]}
    by_hand = 0.0
    for p in (policy, ref):
        shares = factors(p["logits"]).softmax(-1)
        assert not shares[~factors(allowed)].any()
        torch.testing.assert_close(shares.sum(-1), torch.ones_like(shares[..., 0]))
    masked = [
        torch.distributions.Categorical(
            logits=torch.where(factors(allowed), factors(p["logits"]), -torch.inf)
        )
        for p in (policy, ref)
    ]
    ratio = masked[0].probs * (masked[0].logits - masked[1].logits)
    by_hand = torch.where(factors(allowed), ratio, 0.0).sum((-1, -2))
    torch.testing.assert_close(family.kl(policy, ref), by_hand)
    assert float(by_hand.max()) > 0.01
    entropy = torch.where(factors(allowed), -masked[0].probs * masked[0].logits, 0.0).sum((-1, -2))
    torch.testing.assert_close(family.entropy(policy), entropy)
    exact = KLConstrainedTransform(reference, 0.4, kl_key="kl", estimator="exact")
    torch.testing.assert_close(exact(batch.clone())["next", "kl"][..., 0], by_hand)
    k1 = KLRewardTransform(reference, 0.4, kl_key="kl")(batch.clone())["next", "kl"]
    assert k1.isfinite().all()


@pytest.mark.parametrize("where", ["observation", "info", "several"])
def test_no_excluded_action_is_ever_given(where: str) -> None:
    """Not by the check before a run, nor by the native loop; the environment would raise."""
    mask = "info" if where == "info" else "auto"
    config = replace(gym(f"{T}/Masked-v0", 4, strict=True, where=where), action_mask=mask)
    check_env(config, ActorConfig([8], "tanh", False, name="categorical"), frozenset())
    env = make_env(config, seed=0)
    batch = VectorRollout(env, agent_for(env), 200, CPU).collect()
    allowed = batch["observation"][..., -env.layout.masked :]
    assert 0 < float(allowed.float().mean()) < 1
    *_, mask = env.layout.entries
    actions = batch["action"].reshape(*batch.shape, len(mask.counts))
    for choice, action in zip(allowed.split(mask.counts, -1), actions.unbind(-1), strict=True):
        assert (choice.gather(-1, action.unsqueeze(-1)) != 0).all()


@pytest.mark.parametrize(
    ("where", "mask", "told"), [("info", "auto", 1), ("info", "info", 0), ("info", "none", 0)]
)
def test_a_mask_in_info_that_is_not_read_is_told(where, mask, told, capfd) -> None:
    config = replace(gym(f"{T}/Masked-v0", 2, where=where), action_mask=mask)
    check_env(config, ActorConfig([8], "tanh", False, name="categorical"), frozenset())
    line = "info has action_mask, which env.action_mask=auto does not read; set env.action_mask="
    assert capfd.readouterr().err.count(line) == told


def test_a_mask_is_read_where_it_is_asked_for() -> None:
    auto = made("Masked")
    assert auto.layout.masked == 6
    unread = made("Masked", action_mask="none")
    assert (unread.layout.masked, unread.layout.size) == (0, 2)
    ignored = made("Masked", kwargs={"where": "info"})
    assert ignored.layout is None
    with pytest.raises(EnvError, match="info has no action_mask, which env.action_mask=info"):
        made("Copying", kwargs={"action": "from_five"}, action_mask="info").reset_native()


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("observation", "action", "how", "named"),
    [
        (spaces.Text(3), TWO, "auto", "its observation space is Text, which has no fixed size"),
        (
            spaces.Dict(a=TWO, b=spaces.Text(3)), TWO, "auto",
            "the key b of its observation is Text, .* leave it out with env.observation_keys",
        ),
        (
            spaces.Dict(a=TWO, action_mask=spaces.MultiBinary(1)), spaces.Box(-1, 1, (1,)), "auto",
            "masks Discrete and MultiDiscrete actions, but its actions are Box",
        ),
        (spaces.Dict(action_mask=spaces.MultiBinary(2)), TWO, "auto", "is only a mask"),
        (spaces.Dict(a=MANY, b=TWO), TWO, "auto", r"Discrete\(16777217\) has"),
        (spaces.Box(-1, 1, (1,)), spaces.MultiDiscrete([2, MANY.n]), "auto", "16777217.* has"),
    ],
    ids=range(6),
)  # fmt: skip
def test_layouts_that_are_refused(observation, action, how, named) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        layout_of("env.id=X", observation, action, how)
    assert "\n" not in str(refused.value)


def test_a_number_of_as_many_values_as_float32_tells_apart_is_served() -> None:
    layout = layout_of("env.id=X", spaces.Dict(a=spaces.Discrete(2**24), b=TWO), TWO)
    assert layout is not None
    last = {"a": 2**24 - 1, "b": 1}
    assert unpacked(layout, layout.pack(last))["a"] == 2**24 - 1


def test_gymnasiums_wrappers_are_applied_from_the_inside() -> None:
    """Frames of a grey Catch, stacked: what the same wrappers give by hand."""
    words = [
        "GrayscaleObservation",
        "{target: ReshapeObservation, args: {shape: [21, 84]}}",
        "{target: gymnasium.wrappers:FrameStackObservation, args: {stack_size: 3}}",
    ]
    wrappers = gymnasium.wrappers

    def colour() -> gymnasium.Env:
        space = spaces.Box(0, 255, (42, 42, 3), np.uint8)
        return wrappers.TransformObservation(Catch(), lambda x: x.repeat(3, -1), space)

    gymnasium.registry.pop("klrl-test/Colour-v0", None)
    gymnasium.register("klrl-test/Colour-v0", colour)
    config = compose("env.id=klrl-test/Colour-v0", f"env.wrappers=[{','.join(words)}]", "actor=cnn")
    env = make_copies(config.env, seed=0, num_envs=1)
    assert env.layout.images[0].pixels == (3, 21, 84)
    grey = wrappers.ReshapeObservation(wrappers.GrayscaleObservation(colour()), (21, 84))
    by_hand = wrappers.FrameStackObservation(grey, 3)
    shown, _ = by_hand.reset(seed=0)
    np.testing.assert_array_equal(env.reset_native(seeds=[0])[0].reshape(3, 21, 84), shown)
    for action in (0, 2, 1):
        seen = env.step_native(np.array([action]))[0]
        np.testing.assert_array_equal(seen[0].reshape(3, 21, 84), by_hand.step(action)[0])


def test_catch_pays_who_stands_below_the_ball() -> None:
    env = Catch(render_mode="rgb_array")
    returns = []
    for seed in range(30):
        picture, _ = env.reset(seed=seed)
        ended, total = False, 0.0
        while not ended:
            ball = int(np.flatnonzero((picture == 255).any((0, 2)))[0])
            paddle = int(np.flatnonzero((picture == 128).any((0, 2)))[0])
            picture, reward, ended, _, _ = env.step(1 + np.sign(ball - paddle))
            total += reward
        returns.append(total)
    assert returns == [1.0] * 30
    assert env.render().shape == (42, 42, 3)
