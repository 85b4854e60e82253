"""Action distributions as pure functions of their parameters.

The learner evaluates and differentiates these functions thousands of times per second; building
``torch.distributions`` objects would cost more than the arithmetic. Tests compare every function
with the matching torch or TorchRL distribution.

A *family* works on two kinds of entries of a batch. The *parameters* are the tensors that the
policy writes under :attr:`Family.param_keys`. The *sample* is the entry :attr:`Family.sample_key`:
the action, or the value before tanh. Log-probs, entropies and KLs are in nats, one number per step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent
from torch.nn.functional import pad, softplus
from torchrl.modules import IndependentNormal, TanhNormal

from klrl.kl.divergences import (
    Which,
    js_draws,
    over_actions,
    require_known,
    standard_error,
    tv_draws,
)

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)

#: The logit of an excluded action. Its probability is exactly 0 in float32 and float64, but its
#: log-probability is finite, so that 0 log 0 is 0 in every sum and every gradient.
EXCLUDED = -1e9

Params = Mapping[str, Tensor]


class Family(ABC):
    """Base class of distribution families.

    By default, entropy and divergences need no noise, and the sample is the action.
    """

    name: str
    param_keys: tuple[str, ...]
    sample_key = "action"

    def to(self, device: torch.device) -> None:
        """Move tensors of the family to a device, if :meth:`log_prob` reads any."""
        return  # most families have none

    def acting_on(self, device: torch.device) -> Family:
        """Return the family with what :meth:`action` reads on a device."""
        return self

    @abstractmethod
    def log_prob(self, params: Params, sample: Tensor) -> Tensor:
        """Log-density of the action that ``sample`` stands for, shape [...]."""

    @abstractmethod
    def kl(self, p: Params, q: Params) -> Tensor:
        """KL(p || q) in closed form, shape [...]."""

    def dimensions(self, params: Params) -> int:
        """The number of independent dimensions of an action; a KL is a sum over them."""
        return params["loc"].shape[-1]

    @abstractmethod
    def divergence(self, name: Which, p: Params, q: Params, noise: Tensor | None = None) -> Tensor:
        """The divergence ``name`` of p and q, [...]; ``noise`` is from :meth:`divergence_noise`."""

    def divergence_noise(self, name: Which, params: Params, samples: int) -> Tensor | None:
        """Draw noise for :meth:`divergence`, [..., samples, A]; None if it needs no noise."""
        return None

    def divergence_error(self, p: Params, q: Params, noise: Tensor, name: Which = "js") -> Tensor:
        """Standard error of a :meth:`divergence` that is estimated from noise, shape [...]."""
        raise NotImplementedError(f"{self.name} samples no divergence")

    @abstractmethod
    def entropy(self, params: Params, noise: Tensor | None = None) -> Tensor:
        """Entropy, shape [...]; estimated from ``noise`` if it has no closed form."""

    def entropy_noise(self, params: Params, samples: int) -> Tensor | None:
        """Draw noise for :meth:`entropy`, [..., samples, A]; None if it needs no noise."""
        return None

    @abstractmethod
    def act_noise(self, shape: tuple[int, ...], width: int) -> Tensor:
        """Draw noise [*shape, width] for :meth:`act`."""

    @abstractmethod
    def act(self, params: Params, noise: Tensor) -> Tensor:
        """Map noise and parameters to a sample of the distribution."""

    def action(self, sample: Tensor) -> Tensor:
        """Convert a sample to the action."""
        return sample

    @abstractmethod
    def sample(self, params: Params, samples: int) -> Tensor:
        """Draw samples without gradient, shape [samples, ...]."""

    @abstractmethod
    def distribution(self, **params: Tensor) -> Distribution:
        """The torch distribution over actions."""


class Normal(Family):
    """Independent Gaussians, summed over the action's last dimension.

    Parameters ``loc`` (mu) and ``scale`` (sigma) [..., A]; the sample is the action a.
    """

    name = "normal"
    param_keys: tuple[str, ...] = ("loc", "scale")

    def log_prob(self, params: Params, sample: Tensor) -> Tensor:
        """sum_i -(a_i - mu_i)^2 / (2 sigma_i^2) - log sigma_i - log(2 pi) / 2."""
        z = (sample - params["loc"]) / params["scale"]
        # log sigma + z^2 / 2 in one operation, since each call costs more than its arithmetic.
        cost = torch.addcmul(params["scale"].log(), z, z, value=0.5).sum(-1)
        return -_HALF_LOG_2PI * z.shape[-1] - cost

    def kl(self, p: Params, q: Params) -> Tensor:
        """sum_i log(sq/sp) + (sp^2 + (mp - mq)^2) / (2 sq^2) - 1/2, with loc m and scale s."""
        ratio = p["scale"] / q["scale"]
        variance_ratio = ratio * ratio
        shift = (p["loc"] - q["loc"]) / q["scale"]
        spread = (variance_ratio - 1) - variance_ratio.log()
        return 0.5 * torch.addcmul(spread, shift, shift).sum(-1)

    def divergence(self, name: Which, p: Params, q: Params, noise: Tensor | None = None) -> Tensor:
        """A KL in closed form; js, tv or the user's function as a mean over draws."""
        if name == "reverse":
            return self.kl(p, q)
        if name == "forward":
            return self.kl(q, p)
        if isinstance(name, str):
            require_known(name)
        assert noise is not None, "no closed form: give divergence_noise(...)"
        return self._draws(name, p, q, noise).mean(-1)

    def divergence_noise(self, name: Which, params: Params, samples: int) -> Tensor | None:
        """Standard normals [..., samples, A] for js, tv and the user's function; else None."""
        return None if name in ("reverse", "forward") else _normals(params, samples)

    def divergence_error(self, p: Params, q: Params, noise: Tensor, name: Which = "js") -> Tensor:
        """Standard error of the mean over draws; the pairs of draws are independent."""
        return standard_error(self._draws(name, p, q, noise))

    def _draws(self, name: Which, p: Params, q: Params, noise: Tensor) -> Tensor:
        """Estimates [..., samples], each from a draw of p and a draw of q with the same noise."""
        p, q = ({key: value.unsqueeze(-2) for key, value in x.items()} for x in (p, q))
        at_p, at_q = (
            Normal.log_prob(self, p, draw) - Normal.log_prob(self, q, draw)
            for draw in (Normal.act(self, p, noise), Normal.act(self, q, noise))
        )
        if not isinstance(name, str):
            return name(at_p)
        return tv_draws(at_p, at_q) if name == "tv" else js_draws(at_p, at_q)

    def entropy(self, params: Params, noise: Tensor | None = None) -> Tensor:
        """sum_i 1/2 + log(2 pi) / 2 + log sigma_i."""
        return (0.5 + _HALF_LOG_2PI + params["scale"].log()).sum(-1)

    def act_noise(self, shape: tuple[int, ...], width: int) -> Tensor:
        """Standard normals [*shape, A]."""
        return torch.randn(*shape, width)

    def act(self, params: Params, noise: Tensor) -> Tensor:
        """The sample mu + sigma * noise."""
        return params["loc"] + params["scale"] * noise

    def sample(self, params: Params, samples: int) -> Tensor:
        """Draw samples of the Gaussian, shape [samples, ..., A]."""
        shape = (samples, *params["loc"].shape)
        noise = torch.randn(shape, dtype=params["loc"].dtype, device=params["loc"].device)
        return (params["loc"] + params["scale"] * noise).detach()

    def distribution(self, **params: Tensor) -> Distribution:
        """TorchRL's IndependentNormal."""
        return IndependentNormal(**params)


class TanhNormalFamily(Normal):
    """A Gaussian u, squashed: a = low + (high - low) (tanh(u) + 1) / 2, with bounds [A].

    The sample is u [..., A], the entry ``pre_tanh``. Recovering u from a saturated action would
    clamp u and change the log-prob (6.7 nats, not 16.4, at u = loc = 9, scale 0.5, bounds +-1).
    """

    name = "tanh_normal"
    sample_key = "pre_tanh"

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low, high  # on the CPU, like the actions
        self.half_width = 0.5 * (high - low)

    def to(self, device: torch.device) -> None:
        """Move ``half_width``, since a CUDA graph cannot read from the CPU."""
        self.half_width = self.half_width.to(device)

    def acting_on(self, device: torch.device) -> Family:
        """Return the family with its bounds on a device, since a copy in each step would wait."""
        return TanhNormalFamily(self.low.to(device), self.high.to(device))

    def log_prob(self, params: Params, sample: Tensor) -> Tensor:
        """Log N(u; loc, scale) - log |da/du|."""
        return super().log_prob(params, sample) - self.log_slope(sample)

    def log_slope(self, u: Tensor) -> Tensor:
        """Log |da/du| = sum_i log((high - low)/2) + 2 (log 2 - u - softplus(-2u)), shape [...]."""
        half_width = self.half_width.to(u)
        return (half_width.log() + 2 * (math.log(2) - u - softplus(-2 * u))).sum(-1)

    def entropy(self, params: Params, noise: Tensor | None = None) -> Tensor:
        """H(u) + E[log |da/du|]; the expectation is a mean over reparametrised draws of u."""
        assert noise is not None, "no closed form: give entropy_noise(...)"
        loc, scale = params["loc"].unsqueeze(-2), params["scale"].unsqueeze(-2)
        slope = self.log_slope(loc + scale * noise).mean(-1)
        return super().entropy(params) + slope

    def entropy_noise(self, params: Params, samples: int) -> Tensor | None:
        """Standard normals [..., samples, A]."""
        return _normals(params, samples)

    def action(self, sample: Tensor) -> Tensor:
        """The action low + (high - low) (tanh(u) + 1) / 2."""
        half_width, low = 0.5 * (self.high - self.low).to(sample), self.low.to(sample)
        return low + half_width * (sample.tanh() + 1)

    # Normal's divergences are inherited: the same bijection of p and q does not change them.

    def distribution(self, **params: Tensor) -> Distribution:
        """TorchRL's TanhNormal with the action's bounds."""
        return TanhNormal(
            **params, low=self.low.to(params["loc"]), high=self.high.to(params["loc"]), event_dims=1
        )


class Categorical(Family):
    """One of K actions; parameter ``logits`` [..., K], sample int64 [...]."""

    name = "categorical"
    param_keys: tuple[str, ...] = ("logits",)

    def dimensions(self, params: Params) -> int:
        """1, since an action is a single choice."""
        return 1

    def log_prob(self, params: Params, sample: Tensor) -> Tensor:
        """Log softmax(logits)[a]; ``sample`` may have more leading dimensions than the logits."""
        log_p = _log_p(params)
        log_p = log_p.expand(*sample.shape, log_p.shape[-1])
        return log_p.gather(-1, sample.unsqueeze(-1)).squeeze(-1)

    def kl(self, p: Params, q: Params) -> Tensor:
        """sum_a p(a) (log p(a) - log q(a))."""
        return over_actions("reverse", _log_p(p), _log_p(q))

    def divergence(self, name: Which, p: Params, q: Params, noise: Tensor | None = None) -> Tensor:
        """Any divergence, as a sum over the actions."""
        return over_actions(name, _log_p(p), _log_p(q))

    def entropy(self, params: Params, noise: Tensor | None = None) -> Tensor:
        """-sum_a p(a) log p(a)."""
        log_p = _log_p(params)
        return -(log_p.exp() * log_p).sum(-1)

    def act_noise(self, shape: tuple[int, ...], width: int) -> Tensor:
        """Standard Gumbel variables [*shape, K]."""
        return -torch.empty(*shape, width).exponential_().log()

    def act(self, params: Params, noise: Tensor) -> Tensor:
        """Argmax_a logits(a) + Gumbel noise, a draw of softmax(logits) (Maddison et al. 2014)."""
        return (params["logits"] + noise).argmax(-1)

    def sample(self, params: Params, samples: int) -> Tensor:
        """Draw actions, shape [samples, ...]."""
        return torch.distributions.Categorical(logits=params["logits"].detach()).sample((samples,))

    def distribution(self, **params: Tensor) -> Distribution:
        """Torch's Categorical."""
        return torch.distributions.Categorical(logits=params["logits"])


class MultiCategorical(Categorical):
    """Independent categoricals of K_i actions: log-probs, entropies and KLs are sums over them.

    Parameter ``logits`` [..., K_1 + ... + K_M], concatenated; sample int64 [..., M].
    """

    name = "multi_categorical"

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)

    def dimensions(self, params: Params) -> int:
        """The number of categoricals."""
        return len(self.counts)

    def factors(self, params: Params) -> Tensor:
        """The logits of each categorical, [..., M, max K]; padded with excluded actions."""
        widest = max(self.counts)
        parts = params["logits"].split(self.counts, -1)
        filled = [pad(part, (0, widest - part.shape[-1]), value=EXCLUDED) for part in parts]
        return torch.stack(filled, -2)

    def log_prob(self, params: Params, sample: Tensor) -> Tensor:
        """sum_i log softmax(logits_i)[a_i]."""
        return super().log_prob(self._each(params), sample).sum(-1)

    def kl(self, p: Params, q: Params) -> Tensor:
        """sum_i KL(p_i || q_i), since the categoricals are independent."""
        return super().kl(self._each(p), self._each(q)).sum(-1)

    def divergence(self, name: Which, p: Params, q: Params, noise: Tensor | None = None) -> Tensor:
        """A KL as a sum over the categoricals, others as a sum over all joint actions."""
        if name in ("reverse", "forward"):
            return self.kl(p, q) if name == "reverse" else self.kl(q, p)
        return over_actions(name, self._joint(p), self._joint(q))

    def entropy(self, params: Params, noise: Tensor | None = None) -> Tensor:
        """sum_i -sum_a p_i(a) log p_i(a)."""
        return super().entropy(self._each(params)).sum(-1)

    def act(self, params: Params, noise: Tensor) -> Tensor:
        """Argmax of logits + Gumbel noise, for each categorical."""
        return self.factors({"logits": params["logits"] + noise}).argmax(-1)

    def sample(self, params: Params, samples: int) -> Tensor:
        """Draw actions, shape [samples, ..., M]."""
        return super().sample(self._each(params), samples)

    def distribution(self, **params: Tensor) -> Distribution:
        """Torch's Independent of Categoricals."""
        return Independent(super().distribution(**self._each(params)), 1)

    def _each(self, params: Params) -> dict[str, Tensor]:
        return {"logits": self.factors(params)}

    def _joint(self, params: Params) -> Tensor:
        """log p of every joint action, [..., K_1 K_2 ... K_M]."""
        log_p = _log_p(self._each(params)).unbind(-2)
        parts = (part[..., :count] for part, count in zip(log_p, self.counts, strict=True))
        return reduce(lambda a, b: (a.unsqueeze(-1) + b.unsqueeze(-2)).flatten(-2), parts)


class Bernoulli(MultiCategorical):
    """Independent bits: ``logits`` [..., A] are the log-odds of 1; the sample is int64 [..., A]."""

    name = "bernoulli"

    def __init__(self, bits: int) -> None:
        super().__init__((2,) * bits)

    def factors(self, params: Params) -> Tensor:
        """Each bit with logit l as a categorical with logits 0 and l, [..., A, 2]."""
        one = params["logits"]
        return torch.stack([torch.zeros_like(one), one], -1)

    def act_noise(self, shape: tuple[int, ...], width: int) -> Tensor:
        """Standard logistic variables [*shape, A]."""
        return torch.rand(*shape, width).clamp(min=torch.finfo(torch.float32).tiny).logit()

    def act(self, params: Params, noise: Tensor) -> Tensor:
        """1 where logit + noise > 0, which has probability sigmoid(logit)."""
        return (params["logits"] + noise > 0).long()


def _normals(params: Params, samples: int) -> Tensor:
    """Standard normals [..., samples, A] from the CPU's generator, the same on every device."""
    loc = params["loc"]
    shape = (*loc.shape[:-1], samples, loc.shape[-1])
    return torch.randn(shape, dtype=loc.dtype).to(loc.device)


def _log_p(params: Params) -> Tensor:
    return params["logits"].log_softmax(-1)
