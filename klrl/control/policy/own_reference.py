"""Makes the user's policy a reference, for ``reference=custom`` and ``klrl kl --to NAME``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Distribution, Independent
from torch.nn.functional import one_hot

from klrl.base.errors import NonFiniteError
from klrl.base.seeds import generators_kept
from klrl.config import OwnPart
from klrl.config.own import PartError, config_errors, import_target, make_own
from klrl.config.own.find import arguments, setting_text
from klrl.control.policy.actor import Agent
from klrl.control.policy.distributions import Categorical, MultiCategorical, Normal
from klrl.control.policy.encoders import TRIED, given, synthetic_observations
from klrl.control.policy.networks import PolicyNet
from klrl.control.policy.own import require_steady
from klrl.kl.reference import flat_policy

_WHAT = "return a TorchRL actor, or a function from observation to torch distribution"


def own_reference(setting: str, part: OwnPart, agent: Agent) -> ProbabilisticTensorDictSequential:
    """Make an actor from the user's policy, and try it once.

    Like ``agent``'s actor, it takes the task's observations, and its distributions must have the
    same family. ``setting`` names ``part`` in messages.

    Raises:
        ConfigError: the policy fails, gives a different distribution, or depends on chance.
    """
    network = OwnReference(setting_text(setting, part), _policy(setting, part), agent)
    network.requires_grad_(False).eval()
    seen = synthetic_observations(agent.layout, agent.policy_net.inputs, TRIED)
    with config_errors(setting, part), generators_kept(), torch.no_grad():
        network.require_same_family(seen)
        require_steady(network, seen)
    module = TensorDictModule(network, ["observation"], list(agent.family.param_keys))
    return ProbabilisticTensorDictSequential(module, *list(agent.actor.module)[1:])


def _policy(setting: str, part: OwnPart) -> object:
    """Return the target itself if it takes an observation, else the policy that it returns."""
    target = import_target(setting, part)
    if "observation" in arguments(setting_text(setting, part), target)[0]:
        return partial(target, **part.args)
    made: object = make_own(setting, part, {}, Callable, _WHAT)  # type: ignore[arg-type]
    return flat_policy(made)


class OwnReference(PolicyNet):
    """The user's policy as a network from unnormalised observations [..., D] to parameters."""

    def __init__(self, setting: str, policy: Any, like: Agent) -> None:
        nn.Module.__init__(self)
        self.setting, self.policy = setting, policy
        self.family, self.layout = like.family, like.layout
        # Transforms find a policy's device by its first parameter; a user's function has none.
        self.place = nn.Parameter(torch.zeros(0))
        self.masked, self.outputs = like.policy_net.masked, like.policy_net.outputs

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters of pi_ref(.|s), in the order of the family's ``param_keys``.

        Raises:
            NonFiniteError: a parameter is NaN or infinite, or the family or shape is wrong.
        """
        try:
            _, params = self._evaluated(observation.reshape(-1, observation.shape[-1]))
        except PartError as error:
            raise NonFiniteError(f"{self.setting}: {error}") from None
        shaped = [each.float().reshape(*observation.shape[:-1], -1) for each in params.values()]
        return (self.allowed(shaped[0], observation),) if len(shaped) == 1 else tuple(shaped)

    def _evaluated(self, rows: Tensor) -> tuple[Distribution, dict[str, Tensor]]:
        """Call the policy with observations [B, D]; return pi_ref(.|s) and its parameters."""
        seen: Any = rows.clone()  # the user's code may write to it
        seen = seen if self.layout is None else given(self.layout, seen)
        if hasattr(self.policy, "get_dist"):
            seen = seen if isinstance(seen, dict) else {self.policy.in_keys[0]: seen}
            dist = self.policy.get_dist(TensorDict(seen, rows.shape[:1]))
        else:
            dist = self.policy(seen)
        if not isinstance(dist, Distribution):
            raise PartError(f"gave {type(dist).__name__} for an observation; {_WHAT}")
        params, wanted = self._params(dist), (len(rows), self.outputs)
        for key, value in params.items():
            if tuple(value.shape) != wanted:
                raise PartError(
                    f"gave {_name(dist)} with parameters of shape {tuple(value.shape)} for "
                    f"observations {tuple(rows.shape)}; this policy's are {wanted}: give that"
                )
            if (bad := ~value.isfinite().all(1)).any():
                gave, seen = (x[bad][0].double().round(decimals=4).tolist() for x in (value, rows))
                what = f"gave {key}={gave!s:.99} for observation={seen!s:.99}"
                raise PartError(f"{what}; give finite numbers")
        return dist, params

    def _params(self, dist: Distribution) -> dict[str, Tensor]:
        """Read the family's parameters [B, ...] from the user's distribution."""
        inner: Any = dist
        family, keys = self.family, self.family.param_keys
        while hasattr(inner, "base_dist") and not hasattr(inner, keys[0]):
            inner = inner.base_dist
        if not all(hasattr(inner, key) for key in keys):
            raise PartError(f"gave {_name(dist)}, and this policy is {family.name}; give that")
        params: dict[str, Tensor] = {key: getattr(inner, key) for key in keys}
        if isinstance(family, MultiCategorical):
            counts, logits = family.counts, params["logits"]
            if logits.shape[1:] == (len(counts), max(counts)):  # heads padded to one size
                heads = zip(logits.unbind(1), counts, strict=True)
                params["logits"] = torch.cat([head[:, :count] for head, count in heads], -1)
        return params

    def require_same_family(self, observations: Tensor) -> None:
        """Require that the user's distribution and the family give equal log-probs."""
        dist, params = self._evaluated(observations)
        family, shape = self.family, (len(observations), self.outputs)
        if isinstance(family, Normal):
            sample = torch.linspace(-1, 1, shape[0]).unsqueeze(-1).expand(shape)
        else:
            sample = family.sample(params, 1)[0]
        action = family.action(sample)
        if type(family) is Categorical and dist.event_shape:
            action = one_hot(action, self.outputs)
        found = dist.log_prob(action.to(params[family.param_keys[0]].dtype))
        found = found.reshape(shape[0], -1).sum(-1)
        if not torch.allclose(found, family.log_prob(params, sample), rtol=1e-3, atol=1e-3):
            raise PartError(
                f"gave {_name(dist)}, whose log-probs are not those of this policy's "
                f"{family.name}; give the same support"
            )


def _name(dist: Distribution) -> str:
    return type(dist.base_dist if isinstance(dist, Independent) else dist).__name__
