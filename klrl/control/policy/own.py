"""``actor=custom``: the user's networks with klrl's distributions, tried once before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torchrl.envs import EnvBase

from klrl.config import CustomActorConfig, OwnPart
from klrl.config.own import PartError, config_errors, make_own
from klrl.control.policy.actor import (
    Agent,
    categorical_agent,
    fitting_agent,
    normal_agent,
    tanh_normal_agent,
)
from klrl.control.policy.encoders import Unpacked, given_sizes, synthetic_observations

#: ``actor.distribution`` -> the function that builds its agent.
_AGENTS: dict[str, Callable[..., Agent]] = {
    "auto": fitting_agent,
    "normal": normal_agent,
    "tanh_normal": tanh_normal_agent,
    "categorical": categorical_agent,
}
_WHAT = "return a network (torch.nn.Module)"


def custom_agent(config: CustomActorConfig, env: EnvBase, **how: bool) -> Agent:
    """``actor=custom``; arguments as in :func:`klrl.control.policy.actor.make_agent`."""
    agent = _AGENTS[config.distribution](config, env, **how)
    policy, layout = agent.policy_net, agent.layout
    inputs = policy.inputs if layout is None else given_sizes(layout)
    seen = synthetic_observations(layout, policy.inputs, 6)

    def made(setting: str, part: OwnPart, sizes: Mapping[str, object]) -> nn.Module:
        network: nn.Module = make_own(setting, part, sizes, nn.Module, _WHAT)
        return network if layout is None else Unpacked(layout, network)

    # The user's network is the head, and the trunk is empty.
    policy.trunk = nn.Sequential()
    policy.head = made("actor", config, {"inputs": inputs, "outputs": policy.outputs})
    with config_errors("actor", config):
        outputs = _try(policy.head, seen, [policy.outputs] * len(agent.family.param_keys))
        if len(outputs) == 2:  # loc and scale
            policy.log_std = None
            if not (outputs[1] > 0).all():
                raise PartError(
                    "its second output is the scale of a Gaussian, but is not above 0; apply exp "
                    "or softplus to it"
                )
    if config.own_critic is not None:
        value = agent.value_net
        value.trunk, value.detach_trunk = nn.Sequential(), False
        value.head = made("actor.own_critic", config.own_critic, {"inputs": inputs})
        with config_errors("actor.own_critic", config.own_critic):
            _try(value.head, seen, [1])
    return agent


def _try(network: nn.Module, seen: Tensor, most: list[int]) -> tuple[Tensor, ...]:
    """Try a network on observations [6, D]. ``most``: its output widths; a second is optional.

    Require that every parameter has a gradient, since a gradient step needs all gradients.
    """
    outputs = require_steady(lambda seen: _outputs(network, seen, most), seen)
    parameters = dict(network.named_parameters())
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise PartError(f"{name} requires no gradient; make it a buffer")
    total = torch.stack([each.sum() for each in outputs]).sum()
    if not total.requires_grad:
        raise PartError("its outputs have no gradient; remove detach or no_grad")
    grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    for name, grad in zip(parameters, grads, strict=True):
        if grad is None:
            raise PartError(f"its forward does not use {name}; remove that parameter")
    return outputs


def require_steady(
    network: Callable[[Tensor], tuple[Tensor, ...]], seen: Tensor
) -> tuple[Tensor, ...]:
    """Require that outputs are finite, and that each depends on its own observation alone."""
    outputs, again = (network(seen.reshape(2, 3, -1)) for _ in range(2))
    if not all(torch.isfinite(each).all() for each in outputs):
        raise PartError("its outputs are not finite; check its initialisation")
    alone = zip(*(network(each[None]) for each in seen), strict=True)
    apart = [torch.cat(each).reshape(a.shape) for a, each in zip(outputs, alone, strict=True)]
    for first, second, single in zip(outputs, again, apart, strict=True):
        if not (torch.equal(first, second) and torch.allclose(first, single, atol=1e-4)):
            raise PartError(
                "its output for an observation depends on chance, on earlier calls or on other "
                "observations; remove dropout, noise, hidden states and batch normalisation"
            )
    return outputs


def _outputs(network: nn.Module, seen: Tensor, most: list[int]) -> tuple[Tensor, ...]:
    made = network(seen)
    outputs = made if isinstance(made, tuple) and len(made) > 1 else (made,)
    expected = [(*seen.shape[:-1], width) for width in most]
    gave = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in outputs]
    if gave not in (expected, expected[:1]):
        wanted = f"{expected[0]}, or two of them (loc, scale)" if len(most) > 1 else expected[0]
        shown = gave[0] if len(gave) == 1 else gave
        raise PartError(f"gave {shown} for observations {tuple(seen.shape)}; give {wanted}")
    if not all(each.dtype == torch.float32 for each in outputs):
        raise PartError("its outputs are not float32; convert them")
    return outputs
