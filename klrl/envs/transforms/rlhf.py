"""``kl=legacy``: TorchRL's former control transform, which charges the sampled log-ratio.

TorchRL documented it from 0.6 to 0.10 and removed it in 0.11. TorchRL's documentation subtracted
the KL, but its code added it. klrl subtracts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torchrl.data import Composite

from klrl.envs.transforms.base import log_prob_like, reward_like, reward_of
from klrl.envs.transforms.sampled import ChargedReward, sampled_log_prob
from klrl.kl.estimators import k1
from klrl.kl.policies import Key, as_key, log_prob_keys, require_reference, score, under_keys_of
from klrl.kl.reference import FrozenPolicy, flat_policy
from klrl.kl.shapes import like_reward


class KLRewardTransform(ChargedReward):
    """reward <- reward - coef * (log pi(a|s) - log pi_0(a|s)), pi_0 a frozen copy of the actor.

    The policy writes log pi into the data when it samples. The transform reads log pi, and computes
    log pi_0 of the same action. Shapes: log-probs [...], reward [..., 1], per agent or per team.
    Log-probs are in nats.

    Args:
        actor: a probabilistic actor with ``get_dist`` and parameters; copied, unless it is a
            :class:`~klrl.kl.reference.FrozenPolicy`.
        coef: reward per nat; :attr:`coef` may be changed later.
        in_keys: the key of the reward to read, or a list of one key. Default ``reward``.
        out_keys: the key of the reward to write; default ``in_keys``.
        requires_grad: whether the copy's parameters require gradients; the transform then lists
            them as its parameters.
        action_key: the key of the action; default the actor's.
        kl_key: where to write the KL without coef, [..., 1]; None: nowhere.
        ref_log_prob_key: where to write log pi_0; None: nowhere.
        raw_reward_key: where to keep the uncharged reward; None: nowhere.
        coeff: alias of ``coef``.

    Raises:
        ValueError: several in- or out-keys; a coefficient that is no number >= 0; an actor that is
            recurrent, has no parameters or no log-probs, or has a buffer that requires gradients;
            shapes of log-probs and rewards that contradict :mod:`klrl.kl.shapes`.
        TypeError: an actor without ``get_dist``.
        RuntimeError: the batch was charged already (its raw reward exists); or the log-prob did
            not reach a worker of a ParallelEnv.
    """

    DEFAULT_IN_KEYS: ClassVar[list[Key]] = ["reward"]

    def __init__(
        self,
        actor: ProbabilisticTensorDictSequential,
        coef: float | Tensor = 1.0,
        in_keys: Key | Sequence[Key] | None = None,
        out_keys: Key | Sequence[Key] | None = None,
        requires_grad: bool = False,
        *,
        action_key: Key | None = None,
        kl_key: Key | None = None,
        ref_log_prob_key: Key | None = None,
        raw_reward_key: Key | None = None,
        coeff: float | Tensor | None = None,
    ) -> None:
        if not hasattr(actor, "get_dist"):
            raise TypeError(f"actor={type(actor).__name__}: needs get_dist, to score an action")
        actor = flat_policy(actor)
        if next(actor.parameters(), None) is None:
            raise ValueError(f"actor={type(actor).__name__}: has no parameters to copy")
        require_reference("actor", actor)
        trained = [name for name, buffer in actor.named_buffers() if buffer.requires_grad]
        if trained:
            raise ValueError(f"actor's buffer {trained[0]} requires gradients: make it a parameter")
        super().__init__(coef, in_keys, out_keys, raw_reward_key, actor.in_keys, coeff)
        self.reference = FrozenPolicy.copy_of(actor, requires_grad=requires_grad)
        self.requires_grad = requires_grad
        self.action_key = as_key(action_key or actor.dist_sample_keys[0])
        self.log_prob_keys = log_prob_keys(actor)
        self.kl_key, self.ref_log_prob_key = kl_key, ref_log_prob_key
        self.written += [key for key in (kl_key, ref_log_prob_key) if key is not None]

    @property
    def sample_log_prob_key(self) -> Key:
        """The key of the policy's log-prob; with several heads, that of the first head."""
        return self.log_prob_keys[0]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch of transitions, in place; a batch without an action is unchanged."""
        if tensordict.get(self.action_key, None) is None:
            return tensordict
        return super().forward(tensordict)

    @property
    def frozen_params(self) -> TensorDict:
        """The reference's parameters and buffers, under their name in TorchRL's transform."""
        return self.reference.frozen_params

    @property
    def functional_actor(self) -> nn.Module:
        """The reference's module, under its name in TorchRL's transform."""
        return self.reference.module

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        reward = reward_of(next_tensordict, self.reward_key)
        keys = [self.action_key, *self.reference.dist_sample_keys[1:]]
        tensordict = under_keys_of(self.reference, tensordict, keys)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad):
            ref_log_prob = score(self.reference, tensordict)
        name = "the reference's log-prob"
        ref_log_prob = like_reward(name, ref_log_prob, reward, tensordict.ndim)
        # Use distribution parameters in the data only if the reference has the same action key.
        same = self.action_key == self.reference.dist_sample_keys[0]
        scorer = self.reference if same else None
        log_prob = sampled_log_prob(tensordict, self.log_prob_keys, reward, scorer)
        kl = k1(log_prob - ref_log_prob).view_as(reward)
        next_tensordict = self.charge(next_tensordict, reward, kl)
        for key, value in ((self.kl_key, kl), (self.ref_log_prob_key, ref_log_prob)):
            if key is not None:
                next_tensordict.set(key, value)
        return next_tensordict

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Add the charged reward (or replace the reward by it), the KL and log pi_0."""
        output_spec = super().transform_output_spec(output_spec)
        observation_spec = output_spec["full_observation_spec"]
        if self.kl_key is not None:
            observation_spec[self.kl_key] = reward_like(self.parent, self.reward_key)
        if self.ref_log_prob_key is not None:
            observation_spec[self.ref_log_prob_key] = log_prob_like(
                observation_spec, self.parent, self.reward_key
            )
        return output_spec
