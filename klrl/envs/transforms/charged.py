"""The charge that the transforms for actions share: reward <- reward - coef * KL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite

from klrl.envs.transforms.base import NextTransform, one_key, refuse_second_charge, reward_like
from klrl.envs.transforms.sampled import check_on_unsampled
from klrl.kl.charge import shaped
from klrl.kl.coefficient import KeepsCoefficient, one_spelling
from klrl.kl.policies import Key, as_key


class ChargedReward(KeepsCoefficient, NextTransform):
    """The charge of the control transforms: reward <- reward - coef * KL.

    Arguments as :class:`~klrl.kl.KLRewardTransform`; ``reads``: further keys that a subclass reads.
    """

    def __init__(
        self,
        coef: float | Tensor,
        in_keys: Key | Sequence[Key] | None,
        out_keys: Key | Sequence[Key] | None,
        raw_reward_key: Key | None,
        reads: Sequence[Key],
        coeff: float | Tensor | None = None,
        *,
        on_unsampled: str = "nan",
    ) -> None:
        self.on_unsampled = check_on_unsampled(on_unsampled)
        self.reward_key = one_key("in_keys", "reward" if in_keys is None else in_keys)
        self.out_key = one_key("out_keys", self.reward_key if out_keys is None else out_keys)
        self.raw_key = raw_reward_key and as_key(raw_reward_key)
        super().__init__(in_keys=[self.reward_key, *reads], out_keys=[self.out_key])
        self.written = [key for key in (self.out_key, self.raw_key) if key is not None]
        self.keep_coefficient(one_spelling(coef, coeff))

    coef: Tensor

    def charge(self, next_tensordict: TensorDictBase, reward: Tensor, kl: Tensor) -> TensorDictBase:
        """Write the charged reward, and the one that was read where it is kept; all [..., 1]."""
        refuse_second_charge(next_tensordict, self.raw_key)
        if self.raw_key is not None:
            next_tensordict.set(self.raw_key, reward)
        charged = shaped(reward, kl, self.coef)
        if self.on_unsampled == "skip":
            charged = torch.where(kl.isnan(), reward, charged)
        return next_tensordict.set(self.out_key, charged)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """The charged reward replaces the reward, or is a new observation next to it."""
        parent, observation_spec = self.parent, output_spec["full_observation_spec"]
        charged = reward_like(parent, self.reward_key)
        if self.out_key in parent.reward_keys:
            output_spec["full_reward_spec"][self.out_key] = charged
        else:
            observation_spec[self.out_key] = charged
        if self.raw_key is not None:
            observation_spec[self.raw_key] = charged.clone()
        return output_spec
