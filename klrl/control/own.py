"""``actor=custom``: networks of the user's own below klrl's distributions, called once before."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrl.envs import EnvBase

from klrl.config import CustomActorConfig
from klrl.config.own import Unfit, errors_of, make_own
from klrl.control.actor import (
    Agent,
    categorical_agent,
    fitting_agent,
    normal_agent,
    tanh_normal_agent,
)
from klrl.control.distributions import Family
from klrl.control.encoders import Given, Unpacked, given, given_sizes
from klrl.control.kl import made_up
from klrl.control.networks import PolicyNet, ValueNet
from klrl.control.observation import Layout

#: ``actor.distribution`` -> who builds it.
_AGENTS: dict[str, Callable[..., Agent]] = {
    "auto": fitting_agent,
    "normal": normal_agent,
    "tanh_normal": tanh_normal_agent,
    "categorical": categorical_agent,
}
_WHAT = "return a network (torch.nn.Module)"


class OwnPolicyNet(PolicyNet):
    """A network of the user's in the policy's place: all of it is the head, there is no trunk.

    Where it gives the ``whole`` Gaussian, klrl's own standard deviation is left out.
    """

    def __init__(
        self, normalizer: nn.Module, network: nn.Module, like: PolicyNet, *, whole: bool
    ) -> None:
        nn.Module.__init__(self)
        self.normalizer, self.trunk, self.head = normalizer, nn.Sequential(), network
        self.inputs, self.outputs, self.masked = like.inputs, like.outputs, like.masked
        self.log_std = None if whole else like.log_std

    def of_features(self, hidden: Tensor, observation: Tensor) -> tuple[Tensor, ...]:
        """(loc, scale), each [..., A], or (logits,) [..., K]; ``hidden`` is the observation."""
        out = self.head(hidden)
        if self.log_std is not None:
            return out, self.log_std.exp().expand_as(out)
        if isinstance(out, tuple):
            return out
        return (self.allowed(out, observation),)


class OwnValueNet(ValueNet):
    """A network of the user's in the critic's place."""

    def __init__(self, normalizer: nn.Module, network: nn.Module, inputs: int) -> None:
        nn.Module.__init__(self)
        self.normalizer, self.trunk, self.head = normalizer, nn.Sequential(), network
        self.detach_trunk, self.inputs = False, inputs


def custom_agent(config: CustomActorConfig, env: EnvBase, **how: bool) -> Agent:
    """``actor=custom``; arguments as :func:`klrl.control.actor.make_agent`."""
    agent = _AGENTS[config.distribution](config, env, **how)
    plain, family = agent.policy_net, agent.family
    layout = agent.layout
    inputs = plain.inputs if layout is None else given_sizes(layout)
    example = _example(plain.inputs, layout)
    sizes = {"inputs": inputs, "outputs": plain.outputs}
    network: nn.Module = make_own("actor", config, sizes, nn.Module, _WHAT)
    with errors_of("actor", config):
        whole = _try_policy(network, plain, family, example)
    network = network if layout is None else Unpacked(layout, network)
    agent.actor[0].module = OwnPolicyNet(plain.normalizer, network, plain, whole=whole)
    if config.own_critic is not None:
        setting, part = "actor.own_critic", config.own_critic
        critic: nn.Module = make_own(setting, part, {"inputs": inputs}, nn.Module, _WHAT)
        with errors_of(setting, part):
            _try(critic, example, [1])
        critic = critic if layout is None else Unpacked(layout, critic)
        agent.critic.module = OwnValueNet(plain.normalizer, critic, plain.inputs)
    return agent


class _Example(NamedTuple):
    """Made-up observations."""

    seen: Given
    leading: tuple[int, ...]  # dimensions of a network's outputs
    rows: list[Given]  # each of them alone


def _example(size: int, layout: Layout | None) -> _Example:
    """Observations [2, 3, D], or six by entry."""
    drawn = made_up(layout, size, 6)
    if layout is None:
        return _Example(drawn.reshape(2, 3, size), (2, 3), list(drawn.unsqueeze(1)))
    return _Example(given(layout, drawn), (6,), [given(layout, each[None]) for each in drawn])


def _shapes(seen: Given) -> str:
    if isinstance(seen, Tensor):
        return str(tuple(seen.shape))
    return ", ".join(f"{key} {tuple(part.shape)}" for key, part in seen.items())


def _try_policy(network: nn.Module, plain: PolicyNet, family: Family, example: _Example) -> bool:
    """Whether a policy's network gives all parameters of its distribution."""
    gaussian = len(family.param_keys) == 2
    outputs = _try(network, example, [plain.outputs] * len(family.param_keys))
    if gaussian and len(outputs) == 2 and not (outputs[1] > 0).all():
        raise Unfit(
            "its second output is the scale of a Gaussian, and it is not above 0; give it an exp "
            "or a softplus"
        )
    return not gaussian or len(outputs) == 2


def _try(network: nn.Module, example: _Example, most: list[int]) -> tuple[Tensor, ...]:
    """The outputs of a network on made-up observations, of widths ``most``; one is enough."""
    seen, leading, rows = example

    def call(given: Given, leading: tuple[int, ...]) -> tuple[Tensor, ...]:
        # Its own dictionary: a network may take keys out of what it is given.
        made = network(given if isinstance(given, Tensor) else dict(given))
        return _as_outputs(made, leading, _shapes(given), most)

    outputs, again = call(seen, leading), call(seen, leading)
    if not all(torch.isfinite(each).all() for each in outputs):
        raise Unfit("its outputs are not finite; look at its initialisation")
    alone = zip(*(call(row, (1,)) for row in rows), strict=True)
    apart = [torch.cat(each).reshape(a.shape) for a, each in zip(outputs, alone, strict=True)]
    for first, second, single in zip(outputs, again, apart, strict=True):
        if not (torch.equal(first, second) and torch.allclose(first, single, atol=1e-4)):
            raise Unfit(
                "what it says of an observation depends on chance, on earlier calls or on other "
                "observations; leave dropout, noise, hidden states and batch normalisation out"
            )
    _require_used(outputs, dict(network.named_parameters()))
    return outputs


def _as_outputs(
    made: object, leading: tuple[int, ...], seen: str, most: list[int]
) -> tuple[Tensor, ...]:
    outputs = made if isinstance(made, tuple) else (made,)
    expected = [(*leading, width) for width in most]
    gave = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in outputs]
    if not 1 <= len(gave) <= len(expected) or gave != expected[: len(gave)]:
        wanted = f"{expected[0]}, or two of them (loc, scale)" if len(most) > 1 else expected[0]
        shown = gave[0] if len(gave) == 1 else gave
        raise Unfit(f"gave {shown} for observations {seen}; give {wanted}")
    if not all(each.dtype == torch.float32 for each in outputs):
        raise Unfit("its outputs are not float32")
    return outputs


def _require_used(outputs: tuple[Tensor, ...], parameters: dict[str, nn.Parameter]) -> None:
    """Every parameter must have a gradient: the step differentiates by all of them."""
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise Unfit(f"{name} requires no gradient; make it a buffer")
    total = torch.stack([each.sum() for each in outputs]).sum()
    if not total.requires_grad:
        raise Unfit("its outputs have no gradient; remove detach or no_grad")
    grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    for name, grad in zip(parameters, grads, strict=True):
        if grad is None:
            raise Unfit(f"its forward does not use {name}; remove that parameter")
