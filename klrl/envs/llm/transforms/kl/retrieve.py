"""RetrieveLogProb: scores the actions or tokens in the data with a policy, for KLComputation.

    RetrieveLogProb(policy) -> RetrieveLogProb(reference) -> KLComputation

Put the three transforms into a TorchRL ``Compose``; attach it to an environment, or call it on a
batch. They support control actors (one action per step, ``kl=retrieve``) and LLM wrappers (tokens).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Binary, Composite

from klrl.envs.llm.transforms.kl.computation import KLComputation, per_token_spec
from klrl.envs.llm.transforms.kl.rows import SIDES, for_rows, set_rows
from klrl.envs.transforms.base import ScoresAction, one_choice
from klrl.kl.policies import Key, as_key, is_wrapper, require_reference
from klrl.kl.reference import evaluating, flat_policy

if TYPE_CHECKING:
    from klrl.envs.llm.transforms.kl.tokens import Tokenizer

__all__ = ["KLComputation", "RetrieveLogProb"]


def _language() -> ModuleType:
    """Import the token-scoring module on first use, since a control run does not need it."""
    from klrl.envs.llm.transforms.kl import wrappers

    return wrappers


class RetrieveLogProb(ScoresAction):
    """Writes a policy's log-probs of the actions or tokens in a batch.

    Nothing is resampled. The log-probs are written to ``("next", log_probs_full_key)``, in nats.

    - A control actor, in evaluation mode, scores the action in the data, including any exploration
      noise. The shape is the reward's batch shape, per agent or per team (:mod:`klrl.kl.shapes`).
    - An LLM wrapper scores tokens: [B, T], with 0 at padding and at the first token. If its
      ``pad_output`` is False, the result is ragged: a stack of TensorDicts, to be read by
      ``get(key, as_list=True)`` or ``as_padded_tensor=True``. A mask is also written, by default to
      ``("next", "log_probs_mask")``. It marks the tokens that the policy produced in this step,
      since earlier turns of a conversation must not be charged again.

    Args:
        model: a probabilistic actor, or an LLM wrapper with ``generate=False``. Its in-keys (and
            its action) are read from the transition.
        log_probs_full_key: where to write the log-probs; default ``("log_probs", "full")``, for a
            wrapper ``(model.log_probs_key, "full")``.
        assistant_only: (wrappers) set the log-probs of all but assistant tokens to 0. Requires
            ``input_mode="history"``.
        tokenizer_kwargs: (wrappers in history mode) further arguments of the chat template.
        detach: compute the log-probs without a gradient.
        device: move the model to this device permanently; the data are moved for each call, and
            the result is moved back.
        tokenizer: (wrappers) replaces the wrapper's tokenizer. It renders the chat template and
            encodes text; its pad id marks padding if dense ids have no mask.
        padding_side: (wrappers with ``pad_output=True``) where ragged sequences are padded. Dense
            ids keep their layout.
        temperature: (wrappers) temperature at which the tokens were sampled; default that of the
            wrapper's ``generate_kwargs``, else 1.
        history_key: (wrappers in history mode) the key of the conversation, in place of the model's
            ``input_key``.
        reward_key: (control actors) key of the reward whose batch shape the log-prob gets; None:
            the environment's, or ``reward`` without an environment. If the data have no reward, the
            log-prob keeps the shape in which the actor computes it.

    Raises:
        TypeError: a control actor has no ``log_prob`` or no ``get_dist``.
        ValueError: a wrapper that generates, returns no log-probs, or cannot mark assistant tokens;
            a recurrent actor; an argument that a control actor does not read.
        KeyError: the batch lacks the model's input or its action.
    """

    def __init__(
        self,
        model: TensorDictModuleBase,
        *,
        log_probs_full_key: Key | None = None,
        assistant_only: bool = True,
        tokenizer_kwargs: Mapping[str, object] | None = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: Tokenizer | None = None,
        padding_side: str = "left",
        temperature: float | None = None,
        history_key: Key | None = None,
        reward_key: Key | None = None,
    ) -> None:
        model = flat_policy(model)
        self.is_language = is_wrapper(model)
        out_keys, template = [], {}
        if self.is_language:
            from klrl.envs.llm.transforms.kl.tokens import check_template_kwargs

            key = log_probs_full_key or (model.log_probs_key, "full")
            self.log_probs_full_key = _language().full_key(key, "log_probs_full_key")
            self.mask_key = _language().mask_key(self.log_probs_full_key)
            out_keys = [self.mask_key]
            _language().check_wrapper(model, "model", assistant_only)
            if tokenizer_kwargs is not None and model.input_mode != "history":
                raise ValueError(
                    f"tokenizer_kwargs is for input_mode='history', not {model.input_mode!r}"
                )
            template = check_template_kwargs(tokenizer_kwargs)
        else:
            if not hasattr(model, "log_prob") or not hasattr(model, "get_dist"):
                raise TypeError(f"model={type(model).__name__}: needs get_dist and log_prob")
            require_reference("model", model)
            given: dict[str, object] = {"tokenizer": tokenizer, "temperature": temperature}
            given |= {"tokenizer_kwargs": tokenizer_kwargs, "history_key": history_key}
            for name in (name for name, value in given.items() if value is not None):
                raise ValueError(f"{name} is for LLM wrappers, not {type(model).__name__}")
            self.log_probs_full_key = as_key(log_probs_full_key or ("log_probs", "full"))
        out_keys = [self.log_probs_full_key, *out_keys]
        super().__init__(in_keys=list(model.in_keys), out_keys=out_keys)
        self._reward_key = reward_key
        self.written = out_keys
        self.pad_output = getattr(model, "pad_output", True)
        self.model = model if device is None else model.to(device)
        self.assistant_only, self.detach, self.device = assistant_only, detach, device
        self.tokenizer_kwargs = template
        self.tokenizer = tokenizer
        self.padding_side = one_choice("padding_side", padding_side, SIDES)
        self.temperature, self.history_key = temperature, history_key

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply to a batch, in place; without "next", tokens' log-probs are written to the root."""
        if self.is_language and tensordict.get("next", None) is None:
            return self._step(tensordict, tensordict)
        return super().forward(tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            if self.is_language:
                return self._score_tokens(tensordict, next_tensordict)
            with evaluating(self.scorer()):
                return self.write_log_prob(self.scorer(), tensordict, next_tensordict)

    def scorer(self) -> TensorDictModuleBase:
        """Return the model that computes the log-probs."""
        return self.model

    def sampling_temperature(self) -> float:
        """Return the temperature at which tokens are scored."""
        if self.temperature is not None:
            return self.temperature
        return _language().temperature_of(self.scorer())

    def _score_tokens(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase
    ) -> TensorDictBase:
        model = self.scorer()
        encoded = _language().encode(
            model,
            tensordict,
            tokenizer=self.tokenizer,
            template=self.tokenizer_kwargs,
            assistant_only=self.assistant_only,
            history_key=self.history_key,
        )
        rows = _language().score(model, tensordict, encoded, self.sampling_temperature())
        (rows, masks), ragged = _language().arrange(
            [rows, encoded.charged], encoded, self.pad_output, self.padding_side
        )
        next_tensordict = for_rows(next_tensordict, ragged)
        set_rows(next_tensordict, self.log_probs_full_key, rows)
        set_rows(next_tensordict, self.mask_key, masks)
        return next_tensordict

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the log-prob, in the reward's batch shape; for tokens, log-probs and their mask."""
        if not self.is_language:
            return super().transform_observation_spec(observation_spec)
        spec = per_token_spec(observation_spec)
        mask = Binary(shape=spec.shape, device=spec.device, dtype=torch.bool)
        observation_spec[self.mask_key], observation_spec[self.log_probs_full_key] = mask, spec
        return observation_spec
