"""``reference=custom``, ``klrl kl --to module:name``: the user's policy, tried once before use."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, distributions, nn
from torch.distributions import Distribution
from torch.nn.functional import one_hot

from klrl.base.seeds import generators_kept
from klrl.config import OwnPart
from klrl.config.own import PartError, config_errors, import_target, make_own
from klrl.config.own.find import arguments, setting_text
from klrl.control.actor import Agent
from klrl.control.distributions import (
    Bernoulli,
    Categorical,
    Family,
    MultiCategorical,
    Normal,
    Params,
    TanhNormalFamily,
)
from klrl.control.encoders import given
from klrl.control.kl import synthetic_observations
from klrl.control.networks import PolicyNet
from klrl.control.own import require_steady
from klrl.kl.reference import flat_policy

#: Family -> the distributions of torch that have its parameters.
_KINDS: dict[type[Family], tuple[type[Distribution], ...]] = {
    Normal: (distributions.Normal,),
    Bernoulli: (distributions.Bernoulli,),
    Categorical: (distributions.Categorical, distributions.OneHotCategorical),
}
_WHAT = "return a TorchRL actor, or a function from observation to torch distribution"


def own_reference(setting: str, part: OwnPart, agent: Agent) -> ProbabilisticTensorDictSequential:
    """The user's policy as one like ``agent``'s: same observations, same family of distributions.

    ``setting`` names the part in messages.

    Raises:
        ConfigError: it does not fit.
    """
    policy = _made(setting, part)
    if isinstance(policy, nn.Module):
        policy = flat_policy(policy).requires_grad_(False).eval()
    network = OwnReference(policy, agent)
    seen = synthetic_observations(agent.layout, agent.policy_net.inputs, 6)
    with config_errors(setting, part), generators_kept(), torch.no_grad():
        network.require_same_family(seen)
        require_steady(network, seen)
    module = TensorDictModule(network, ["observation"], list(agent.family.param_keys))
    return ProbabilisticTensorDictSequential(module, *list(agent.actor.module)[1:])


def _made(setting: str, part: OwnPart) -> Any:
    """The target itself if it takes an observation, else what it returns."""
    target = import_target(setting, part)
    if "observation" in arguments(setting_text(setting, part), target)[0]:
        return partial(target, **part.args)
    policy: object = make_own(setting, part, {})
    with config_errors(setting, part):
        if not callable(policy):
            raise PartError(f"made {type(policy).__name__}; {_WHAT}")
    return policy


class OwnReference(PolicyNet):
    """The user's policy as a network: observations [..., D], not normalised -> parameters."""

    def __init__(self, policy: Any, like: Agent) -> None:
        nn.Module.__init__(self)
        self.policy, self.family, self.layout = policy, like.family, like.layout
        # A function has no parameter, by which transforms find a policy's device.
        self.place = nn.Parameter(torch.zeros(0), requires_grad=False)
        self.masked, self.outputs = like.policy_net.masked, like.policy_net.outputs

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        """The parameters of the family, as those of the run's policy."""
        rows = observation.reshape(-1, observation.shape[-1]).clone()  # it may write to them
        values = self._params_of(self._distribution(rows)).values()
        shaped = [each.float().reshape(*observation.shape[:-1], -1) for each in values]
        return (self.allowed(shaped[0], observation),) if len(shaped) == 1 else tuple(shaped)

    def _distribution(self, rows: Tensor) -> Distribution:
        """pi_ref(.|s) of observations [B, D]."""
        seen: Any = rows if self.layout is None else given(self.layout, rows)
        if hasattr(self.policy, "get_dist"):
            seen = seen if isinstance(seen, dict) else {self.policy.in_keys[0]: seen}
            dist = self.policy.get_dist(TensorDict(seen, rows.shape[:1]))
        else:
            dist = self.policy(seen)
        if not isinstance(dist, Distribution):
            raise PartError(f"gave {type(dist).__name__} for an observation; {_WHAT}")
        return dist

    def _params_of(self, dist: Distribution) -> Params:
        """The parameters [B, ...] of a distribution in the run's family."""
        inner, family = _inner(dist), self.family
        if isinstance(family, TanhNormalFamily) and hasattr(inner, "base_dist"):
            inner = _inner(inner.base_dist)
        kinds = next(each for kind, each in _KINDS.items() if isinstance(family, kind))
        if not issubclass(type(inner), kinds):
            raise PartError(f"gave {_name(dist)}, and this policy is {family.name}; give that")
        if isinstance(family, Normal):
            return {"loc": inner.loc, "scale": inner.scale}
        logits: Tensor = inner.logits
        counts = family.counts if isinstance(family, MultiCategorical) else ()
        if counts and logits.shape[1:] == (len(counts), max(counts)):  # padded heads
            heads = zip(logits.unbind(1), counts, strict=True)
            logits = torch.cat([head[:, :count] for head, count in heads], -1)
        return {"logits": logits}

    def require_same_family(self, seen: Tensor) -> None:
        """Compare the user's log-probs with the family's, at actions of the family."""
        dist = self._distribution(seen)
        params = self._params_of(dist)
        family, wanted = self.family, (len(seen), self.outputs)
        for value in params.values():
            if tuple(value.shape) != wanted:
                raise PartError(
                    f"gave {_name(dist)} with parameters of shape {tuple(value.shape)} for "
                    f"observations {tuple(seen.shape)}; this policy's are {wanted}: give that"
                )
        if isinstance(family, Normal):
            sample = torch.linspace(-1, 1, len(seen)).unsqueeze(-1).expand(wanted)
        else:
            sample = family.sample(params, 1)[0]
        action = family.action(sample)
        if isinstance(_inner(dist), distributions.OneHotCategorical):
            action = one_hot(action, self.outputs)
        found = dist.log_prob(action.to(params[family.param_keys[0]].dtype))
        found = found.reshape(len(seen), -1).sum(-1)
        if not torch.allclose(found, family.log_prob(params, sample), rtol=1e-3, atol=1e-3):
            raise PartError(
                f"gave {_name(dist)}, whose log-probs are not those of this policy's "
                f"{family.name}; give the same support"
            )


def _name(dist: Distribution) -> str:
    return type(_inner(dist)).__name__


def _inner(dist: Any) -> Any:
    while isinstance(dist, distributions.Independent):
        dist = dist.base_dist
    return dist
