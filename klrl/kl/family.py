"""What a distribution of actions offers: a Protocol, so that KLs and losses know no domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor
from torch.distributions import Distribution

Params = Mapping[str, Tensor]


class Family(Protocol):
    """What a distribution family must offer; add one here and a choice in ``actor.py``."""

    name: str
    param_keys: tuple[str, ...]
    sample_key: str

    def log_prob(self, params: Params, sample: Tensor) -> Tensor:
        """Log-density of the action behind ``sample``, shape [...]."""

    def kl(self, p: Params, q: Params) -> Tensor:
        """KL(p || q) in closed form, shape [...]."""

    def entropy(self, params: Params, noise: Tensor | None = None) -> Tensor:
        """Entropy, shape [...]; ``noise`` only where there is no closed form."""

    def entropy_noise(self, params: Params, samples: int) -> Tensor | None:
        """What :meth:`entropy` needs drawn, [..., samples, A]; None for a closed form."""

    def act_noise(self, shape: tuple[int, ...], width: int) -> Tensor:
        """What :meth:`act` needs drawn, one row [width] for each entry of ``shape``."""

    def act(self, params: Params, noise: Tensor) -> Tensor:
        """The sample that noise gives under these parameters; a draw of the distribution."""

    def action(self, sample: Tensor) -> Tensor:
        """The action behind a sample."""

    def sample(self, params: Params, samples: int) -> Tensor:
        """Draws without gradient, shape [samples, ...]."""

    def distribution(self, **params: Tensor) -> Distribution:
        """The torch distribution over actions."""
