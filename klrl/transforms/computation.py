"""From two log-probs to a KL and a charged reward: per action, or per token."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite, Unbounded

from klrl.kl.charge import shaped
from klrl.kl.estimators import ESTIMATORS, estimate_kl
from klrl.kl.policies import Key, as_key
from klrl.transforms import charge as _charge
from klrl.transforms import language as _language
from klrl.transforms.base import (
    NextTransform,
    refuse_second_charge,
    reward_like,
    reward_of,
    zeros_at_reset,
)
from klrl.transforms.rows import check_side, either, for_rows, is_ragged, set_rows


class KLComputation(NextTransform):
    """Compare two log-probs, and charge their KL to the reward.

    reward <- reward - coeff * KL(pi || pi_ref), with KL estimated from r = log pi - log pi_ref.

    Log-probs are read below "next", else at the root. The KL goes to ``("next", kl_key)``, in nats
    and without the coefficient.

    - One action per step: log-probs [...], the batch's shape; reward and KL [..., 1].
    - Tokens: log-probs and KL [B, T], dense or nested; the charged reward is per token, [B, T, 1].
      A scalar score goes to the last charged token. The charged tokens are those that
      ``RetrieveLogProb`` marked, else ("masks", "all_assistant_mask"), else the attention mask
      minus the prompt; all others have KL 0. A missing reward counts as 0.

    Args:
        gen_log_probs_full_key: log pi(a|s).
        ref_log_probs_full_key: log pi_ref(a|s).
        kl_key: where the KL goes.
        add_to_reward: whether the reward is charged.
        coeff: reward per nat; :attr:`coeff` may be moved later.
        padding_side: tokens: where a dense reward per token is padded, if its log-probs are nested.
        estimator: k1, k2 or k3.
        raw_reward_key: where the uncharged reward is kept; None keeps none.
        reward_key: the reward; None for the environment's, or ``reward`` on a bare batch.

    Raises:
        ValueError: equal keys, an unknown estimator; log-probs, masks and rewards that do not fit
            each other; log-probs of tokens under a key that does not end in "full".
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
        padding_side: str = "left",
        estimator: str = "k1",
        raw_reward_key: Key | None = None,
        reward_key: Key | None = None,
    ) -> None:
        self._reward_key = reward_key and as_key(reward_key)
        self.gen_key, self.ref_key = as_key(gen_log_probs_full_key), as_key(ref_log_probs_full_key)
        if self.gen_key == self.ref_key:
            raise ValueError(f"both log-probs are read from {self.gen_key}: give two keys")
        if estimator not in ESTIMATORS:
            raise ValueError(f"estimator={estimator}: choose one of {', '.join(ESTIMATORS)}")
        self.kl_key, self.raw_key = as_key(kl_key), raw_reward_key and as_key(raw_reward_key)
        new_keys = [key for key in (self.kl_key, self.raw_key) if key is not None]
        super().__init__(
            in_keys=[self.gen_key, self.ref_key], out_keys=[*new_keys, self._reward_key or "reward"]
        )
        self.new_keys = new_keys
        self.add_to_reward = add_to_reward
        self.padding_side = check_side(padding_side)
        self.estimator = estimator
        self.register_buffer("coeff", torch.as_tensor(coeff, dtype=torch.float64))

    coeff: Tensor

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch, in place; log-probs of tokens may be at the root, without "next"."""
        if tensordict.get("next", None) is None:
            log_prob = either(tensordict, tensordict, self.gen_key)
            if log_prob is not None and _per_token(log_prob, tensordict):
                return self._step(tensordict, tensordict)
        return super().forward(tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        log_prob, ref_log_prob = (
            self._log_prob(tensordict, next_tensordict, key) for key in (self.gen_key, self.ref_key)
        )
        refuse_second_charge(next_tensordict, self.raw_key)
        if _per_token(log_prob, tensordict):
            return self._charge_tokens(tensordict, next_tensordict, log_prob, ref_log_prob)
        reward = reward_of(next_tensordict, self.reward_key)
        kl = estimate_kl(log_prob, ref_log_prob, self.estimator).view_as(reward)
        next_tensordict.set(self.kl_key, kl)
        if self.raw_key is not None:
            next_tensordict.set(self.raw_key, reward)
        if self.add_to_reward:
            next_tensordict.set(self.reward_key, shaped(reward, kl, self.coeff))
        return next_tensordict

    def _charge_tokens(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, gen: Any, ref: Any
    ) -> TensorDictBase:
        for key, name in ((self.gen_key, "gen"), (self.ref_key, "ref")):
            _language.full_key(key, f"{name}_log_probs_full_key")
        ragged = is_ragged(gen)
        rows = _charge.matching_rows(gen, ref, self.gen_key, self.ref_key)
        masks = _charge.charged_tokens(
            tensordict, next_tensordict, rows[0], [self.gen_key, self.ref_key]
        )
        kl = _charge.token_kl(*rows, masks, self.estimator)
        reward = either(next_tensordict, next_tensordict, self.reward_key)
        next_tensordict = for_rows(next_tensordict, ragged, self)
        set_rows(next_tensordict, self.kl_key, kl, ragged)
        if self.raw_key is not None and reward is not None:
            next_tensordict.set(self.raw_key, next_tensordict.get(self.reward_key))
        if self.add_to_reward:
            rewards = _charge.token_rewards(reward, kl, masks, self.padding_side)
            charged = _charge.shaped_rows(rewards, kl, self.coeff)
            set_rows(next_tensordict, self.reward_key, charged, ragged)
        return next_tensordict

    def _log_prob(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, key: Key
    ) -> Any:
        log_prob = either(next_tensordict, tensordict, key)
        if log_prob is None:
            raise KeyError(
                f"no log-probs at {('next', key)} nor at {key}: put RetrieveLogProb before"
            )
        return log_prob

    @property
    def reward_key(self) -> Key:
        """The environment's reward key; "reward" without an environment, or where it has none."""
        if self._reward_key is not None:
            return self._reward_key
        keys = self.parent.reward_keys if self.parent is not None else []
        return keys[0] if keys else "reward"

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        spec = self.transform_observation_spec(self.parent.observation_spec.clone())
        return zeros_at_reset(tensordict_reset, spec, self.new_keys)

    def _in_language_env(self) -> bool:
        """Whether log-probs are per token: by their spec, else by the environment's kind."""
        parent = self.parent
        spec = parent.full_observation_spec
        if self.gen_key in spec.keys(include_nested=True):
            return spec[self.gen_key].ndim > len(parent.batch_size)
        return hasattr(parent.base_env, "input_mode")

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the KL and the raw reward, shaped like the reward; per-token KLs get a token axis."""
        per_token = self._in_language_env()
        for key in self.new_keys:
            if per_token and key == self.kl_key:
                observation_spec[key] = per_token_spec(observation_spec)
            elif self.parent.reward_keys:
                observation_spec[key] = reward_like(self.parent)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """A charged reward has no bounds, and for tokens a token axis."""
        if self.add_to_reward:
            reward_spec[self.reward_key] = (
                per_token_spec(reward_spec, 1)
                if self._in_language_env()
                else reward_like(self.parent)
            )
        return reward_spec


def per_token_spec(like: Composite, *last: int) -> Unbounded:
    """The spec [B, tokens, ...] of any number of tokens."""
    return Unbounded(shape=torch.Size((*like.shape, -1, *last)), device=like.device)


def _per_token(log_prob: Any, tensordict: TensorDictBase) -> bool:
    """Whether log-probs have a token axis after the batch dimensions."""
    return isinstance(log_prob, list) or log_prob.is_nested or log_prob.ndim > tensordict.ndim
