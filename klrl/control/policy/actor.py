"""Build actor and critic as TorchRL modules; their sizes come from the environment's specs."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.special import ndtr
from torchrl.data import Binary, Bounded, TensorSpec
from torchrl.data import Categorical as CategoricalSpec
from torchrl.data import MultiCategorical as MultiCategoricalSpec
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import TanhNormal

from klrl.config import (
    CONTROL,
    ActorConfig,
    CNNActorConfig,
    CustomActorConfig,
    GaussianActorConfig,
    factory,
)
from klrl.control.env.copies import VectorGymEnv
from klrl.control.policy.distributions import (
    Bernoulli,
    Categorical,
    Family,
    MultiCategorical,
    Normal,
    TanhNormalFamily,
)
from klrl.control.policy.networks import (
    Agent,
    ObservationNormalizer,
    PolicyNet,
    ValueNet,
    VectorNormalizer,
    mlp,
)


class PreTanhSampler(ProbabilisticTensorDictModule):
    """Sampler of a TanhNormal; it also stores the value before tanh, to compute log-probs.

    It writes ``action``, ``pre_tanh`` and ``action_log_prob``. :meth:`log_prob` reads ``pre_tanh``;
    for a batch without ``pre_tanh`` it uses TorchRL's inverse of tanh.
    """

    def __init__(self, family: TanhNormalFamily) -> None:
        super().__init__(
            in_keys=list(family.param_keys),
            out_keys=["action"],
            distribution_class=family.distribution,
            return_log_prob=True,
            default_interaction_type=InteractionType.RANDOM,
        )
        self.family = family

    @property
    def out_keys(self) -> list[Any]:
        """The keys that a forward writes."""
        return [*super().out_keys, "pre_tanh"]

    def forward(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        _requires_sample: bool = True,
    ) -> TensorDictBase:
        """Write a sample, or the median if exploration is off; then write its log-prob."""
        out = tensordict if tensordict_out is None else tensordict_out
        dist: TanhNormal = self.get_dist(tensordict)
        if _requires_sample:
            random = exploration_type() in (None, ExplorationType.RANDOM)
            u = dist.base_dist.sample() if random else dist.base_dist.mean
            out.set("pre_tanh", u)
            # Log-probs need u: rounding may put the action on a bound, outside the support.
            out.set("action", dist.transforms[0](u))
        params = {key: tensordict.get(key) for key in self.family.param_keys}
        out.set("action_log_prob", self.family.log_prob(params, out.get("pre_tanh")))
        return out

    def log_prob(self, tensordict: TensorDictBase, *, dist: Distribution | None = None) -> Tensor:
        """Compute the log-density of the batch's action, from ``pre_tanh`` if the batch has it."""
        tanh: Any = self.get_dist(tensordict) if dist is None else dist
        u = tensordict.get("pre_tanh", None)
        if u is None:
            return tanh.log_prob(tensordict.get("action"))
        return tanh.base_dist.log_prob(u) - self.family.log_slope(u)


def make_agent(
    config: ActorConfig, env: VectorGymEnv, *, normalize: bool, separate: bool, mixed: bool = False
) -> Agent:
    """Build actor and critic for an environment.

    ``normalize``: the networks normalise observations. ``separate``: the critic's gradient does not
    reach a shared trunk (``loss.separate_losses``). ``mixed``: a trunk with encoders computes in
    bfloat16 (``learner.dtype``).
    """
    how = {"normalize": normalize, "separate": separate, "mixed": mixed}
    return factory("actor", config, CONTROL)(config, env, **how)


@torch.no_grad()
def range_notes(config: ActorConfig, agent: Agent, env: VectorGymEnv) -> list[str]:
    """Return a line for the first number of an action whose range a new Gaussian does not fit.

    Over 45 % are clipped, the range is wider than 20 standard deviations, or 0 is outside.
    """
    if type(agent.family) is not Normal or config.init is not None:
        return []
    zeros = next(agent.actor.parameters()).new_zeros(1, agent.policy_net.inputs)
    mean, std = (x[0] for x in agent.policy_net(zeros))
    low, high = (torch.from_numpy(bound).to(mean) for bound in (env.low, env.high))
    width, clipped = (high - low) / std, 1 - ndtr((high - mean) / std) + ndtr((low - mean) / std)
    finite = width < 1e30  # float32's largest number often stands for infinity
    wrong = (clipped > 0.45) | (low > 0) | (high < 0) | (finite & (width > 20))
    if not (wrong := wrong & (width > 0)).any():
        return []
    i, cure = int(wrong.int().argmax()), f"choose {config.distribution_setting}=tanh_normal"
    if isinstance(config, CNNActorConfig) or not (finite & (width > 0)).all():
        cure = "rescale them by a wrapper, as in env.wrappers=[module:Wrapper]"
    return [
        f"actions: number {i} has the range {low[i]:g} to {high[i]:g}, {width[i]:.4g} standard "
        f"deviations of the first policy, and {clipped[i]:.0%} of its draws are clipped to it, "
        f"without a gradient; {cure}"
    ]


def fitting_agent(config: GaussianActorConfig, env: VectorGymEnv, **how: bool) -> Agent:
    """``actor=mlp`` and ``actor=cnn``: discrete actions get a categorical, others a Gaussian."""
    discrete = _logits_of(env.action_spec_unbatched) is not None
    return (categorical_agent if discrete else normal_agent)(config, env, **how)


def normal_agent(config: GaussianActorConfig, env: VectorGymEnv, **how: bool) -> Agent:
    """``actor=normal``; arguments as in :func:`make_agent`."""
    width = env.action_spec_unbatched.shape[-1]
    return _agent(config, env, Normal(), width, config.init_std, **how)


def tanh_normal_agent(config: GaussianActorConfig, env: VectorGymEnv, **how: bool) -> Agent:
    """``actor=tanh_normal``; arguments as in :func:`make_agent`."""
    spec = env.action_spec_unbatched
    assert isinstance(spec, Bounded)  # job_checks.py checks this
    family = TanhNormalFamily(spec.space.low, spec.space.high)
    return _agent(config, env, family, spec.shape[-1], config.init_std, **how)


def categorical_agent(config: ActorConfig, env: VectorGymEnv, **how: bool) -> Agent:
    """``actor=categorical``: one categorical or a product; arguments as in :func:`make_agent`."""
    logits = _logits_of(env.action_spec_unbatched)
    assert logits is not None  # job_checks.py checks this
    family, outputs = logits
    return _agent(config, env, family, outputs, None, **how)


def _logits_of(spec: TensorSpec) -> tuple[Family, int] | None:
    """Return family and number of logits for discrete actions; None for continuous actions."""
    if isinstance(spec, Binary):  # must precede Categorical, its base class
        bits = spec.shape[-1]
        return Bernoulli(bits), bits
    if isinstance(spec, MultiCategoricalSpec):
        counts = spec.nvec.reshape(-1).tolist()
        return MultiCategorical(counts), sum(counts)
    if isinstance(spec, CategoricalSpec):
        return Categorical(), int(spec.n)
    return None


def _agent(
    config: ActorConfig,
    env: VectorGymEnv,
    family: Family,
    outputs: int,
    init_std: float | None,
    *,
    normalize: bool,
    separate: bool,
    mixed: bool,
) -> Agent:
    """Build actor and critic for a family; ``outputs`` is the width of the policy's head."""
    layout, size = env.layout, env.observation_spec_unbatched["observation"].shape[-1]
    # Only vectors are normalised, not images, indices or masks.
    normalizer: ObservationNormalizer | None = None
    if normalize and layout is None:
        normalizer = ObservationNormalizer(size)
    elif normalize and layout is not None and layout.vectors:
        normalizer = VectorNormalizer(layout.vectors)
    policy_trunk = _trunk(config, env, mixed)
    value_trunk = policy_trunk if config.share_trunk else _trunk(config, env, mixed)
    shared: nn.Module = normalizer or nn.Identity()
    masked = 0 if layout is None else layout.masked
    policy = PolicyNet(shared, policy_trunk, outputs, init_std, masked)
    value = ValueNet(shared, value_trunk, detach_trunk=separate)
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(policy, ["observation"], list(family.param_keys)), _sampler(family)
    )
    critic = TensorDictModule(value, ["observation"], ["state_value"])
    return Agent(actor, critic, family, normalizer, layout)


def _trunk(config: ActorConfig, env: VectorGymEnv, mixed: bool) -> nn.Sequential:
    """Build the hidden layers; with a layout, the encoders of its entries come first."""
    layout, size = env.layout, env.observation_spec_unbatched["observation"].shape[-1]
    if layout is None:
        return mlp([size, *config.hidden], config.activation)
    if layout.images and isinstance(config, CustomActorConfig):
        return mlp([size, 1], config.activation)  # placeholder for the user's networks
    cnn, scale = None, None
    if isinstance(config, CNNActorConfig):
        cnn, scale = config.arch, config.scale
    from klrl.control.policy.encoders import Encoders, Mixed

    encoders = Encoders(layout, config.hidden[0], config.activation, cnn, scale)
    kind = Mixed if mixed else nn.Sequential
    return kind(encoders, *mlp([encoders.out_features, *config.hidden], config.activation))


def _sampler(family: Family) -> ProbabilisticTensorDictModule:
    if isinstance(family, TanhNormalFamily):
        return PreTanhSampler(family)
    return ProbabilisticTensorDictModule(
        in_keys=list(family.param_keys),
        out_keys=["action"],
        distribution_class=family.distribution,
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )
