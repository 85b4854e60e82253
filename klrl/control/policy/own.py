"""The user's networks as an actor (``actor=custom``), and the user's policy as a reference.

Both are tried once on synthetic observations before training: ``reference=custom`` and
``klrl kl --to NAME`` make a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Distribution, Independent
from torch.nn.functional import one_hot
from torch.nn.parameter import is_lazy
from torchrl.envs import EnvBase

from klrl.base.errors import ConfigError, NonFiniteError
from klrl.base.seeds import generators_kept, seed_generators
from klrl.config import CONTROL, CustomActorConfig, OwnPart, factory
from klrl.config.own import PartError, config_errors, import_target, make_own
from klrl.config.own.find import arguments, setting_text
from klrl.control.env.observation import Layout, ObservationPart
from klrl.control.policy.distributions import Categorical, MultiCategorical, Normal
from klrl.control.policy.encoders import images_of
from klrl.control.policy.networks import Agent, PolicyNet
from klrl.kl.reference import flat_policy

_NETWORK = "return a network (torch.nn.Module)"
_UNNORMALIZED = (
    "actor: the network came with weights, so env.normalize_observation leaves its observations "
    "unchanged"
)


def custom_agent(config: CustomActorConfig, env: EnvBase, **how: bool) -> Agent:
    """``actor=custom``; arguments as in :func:`klrl.control.policy.actor.make_agent`."""
    # With auto, the action space chooses the distribution, as for actor=mlp.
    chosen = "mlp" if config.distribution == "auto" else config.distribution
    make = factory("actor", replace(config, name=chosen), CONTROL)
    agent: Agent = make(config, env, **how)
    policy, layout, sizes = agent.policy_net, agent.layout, network_sizes(agent)
    seen = agent.synthetic_observations(6)

    def made(setting: str, part: OwnPart, sizes: Mapping[str, object]) -> nn.Module:
        network: nn.Module = make_own(setting, part, sizes, nn.Module, _NETWORK)
        return network if layout is None else Unpacked(layout, network)

    make = partial(made, "actor", config, sizes)
    trained = _has_weights(make)
    if trained and agent.normalizer is not None:
        # Statistics that begin empty would change a trained policy.
        agent.normalizer, agent.notes = None, (_UNNORMALIZED,)
        policy.normalizer = agent.value_net.normalizer = nn.Identity()
    # The user's network is the head, and the trunk is empty.
    policy.trunk = nn.Sequential()
    # Code that loads weights may seed the generators; the run's seed must not change.
    with generators_kept() if trained else nullcontext():
        policy.head = make()
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
        value.head = made("actor.own_critic", config.own_critic, {"inputs": sizes["inputs"]})
        with config_errors("actor.own_critic", config.own_critic):
            _try(value.head, seen, [1])
    return agent


def network_sizes(agent: Agent) -> dict[str, object]:
    """Return a custom network's arguments: ``inputs`` (of a layout, one per key), ``outputs``."""
    policy, layout = agent.policy_net, agent.layout
    inputs = policy.inputs if layout is None else given_sizes(layout)
    return {"inputs": inputs, "outputs": policy.outputs}


def _has_weights(make: Callable[[], nn.Module]) -> bool:
    """Whether a network comes with trained weights: some are equal for two random streams.

    Weights that are constant, such as zeros, may be an initialisation.
    """
    made = []
    with generators_kept():
        for seed in (1, 2):
            seed_generators(seed)
            made.append([p for p in make().parameters() if not is_lazy(p)])
    pairs = zip(*made, strict=False)  # a random network may have other sizes each time
    return any(a.numel() > 1 and a.std() > 0 and torch.equal(a, b) for a, b in pairs)


def _try(network: nn.Module, seen: Tensor, most: list[int]) -> tuple[Tensor, ...]:
    """Try a network on observations [6, D]. ``most``: its output widths; a second is optional.

    Require that every parameter has a gradient, since a gradient step needs all gradients.
    """
    outputs = require_steady(lambda seen: _outputs(network, seen, most), seen)
    parameters = dict(network.named_parameters())
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise PartError(f"{name} requires no gradient; make it a buffer")
        if parameter.dtype != torch.float32:
            raise PartError(f"{name} is of {parameter.dtype}; make it torch.float32")
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


# ------------------------------------------------------------------------------ observations

#: Shape of an input tensor of the user's network, without the batch dimension.
Size = int | tuple[int, int, int]
#: Input of the user's network: a tensor for a single entry, else key -> tensor.
Given = Tensor | Mapping[str, Tensor]


class Unpacked(nn.Module):
    """The user's network for transports [..., D], which :func:`given` splits into entries."""

    def __init__(self, layout: Layout, network: nn.Module) -> None:
        super().__init__()
        self.layout, self.network = layout, network

    def forward(self, transports: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute the network's outputs [..., F] for every transport."""
        leading = transports.shape[:-1]
        out = self.network(given(self.layout, transports.reshape(-1, transports.shape[-1])))
        if isinstance(out, tuple):
            return tuple(each.reshape(*leading, -1) for each in out)
        return out.reshape(*leading, -1)

    def extra_repr(self) -> str:
        """Add the entries to the ``repr``, which is part of a compiled package's key."""
        return self.layout.line


def given(layout: Layout, transports: Tensor) -> Given:
    """Split transports [B, D], already normalised, into inputs of the user's network.

    Images are [B, channels, height, width] from 0 to 1, vectors [B, S], indices one-hot [B, K]. The
    mask is left out, since klrl applies it.
    """
    parts = {
        entry.key: _given(entry, transports[:, place])
        for entry, place in layout.places()
        if entry.kind != "mask"
    }
    return parts if len(parts) > 1 else next(iter(parts.values()))


def _given(entry: ObservationPart, part: Tensor) -> Tensor:
    if entry.kind == "image":
        return images_of(entry, part, entry.high)
    if entry.kind == "index":
        starts = part.new_tensor([0, *accumulate(entry.counts)][:-1], dtype=torch.int64)
        # Not len(part), which would fix the batch size of an exported policy.
        zeros = part.new_zeros(part.shape[0], sum(entry.counts), dtype=torch.float32)
        return zeros.scatter_(-1, part.long() + starts, 1.0)
    return part.float()


def given_sizes(layout: Layout) -> Size | dict[str, Size]:
    """Return the shapes of the tensors of :func:`given`, without their first dimension B."""
    sizes: dict[str, Size] = {
        entry.key: entry.pixels if entry.kind == "image" else sum(entry.counts) or entry.size
        for entry in layout.entries
        if entry.kind != "mask"
    }
    return sizes if len(sizes) > 1 else next(iter(sizes.values()))


# --------------------------------------------------------------------------------- reference

_REFERENCE = (
    "return a TorchRL actor, a network of the distribution's parameters, or a function from "
    "observation to torch distribution"
)


def own_reference(setting: str, part: OwnPart, agent: Agent) -> ProbabilisticTensorDictSequential:
    """Make an actor from the user's policy, and try it once.

    Like ``agent``'s actor, it takes the task's observations, and its distributions must have the
    same family. ``setting`` names ``part`` in messages.

    Raises:
        ConfigError: the policy fails, gives a different distribution, or depends on chance.
    """
    policy, own = _policy(setting, part, agent), agent.family.name
    if (theirs := getattr(policy, "distribution", None) or own) != own:  # of an ONNX file
        told = f"its policy is {theirs}, but this policy is {own}"
        raise ConfigError(f"{setting_text(setting, part)}: {told}; choose the same distribution")
    network = OwnReference(setting_text(setting, part), policy, agent)
    network.requires_grad_(False).eval()
    seen = agent.synthetic_observations(6)
    with config_errors(setting, part), generators_kept(), torch.no_grad():
        network.require_same_family(seen)
        require_steady(network, seen)
    module = TensorDictModule(network, ["observation"], list(agent.family.param_keys))
    return ProbabilisticTensorDictSequential(module, *list(agent.actor.module)[1:])


def _policy(setting: str, part: OwnPart, agent: Agent) -> object:
    """Return the target itself if it takes an observation, else the policy that it returns."""
    target = import_target(setting, part)
    if "observation" in arguments(setting_text(setting, part), target)[0]:
        return partial(target, **part.args)
    sizes = network_sizes(agent)
    made: object = make_own(setting, part, sizes, Callable, _REFERENCE)  # type: ignore[arg-type]
    return flat_policy(made)


class OwnReference(PolicyNet):
    """The user's policy as a network from unnormalised observations [..., D] to parameters."""

    def __init__(self, setting: str, policy: Any, like: Agent) -> None:
        nn.Module.__init__(self)
        self.setting, self.policy = setting, policy
        self.family, self.layout = like.family, like.layout
        self.normalizer, self.head = nn.Identity(), nn.Identity()  # as of a network without layers
        # Transforms find a policy's device by its first parameter; a user's function has none.
        self.place = nn.Parameter(torch.zeros(0))
        self.masked, self.outputs = like.policy_net.masked, like.policy_net.outputs
        self.inputs = like.policy_net.inputs

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

    def _evaluated(self, rows: Tensor) -> tuple[Distribution | None, dict[str, Tensor]]:
        """Call the policy with observations [B, D]; return pi_ref(.|s) and its parameters.

        A network returns the parameters alone.
        """
        seen: Any = rows.clone()  # the user's code may write to it
        seen = seen if self.layout is None else given(self.layout, seen)
        if hasattr(self.policy, "get_dist"):
            seen = seen if isinstance(seen, dict) else {self.policy.in_keys[0]: seen}
            dist = self.policy.get_dist(TensorDict(seen, rows.shape[:1]))
        else:
            dist = self.policy(seen)
        params = self._params(dist) if isinstance(dist, Distribution) else self._outputs(dist)
        wanted = (len(rows), self.outputs)
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
        return dist if isinstance(dist, Distribution) else None, params

    def _outputs(self, made: object) -> dict[str, Tensor]:
        """Name a network's outputs [B, ...] as the family's parameters."""
        keys, values = self.family.param_keys, made if isinstance(made, tuple) else (made,)
        if len(values) == len(keys) and all(isinstance(each, Tensor) for each in values):
            return dict(zip(keys, values, strict=True))
        gave = ", ".join(type(each).__name__ for each in values)
        raise PartError(f"gave {gave} for an observation, not {' and '.join(keys)}; {_REFERENCE}")

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
        if dist is None:
            return
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


def _name(dist: object) -> str:
    return type(dist.base_dist if isinstance(dist, Independent) else dist).__name__
