"""``kl=retrieve``: log-probs of two policies are retrieved, then compared.

    RetrieveLogProb(policy) -> RetrieveLogProb(reference) -> KLComputation

Three transforms in one TorchRL ``Compose``; attach it to an environment or call it on a batch.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torchrl.data import Composite, Unbounded

from klrl.kl.base import Key, NextTransform, as_key, reward_like, score, zeros_at_reset
from klrl.kl.divergence import ESTIMATORS, estimate_kl


class RetrieveLogProb(NextTransform):
    """Write the log-prob that a policy gives to the action that was taken.

    The action is never resampled. The result goes to ``("next", log_probs_full_key)``, shape
    [...], nats.

    Args:
        model: a probabilistic actor; its in-keys and its action are read from the transition.
        log_probs_full_key: where to write; default ``("log_probs", "full")``.
        detach: keep the result out of the gradient.

    Raises:
        TypeError: the model has no ``log_prob``.
        KeyError: the batch lacks one of the model's in-keys or its action.
    """

    def __init__(
        self,
        model: ProbabilisticTensorDictSequential,
        *,
        log_probs_full_key: Key | None = None,
        detach: bool = True,
    ) -> None:
        if not hasattr(model, "log_prob") or not hasattr(model, "get_dist"):
            raise TypeError(f"model={type(model).__name__}: needs get_dist and log_prob")
        self.key = as_key(log_probs_full_key or ("log_probs", "full"))
        super().__init__(in_keys=list(model.in_keys), out_keys=[self.key])
        self.model = model
        self.detach = detach

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            log_prob = score(self.model, tensordict)
        return next_tensordict.set(self.key, log_prob)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        spec = self.transform_observation_spec(self.parent.observation_spec.clone())
        return zeros_at_reset(tensordict_reset, spec, [self.key])

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the log-prob, one number per environment."""
        observation_spec[self.key] = Unbounded(
            shape=observation_spec.shape, device=observation_spec.device
        )
        return observation_spec


class KLComputation(NextTransform):
    """Compare two log-probs, and charge their KL to the reward.

    reward <- reward - coeff * KL(pi || pi_ref), with KL estimated from r = log pi - log pi_ref.

    Log-probs are looked for below "next", then at the root, shape [...]; the reward is
    [..., 1]. Writes ``("next", kl_key)`` [..., 1], without the coefficient, in nats.

    Args:
        gen_log_probs_full_key: log pi(a|s).
        ref_log_probs_full_key: log pi_ref(a|s).
        kl_key: where the KL goes.
        add_to_reward: whether the reward is charged.
        coeff: reward per nat; :attr:`coeff` may be moved later.
        estimator: k1, k2 or k3.
        raw_reward_key: where the uncharged reward is kept; None keeps none.

    Raises:
        ValueError: equal keys, or an unknown estimator.
        KeyError: a log-prob is missing.
        RuntimeError: the batch was charged already.
    """

    def __init__(
        self,
        gen_log_probs_full_key: Key = ("log_probs", "full"),
        ref_log_probs_full_key: Key = ("ref_log_probs", "full"),
        *,
        kl_key: Key = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float = 1.0,
        estimator: str = "k1",
        raw_reward_key: Key | None = None,
    ) -> None:
        self.gen_key, self.ref_key = as_key(gen_log_probs_full_key), as_key(ref_log_probs_full_key)
        if self.gen_key == self.ref_key:
            raise ValueError(f"both log-probs are read from {self.gen_key}: give two keys")
        if estimator not in ESTIMATORS:
            raise ValueError(f"estimator={estimator}: choose one of {', '.join(ESTIMATORS)}")
        self.kl_key, self.raw_key = as_key(kl_key), raw_reward_key and as_key(raw_reward_key)
        new_keys = [key for key in (self.kl_key, self.raw_key) if key is not None]
        super().__init__(in_keys=[self.gen_key, self.ref_key], out_keys=[*new_keys, "reward"])
        self.new_keys = new_keys
        self.add_to_reward = add_to_reward
        self.estimator = estimator
        self.register_buffer("coeff", torch.as_tensor(coeff, dtype=torch.float64))

    coeff: Tensor

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        reward_key = self.parent.reward_key if self.parent is not None else "reward"
        reward = next_tensordict.get(reward_key)
        log_prob = _either(next_tensordict, tensordict, self.gen_key)
        ref_log_prob = _either(next_tensordict, tensordict, self.ref_key)
        kl = estimate_kl(log_prob, ref_log_prob, self.estimator).view_as(reward)
        refuse_second_charge(next_tensordict, self.raw_key)
        next_tensordict.set(self.kl_key, kl)
        if self.raw_key is not None:
            next_tensordict.set(self.raw_key, reward)
        if self.add_to_reward:
            next_tensordict.set(reward_key, reward - self.coeff * kl)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        spec = self.transform_observation_spec(self.parent.observation_spec.clone())
        return zeros_at_reset(tensordict_reset, spec, self.new_keys)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the KL and the raw reward, shaped like the reward."""
        for key in self.new_keys:
            observation_spec[key] = reward_like(self.parent)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """A charged reward has no bounds."""
        if self.add_to_reward:
            reward_spec[self.parent.reward_key] = reward_like(self.parent)
        return reward_spec


def _either(first: TensorDictBase, second: TensorDictBase, key: Key) -> Tensor:
    for tensordict in (first, second):
        value = tensordict.get(key, None)
        if value is not None:
            return value
    raise KeyError(f"no log-probs at {('next', key)} nor at {key}: put RetrieveLogProb before")


def refuse_second_charge(next_tensordict: TensorDictBase, raw_key: Key | None) -> None:
    """A reward may be charged once: its raw value is the sign that it was."""
    if raw_key is not None and raw_key in next_tensordict.keys(include_nested=True):
        raise RuntimeError(f"the KL was charged to this reward already: it holds {raw_key}")
