"""How far two control policies are apart in the states in which one of them, or a third, acts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from klrl.control.acting import Acting, Array
from klrl.control.distributions import Family, MultiCategorical
from klrl.control.networks import PolicyNet
from klrl.control.preflight import MOST_JOINT
from klrl.kl.divergences import MEASURED

#: Draws in each state where a divergence of Gaussians has no closed form.
DRAWS = 64
#: States, and numbers of their observations, that are measured at a time.
_STATES, _NUMBERS = 2**13, 2**20

#: States [..., D] -> divergence -> [...].
Measure = Callable[[Tensor], dict[str, Tensor]]


class Watched:
    """Acts as another does, and measures in the states in which it acts."""

    def __init__(self, acting: Acting, measure: Measure, device: torch.device) -> None:
        self.begin, self.action, self._sample = acting.begin, acting.action, acting.sample
        self._measure, self._device = measure, device
        self._seen: list[Array] = []
        self._measured: list[dict[str, Array]] = []

    def sample(self, step: int, observation: Array) -> Array:
        """The other's sample at observations [N, D]."""
        self._seen.append(observation.copy())
        count = len(self._seen)
        if count * len(observation) >= _STATES or count * observation.size >= _NUMBERS:
            self._flush()
        return self._sample(step, observation)

    def episodes(self, steps: Sequence[int]) -> list[dict[str, Array]]:
        """Divergence -> [T], for the first copies, which took so many steps."""
        self._flush()
        names = self._measured[0]
        table = {name: np.concatenate([part[name] for part in self._measured]) for name in names}
        return [{name: x[:count, i] for name, x in table.items()} for i, count in enumerate(steps)]

    def _flush(self) -> None:
        if self._seen:
            states = torch.from_numpy(np.stack(self._seen)).to(self._device)
            found = self._measure(states)
            self._measured.append({name: value.cpu().numpy() for name, value in found.items()})
            self._seen = []


def measure_of(
    family: Family, policy: PolicyNet, other: PolicyNet, names: Sequence[str]
) -> Measure:
    """Divergences of two networks of one family, from their parameters in float64."""

    @torch.no_grad()
    def measure(states: Tensor) -> dict[str, Tensor]:
        p, q = (
            dict(zip(family.param_keys, (x.double() for x in net(states)), strict=True))
            for net in (policy, other)
        )
        found = {}
        for name in names:
            noise = family.divergence_noise(name, p, DRAWS)
            found[name] = family.divergence(name, p, q, noise)
        return found

    return measure


def measured_names(family: Family) -> tuple[Sequence[str], list[str]]:
    """Which divergences are measured, and a line where they are not exact, or are left out."""
    if isinstance(family, MultiCategorical) and math.prod(family.counts) > MOST_JOINT:
        many = f"{math.prod(family.counts)} joint actions, more than {MOST_JOINT}"
        return MEASURED[:2], [f"js and tv are left out: {many}"]
    note = f"js and tv by {DRAWS} draws in each state: of Gaussians they have no closed form"
    return MEASURED, [note] * ("loc" in family.param_keys)
