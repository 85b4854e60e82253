"""``actor=custom``: networks of the user's own below klrl's distributions, called once before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchrl.envs import EnvBase

from klrl.base.errors import ConfigError
from klrl.config import CustomActorConfig, OwnPart
from klrl.config.own import make_own, require, told
from klrl.control.actor import (
    Agent,
    categorical_agent,
    mlp_agent,
    normal_agent,
    tanh_normal_agent,
)
from klrl.control.distributions import Family
from klrl.control.networks import PolicyNet, ValueNet

#: ``actor.distribution`` -> who builds it.
_AGENTS: dict[str, Callable[..., Agent]] = {
    "auto": mlp_agent,
    "normal": normal_agent,
    "tanh_normal": tanh_normal_agent,
    "categorical": categorical_agent,
}
_WHAT = "return a network (torch.nn.Module)"


class OwnPolicyNet(PolicyNet):
    """A network of the user's in the policy's place: all of it is the head, there is no trunk.

    Args:
        normalizer: applied to the observation.
        network: observation [..., D] -> the distribution's parameters, as :meth:`of_features`.
        like: klrl's own policy network, for its sizes and its standard deviation.
        whole: whether the network gives all parameters of a Gaussian, its scale too.
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
    """A network of the user's in the critic's place.

    Args:
        normalizer: applied to the observation.
        network: observation [..., D] -> value [..., 1].
        inputs: D.
    """

    def __init__(self, normalizer: nn.Module, network: nn.Module, inputs: int) -> None:
        nn.Module.__init__(self)
        self.normalizer, self.trunk, self.head = normalizer, nn.Sequential(), network
        self.detach_trunk, self.inputs = False, inputs


def custom_agent(config: CustomActorConfig, env: EnvBase, **how: bool) -> Agent:
    """``actor=custom``; arguments as :func:`klrl.control.actor.make_agent`.

    Raises:
        ConfigError: a network cannot be made, or one call of it shows that it cannot be trained.
    """
    agent = _AGENTS[config.distribution](config, env, **how)
    plain, family = agent.policy_net, agent.family
    network: nn.Module = require(
        "actor",
        config,
        make_own("actor", config, {"inputs": plain.inputs, "outputs": plain.outputs}),
        nn.Module,
        _WHAT,
    )
    whole = _try_policy(config, network, plain, family)
    agent.actor[0].module = OwnPolicyNet(plain.normalizer, network, plain, whole=whole)
    if config.own_critic is not None:
        given = {"inputs": plain.inputs}
        made = make_own("actor.own_critic", config.own_critic, given)
        critic: nn.Module = require("actor.own_critic", config.own_critic, made, nn.Module, _WHAT)
        _try("actor.own_critic", config.own_critic, critic, plain.inputs, [1])
        agent.critic.module = OwnValueNet(plain.normalizer, critic, plain.inputs)
    return agent


def _try_policy(
    config: CustomActorConfig, network: nn.Module, plain: PolicyNet, family: Family
) -> bool:
    """Whether a policy's network gives all parameters of its distribution."""
    gaussian = len(family.param_keys) == 2
    most = [plain.outputs] * len(family.param_keys)
    outputs = _try("actor", config, network, plain.inputs, most)
    if gaussian and len(outputs) == 2 and not (outputs[1] > 0).all():
        raise ConfigError(
            f"actor.target={config.target}: its second output is the scale of a Gaussian, and it "
            "is not above 0; give it an exp or a softplus"
        )
    return not gaussian or len(outputs) == 2


def _try(
    setting: str, part: OwnPart, network: nn.Module, inputs: int, most: list[int]
) -> tuple[Tensor, ...]:
    """Call a network on made-up observations [2, 3, D].

    Args:
        setting: that holds it.
        part: the same.
        network: takes observations [..., D].
        inputs: D.
        most: the widths that its outputs may have; one is enough.

    Returns:
        Its outputs.

    Raises:
        ConfigError: other shapes or types, a number that is not finite, a parameter that is not
            used, an output that changes from call to call or depends on other rows.
    """
    text = f"{setting}.target={part.target}"
    parameters = dict(network.named_parameters())
    wrong = [name for name, p in parameters.items() if p.dtype != torch.float32]
    if wrong or not parameters:
        fault = f"{wrong[0]} is not float32" if wrong else "it has no parameters"
        raise ConfigError(f"{text}: {fault}; give float32 parameters to train")
    seen = torch.randn(2, 3, inputs, generator=torch.Generator().manual_seed(0))
    with told(setting, part):
        first, again, row = network(seen), network(seen), network(seen[0, :1])
    outputs = _as_outputs(text, first, (2, 3), inputs, most)
    others = _as_outputs(text, again, (2, 3), inputs, most)
    rows = _as_outputs(text, row, (1,), inputs, most)
    if not all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True)):
        raise ConfigError(f"{text}: two calls give different outputs; leave dropout and noise out")
    if not all(torch.allclose(a[0, :1], b, atol=1e-4) for a, b in zip(outputs, rows, strict=True)):
        raise ConfigError(
            f"{text}: what it says of one observation depends on the others; leave batch "
            "normalisation out"
        )
    if not all(torch.isfinite(each).all() for each in outputs):
        raise ConfigError(f"{text}: its outputs are not finite; look at its initialisation")
    _require_used(text, outputs, parameters)
    return outputs


def _as_outputs(
    text: str, made: object, leading: tuple[int, ...], inputs: int, most: list[int]
) -> tuple[Tensor, ...]:
    outputs = made if isinstance(made, tuple) else (made,)
    expected = [(*leading, width) for width in most]
    gave = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in outputs]
    if not 1 <= len(gave) <= len(expected) or gave != expected[: len(gave)]:
        wanted = f"{expected[0]}, or two of them (loc, scale)" if len(most) > 1 else expected[0]
        shown = gave[0] if len(gave) == 1 else gave
        raise ConfigError(
            f"{text}: gave {shown} for observations {(*leading, inputs)}; give {wanted}"
        )
    floats = [x for x in outputs if isinstance(x, Tensor) and x.dtype == torch.float32]
    if len(floats) != len(outputs):
        raise ConfigError(f"{text}: its outputs are not float32")
    return tuple(floats)


def _require_used(
    text: str, outputs: tuple[Tensor, ...], parameters: dict[str, nn.Parameter]
) -> None:
    """Every parameter must have a gradient: the step differentiates by all of them."""
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if frozen:
        raise ConfigError(f"{text}: {frozen[0]} requires no gradient; make it a buffer")
    total = torch.stack([each.sum() for each in outputs]).sum()
    if not total.requires_grad:
        raise ConfigError(f"{text}: its outputs have no gradient; remove detach or no_grad")
    grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    unused = [name for name, grad in zip(parameters, grads, strict=True) if grad is None]
    if unused:
        raise ConfigError(f"{text}: its forward does not use {unused[0]}; remove that parameter")
