"""Networks of the user's own on images and keys: what they are given, and what that comes to."""

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from klrl.config import CNNActorConfig, CustomActorConfig
from klrl.config.fields import OwnPart
from klrl.control.env.copies import VectorGymEnv
from klrl.control.env.observation import layout_of
from klrl.control.policy.actor import make_agent
from klrl.control.policy.encoders import nature
from klrl.control.policy.own import given, given_sizes
from tests.control.toys import unpacked

CATCH = "klrl.control.env.catch:klrl/Catch-v0"
KEYED = "tests.control.toys:klrl-test/Keyed-v0"


class Nature(nn.Module):
    """klrl's, written again: the CNN, one hidden layer, one output layer."""

    def __init__(self, inputs, outputs: int = 1) -> None:
        super().__init__()
        self.cnn = nature(inputs[0])
        features = self.cnn(torch.zeros(1, *inputs)).shape[-1]
        self.hidden, self.head = nn.Linear(features, 8), nn.Linear(8, outputs)

    def forward(self, images):
        return self.head(self.hidden(self.cnn(images)).relu())


class Keys(nn.Module):
    """A linear layer over the mean of the image, the number and the bit."""

    def __init__(self, inputs, outputs: int = 1) -> None:
        super().__init__()
        assert inputs == {"bright": (3, 8, 8), "inner.number": 4, "inner.turned": 1}
        self.linear = nn.Linear(1 + 4 + 1, outputs)

    def forward(self, seen):
        parts = (seen.pop("bright").mean((1, 2, 3)), seen["inner.number"], seen["inner.turned"])
        return self.linear(torch.cat([parts[0].unsqueeze(-1), *parts[1:]], -1))


def agent_of(env: VectorGymEnv, target: str, critic: str | None = None):
    config = CustomActorConfig(
        [8], "relu", False, init_std=1.0, target=f"{__name__}:{target}", name="custom",
        distribution="auto", own_critic=OwnPart(f"{__name__}:{critic or target}"),
    )  # fmt: skip
    return make_agent(config, env, normalize=True, separate=False)


def copied(module: nn.Module, values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.copy_(value)


def test_an_own_cnn_with_klrls_weights_is_klrls_cnn() -> None:
    """Channels, scale and leading dimensions as ``actor=cnn`` has them."""
    env = VectorGymEnv(CATCH, 2, seed=0)
    plain_config = CNNActorConfig(
        [8], "relu", False, init_std=1.0, arch="nature", scale=None, name="cnn"
    )
    plain = make_agent(plain_config, env, normalize=True, separate=False)
    own = agent_of(env, "Nature")
    for mine, klrls in ((own.policy_net, plain.policy_net), (own.value_net, plain.value_net)):
        copied(mine.head, list(klrls.parameters()))
    data = env.rollout(3, auto_cast_to_device=False)
    seen = data["observation"]
    assert seen.shape[:2] == (2, 3)
    torch.testing.assert_close(own.policy_net(seen)[0], plain.policy_net(seen)[0])
    torch.testing.assert_close(own.value_net(seen), plain.value_net(seen))
    assert own.value_net(seen).shape == (2, 3, 1)
    own.actor(data)
    assert torch.isfinite(data["action_log_prob"]).all()


def test_keys_are_given_by_name_numbers_one_hot_and_no_mask() -> None:
    space = spaces.Dict(
        image=spaces.Box(0, 255, (5, 4, 3), np.uint8),
        grid=spaces.MultiDiscrete([3, 2], start=[1, -5]),
        matrix=spaces.Box(-9, 9, (2, 3), np.float64),
        action_mask=spaces.MultiBinary(2),
    )
    layout = layout_of("env.id=X", space, spaces.Discrete(2))
    space.seed(0)
    seen = [space.sample() for _ in range(4)]
    for each in seen:
        each["action_mask"][0] = 1
    found = given(layout, torch.from_numpy(np.stack([layout.pack(each) for each in seen])))
    assert isinstance(found, dict)
    assert given_sizes(layout) == {"matrix": 6, "grid": 5, "image": (3, 5, 4)}
    assert found.keys() == {"matrix", "grid", "image"}
    for row, each in enumerate(seen):
        pixels = torch.from_numpy(each["image"]).permute(2, 0, 1) / 255
        torch.testing.assert_close(found["image"][row], pixels)
        matrix = torch.from_numpy(each["matrix"].reshape(-1)).float()
        torch.testing.assert_close(found["matrix"][row], matrix)
        first, second = each["grid"] - [1, -5]
        expected = torch.zeros(5)
        expected[[first, 3 + second]] = 1
        torch.testing.assert_close(found["grid"][row], expected)


class OneHot(nn.Module):
    """A linear layer over a one-hot number."""

    def __init__(self, inputs, outputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, seen):
        return self.linear(seen)


def test_an_own_network_on_keys_acts_and_scores() -> None:
    env = VectorGymEnv(KEYED, 2, seed=0)
    own = agent_of(env, "Keys")
    data = env.rollout(3, policy=own.actor)
    parts = unpacked(env.layout, data["observation"].numpy())
    bright = torch.from_numpy(parts["bright"]).float().mean((2, 3, 4)) / 255
    number = torch.eye(4)[torch.from_numpy(parts["inner.number"]).long()]
    turned = torch.from_numpy(parts["inner.turned"]).float()
    by_hand = torch.cat([bright.unsqueeze(-1), number.reshape(2, 3, 4), turned], -1)
    linear = own.policy_net.head.network.linear
    # The bit is a number, which the normaliser clips at 10; it has seen nothing yet.
    torch.testing.assert_close(data["logits"], linear(by_hand))
    assert own.value_net(data["observation"]).shape == (2, 3, 1)


class Whole(nn.Module):
    """Gives the mean and the standard deviation of a Gaussian."""

    def __init__(self, inputs, outputs: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * outputs)

    def forward(self, seen):
        loc, scale = self.linear(seen).chunk(2, -1)
        return loc, scale.exp()


def test_a_network_may_give_the_whole_gaussian() -> None:
    agent = agent_of(VectorGymEnv("Pendulum-v1", 1), "Whole", "OneHot")
    seen = torch.randn(2, 5, 3)
    loc, scale = agent.policy_net.head.linear(seen).unbind(-1)
    found = agent.policy_net(seen)
    torch.testing.assert_close(found, (loc.unsqueeze(-1), scale.exp().unsqueeze(-1)))
    assert agent.policy_net.log_std is None


class Lazy(nn.Sequential):
    """Its sizes follow from the first observations."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(outputs))


def test_a_lazy_network_takes_its_sizes_from_the_first_observations() -> None:
    env = VectorGymEnv("Pendulum-v1", num_envs=1, seed=0)
    agent = agent_of(env, "Lazy")
    assert [tuple(p.shape) for p in agent.policy_net.head.parameters()][::2] == [(5, 3), (1, 5)]
