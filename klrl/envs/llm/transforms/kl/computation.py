"""Computes the KL and the charged reward from log-probs of two policies, per action or token."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite, Unbounded

from klrl.envs.llm.transforms.kl.rows import SIDES, Rows, either, for_rows, is_ragged, set_rows
from klrl.envs.transforms.base import (
    NextTransform,
    one_choice,
    refuse_repeated_charge,
    refuse_second_charge,
    reward_like,
    reward_of,
    siblings,
)
from klrl.kl.charge import shaped
from klrl.kl.coefficient import KeepsCoefficient
from klrl.kl.estimators import Estimator, estimate_kl, function_of
from klrl.kl.policies import Key, as_key
from klrl.kl.shapes import like_reward


class KLComputation(KeepsCoefficient, NextTransform):
    """Estimates the KL from the log-probs of two policies, and charges it to the reward.

    reward <- reward - coef * KL(pi || pi_ref), with KL estimated from r = log pi - log pi_ref.

    Log-probs are read under "next", else at the root. The KL is written to ``("next", kl_key)``, in
    nats and without the coefficient.

    - One action per step: log-probs in the reward's batch shape, per agent or per team
      (:mod:`klrl.kl.shapes`); KL and reward [..., 1].
    - Tokens: log-probs and KL [B, T], dense or nested; the charged reward is per token, [B, T, 1].
      A scalar score goes to the last charged token; a missing reward counts as 0. The charged
      tokens are those of the first mask that the data have: that of ``RetrieveLogProb``, ("masks",
      "all_assistant_mask"), or the attention mask after the prompt. Other tokens have KL 0.

    Args:
        gen_log_probs_full_key: key of log pi(a|s).
        ref_log_probs_full_key: key of log pi_ref(a|s).
        kl_key: where to write the KL.
        add_to_reward: whether the reward is charged.
        coef: reward per nat; :attr:`coef` may be changed later.
        coeff: alias of ``coef``, as in TorchRL.
        padding_side: (tokens) the side of a dense reward's padding, if the log-probs are nested.
        estimator: k1, k2, k3 or a function of the log-ratio.
        raw_reward_key: where to keep the uncharged reward; None: nowhere.
        reward_key: key of the reward; None: the environment's, else ``reward``.
        per_token: whether log-prob dimensions after the batch dimensions are tokens; else they are
            agents or dimensions of an action. None: decided by the RetrieveLogProb in the same
            Compose; without a RetrieveLogProb, tokens.
        gen_log_probs_key: alias of ``gen_log_probs_full_key``, as in TorchRL's example.
        ref_log_probs_key: alias of ``ref_log_probs_full_key``.

    Raises:
        ValueError: two equal log-prob keys; an unknown estimator; a coefficient that is no number
            >= 0; log-probs, masks and rewards whose shapes do not fit; an environment with several
            rewards, but no ``reward_key``.
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
        coef: float | Tensor = 1.0,
        coeff: float | Tensor | None = None,
        padding_side: str = "left",
        estimator: Estimator = "k1",
        raw_reward_key: Key | None = None,
        reward_key: Key | None = None,
        per_token: bool | None = None,
        gen_log_probs_key: Key | None = None,
        ref_log_probs_key: Key | None = None,
    ) -> None:
        self.per_token = per_token
        self._reward_key = reward_key
        self.gen_log_probs_full_key = as_key(gen_log_probs_key or gen_log_probs_full_key)
        self.ref_log_probs_full_key = as_key(ref_log_probs_key or ref_log_probs_full_key)
        self._read = [self.gen_log_probs_full_key, self.ref_log_probs_full_key]
        if self._read[0] == self._read[1]:
            raise ValueError(f"both log-probs are read from {self._read[0]}: give two keys")
        function_of(estimator)
        self.kl_key, self.raw_key = as_key(kl_key), raw_reward_key and as_key(raw_reward_key)
        written = [key for key in (self.kl_key, self.raw_key) if key is not None]
        out_keys = [*written, as_key(reward_key or "reward")]
        super().__init__(in_keys=self._read, out_keys=out_keys)
        self.written = written
        self.add_to_reward = add_to_reward
        self.padding_side = one_choice("padding_side", padding_side, SIDES)
        self.estimator = estimator
        self.keep_coefficient(coef, coeff)

    coef: Tensor

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch, in place; without "next", tokens' results are written to the root."""
        if tensordict.get("next", None) is None:
            log_prob = either(tensordict, tensordict, self.gen_log_probs_full_key)
            if log_prob is not None and self._of_tokens(log_prob, tensordict):
                return self._step(tensordict, tensordict)
        return super().forward(tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        log_prob, ref_log_prob = (
            self._log_prob(tensordict, next_tensordict, key) for key in self._read
        )
        refuse_second_charge(next_tensordict, self.raw_key)
        if self._of_tokens(log_prob, tensordict):
            return self._charge_tokens(tensordict, next_tensordict, log_prob, ref_log_prob)
        reward = reward_of(next_tensordict, self.reward_key)
        log_prob, ref_log_prob = (
            like_reward(f"the log-prob at {key}", value, reward, tensordict.ndim)
            for key, value in zip(self._read, (log_prob, ref_log_prob), strict=True)
        )
        kl = estimate_kl(log_prob, ref_log_prob, self.estimator).view_as(reward)
        next_tensordict.set(self.kl_key, kl)
        if self.raw_key is not None:
            next_tensordict.set(self.raw_key, reward)
        if self.add_to_reward:
            next_tensordict.set(self.reward_key, shaped(reward, kl, self.coef))
        return next_tensordict

    def _charge_tokens(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, gen: Rows, ref: Rows
    ) -> TensorDictBase:
        from klrl.envs.llm.transforms.kl import charged as tokens

        ragged = is_ragged(gen)
        rows = tokens.matching_rows(gen, ref, *self._read)
        masks = tokens.charged_tokens(tensordict, next_tensordict, rows[0], self._read)
        kl = tokens.token_kl(*rows, masks, self.estimator)
        reward = either(next_tensordict, next_tensordict, self.reward_key)
        next_tensordict = for_rows(next_tensordict, ragged)
        set_rows(next_tensordict, self.kl_key, kl)
        if self.raw_key is not None and reward is not None:
            next_tensordict.set(self.raw_key, next_tensordict.get(self.reward_key))
        if self.add_to_reward:
            charged = tokens.charged_rewards(reward, kl, masks, self.coef, self.padding_side)
            set_rows(next_tensordict, self.reward_key, charged)
        return next_tensordict

    def _log_prob(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, key: Key
    ) -> Any:
        log_prob = either(next_tensordict, tensordict, key)
        if log_prob is None:
            raise KeyError(
                f"no log-probs at {('next', key)} nor at {key}: put RetrieveLogProb before it"
            )
        return log_prob

    def _of_tokens(self, log_prob: Rows, tensordict: TensorDictBase) -> bool:
        """Whether log-probs have a token axis after the batch dimensions."""
        if isinstance(log_prob, list) or log_prob.is_nested:
            return True
        return log_prob.ndim > tensordict.ndim and self._says_per_token() is not False

    def _says_per_token(self) -> bool | None:
        """Return ``per_token``; if None, whether a RetrieveLogProb in the Compose scores tokens."""
        if self.per_token is not None:
            return self.per_token
        scorers = [part for part in siblings(self) if self.gen_log_probs_full_key in part.out_keys]
        return next((getattr(part, "is_language", None) for part in reversed(scorers)), None)

    def _in_language_env(self) -> bool:
        """Whether log-probs are per token: from ``per_token``, their spec or the environment."""
        said = self._says_per_token()
        if said is not None:
            return said
        spec = self.parent.full_observation_spec
        if self.gen_log_probs_full_key in spec.keys(include_nested=True):
            return -1 in spec[self.gen_log_probs_full_key].shape
        return hasattr(self.parent.base_env, "input_mode")

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the KL (in the reward's shape or per token) and the raw reward."""
        per_token = self._in_language_env()
        for key in self.written:
            if per_token and key == self.kl_key:
                observation_spec[key] = per_token_spec(observation_spec)
            elif self.parent.reward_keys:
                observation_spec[key] = reward_like(self.parent, self.reward_key)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Remove the bounds of the charged reward; for tokens, add a token axis."""
        if self.add_to_reward:
            refuse_repeated_charge(self)
            reward_spec[self.reward_key] = (
                per_token_spec(reward_spec, 1)
                if self._in_language_env()
                else reward_like(self.parent, self.reward_key)
            )
        return reward_spec


def per_token_spec(like: Composite, *last: int) -> Unbounded:
    """Make a spec [B, tokens, ...] for any number of tokens."""
    return Unbounded(shape=torch.Size((*like.shape, -1, *last)), device=like.device)
