"""Policy and critic as one function of normalised observations, as the learner calls them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from klrl.control.actor import Agent, trainable


class Networks(nn.Module):
    """Both networks; parameters that they share are counted once."""

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.policy, self.value = agent.policy_net, agent.value_net

    def forward(self, normalized: Tensor) -> tuple[Tensor, ...]:
        """[B, D] -> (the family's parameters..., value [B])."""
        value = self.value.of_normalized(normalized).squeeze(-1)
        return (*self.policy.of_normalized(normalized), value)


def in_order(agent: Agent) -> list[nn.Parameter]:
    """Each parameter once; matching layers of the trunks are adjacent, so one view covers both."""
    trunks = agent.policy_net.trunk, agent.value_net.trunk
    pairs = zip(*(trunk.parameters() for trunk in trunks), strict=True)
    parameters: list[Any] = [p for pair in pairs for p in pair] + trainable(agent)
    return list({id(p): p for p in parameters}.values())


class PairedNetworks:
    """Both networks with their trunks evaluated together: half the operations of eager mode.

    Policy and critic have trunks of the same shape. Where matching weights are adjacent in memory,
    they are one tensor [2, H, D], and a layer of both trunks is one batched product.

    Args:
        agent: its parameters are views of one tensor, in the order of :func:`in_order`.

    Attributes:
        leaves: the tensors to differentiate by; they cover that one tensor, in its order.
    """

    def __init__(self, agent: Agent) -> None:
        self._policy, self._value = agent.policy_net, agent.value_net
        policy, value = (linears(net.trunk) for net in (self._policy, self._value))
        self._weights = [
            (_both(p.weight, v.weight), _both(p.bias, v.bias))
            for p, v in zip(policy, value, strict=True)
        ]
        self._activations = [x for x in self._policy.trunk if not isinstance(x, nn.Linear)]
        trunks = {id(x) for net in (self._policy, self._value) for x in net.trunk.parameters()}
        rest = [p for p in in_order(agent) if id(p) not in trunks]
        self.leaves: list[Tensor] = [x for pair in self._weights for x in pair] + list(rest)

    def __call__(self, normalized: Tensor) -> tuple[Tensor, ...]:
        """[B, D] -> (the family's parameters..., value [B])."""
        hidden = normalized.expand(2, -1, -1)
        for (weight, bias), activate in zip(self._weights, self._activations, strict=True):
            hidden = activate(torch.baddbmm(bias.unsqueeze(1), hidden, weight.transpose(1, 2)))
        policy, value = hidden.unbind(0)
        return (*self._policy.of_features(policy), self._value.head(value).squeeze(-1))


def can_be_paired(agent: Agent) -> bool:
    """Whether matching layers of two separate trunks are adjacent in memory."""
    policy, value = agent.policy_net.trunk, agent.value_net.trunk
    if policy is value or 2 * len(linears(policy)) != len(policy):
        return False
    pairs = zip(policy.parameters(), value.parameters(), strict=True)
    parameters = [p for pair in pairs for p in pair]
    ends = [p.data_ptr() + p.numel() * p.element_size() for p in parameters]
    following = [p.data_ptr() for p in parameters[1:]]
    return all(end == start for end, start in zip(ends, following, strict=False))


def linears(trunk: nn.Sequential) -> list[nn.Linear]:
    """The linear layers of a trunk."""
    return [layer for layer in trunk if isinstance(layer, nn.Linear)]


def _both(policy: Tensor, value: Tensor) -> Tensor:
    """One leaf [2, ...] over two tensors that are adjacent in memory."""
    both = policy.detach().as_strided((2, *policy.shape), (policy.numel(), *policy.stride()))
    assert both[1].data_ptr() == value.data_ptr()
    return both.requires_grad_()
