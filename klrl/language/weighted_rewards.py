"""Several reward functions, added up with weights; their parts keep their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from klrl.base.errors import RewardError
from klrl.language.prompts import Prompt
from klrl.language.rewards import Drawn, Reward


class WeightedRewards:
    """The sum of weight * reward over the functions of ``env.reward``.

    Args:
        names: of the functions.
        weights: ``env.reward_weights``; None for 1 each.
        timeout: seconds that a call of one may take; None for no limit.
    """

    def __init__(
        self, names: Sequence[str], weights: Sequence[float] | None, timeout: float | None
    ) -> None:
        rewards = [Reward(name, timeout) for name in names]
        self._rewards = dict(zip(labels(names), rewards, strict=True))
        self._weights = [1.0] * len(names) if weights is None else list(weights)

    def prepare(self, chat: bool = False) -> None:
        """What :meth:`Reward.prepare` does, for each."""
        for reward in self._rewards.values():
            reward.prepare(chat)

    def columns_read(self) -> set[str]:
        """:meth:`Reward.columns_read` of all."""
        return set().union(*(reward.columns_read() for reward in self._rewards.values()))

    def parts(
        self, prompts: Sequence[Prompt], responses: Sequence[str], drawn: Drawn | None = None
    ) -> dict[str, Tensor]:
        """Each function's scores [B] by its label, unweighted; arguments as of :class:`Reward`."""
        return {label: reward(prompts, responses, drawn) for label, reward in self._rewards.items()}

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The scores [B]: the weighted sum of :meth:`parts`."""
        weighted = zip(self._weights, parts.values(), strict=True)
        scores = torch.stack([weight * part for weight, part in weighted]).sum(0)
        if not scores.isfinite().all():
            index = int((~scores.isfinite()).nonzero()[0, 0])
            raise RewardError(
                f"env.reward_weights={self._weights}: the weighted sum of sample {index} of "
                f"{len(scores)} is {float(scores[index]):g}; give smaller weights"
            )
        return scores

    def __call__(
        self, prompts: Sequence[Prompt], responses: Sequence[str], drawn: Drawn | None = None
    ) -> Tensor:
        """The scores [B]; arguments and errors as of :meth:`parts`."""
        return self.total(self.parts(prompts, responses, drawn))


def labels(names: Sequence[str]) -> list[str]:
    """Short names: a function's, a folder's; with its module where two are the same."""
    short = [Path(name.partition(":")[2] or name).name for name in names]
    count = Counter(short)
    return [
        each if count[each] == 1 else name.replace(":", ".")
        for each, name in zip(short, names, strict=True)
    ]
