"""KLRewardTransform for LLMs: charges the sampler's log-probs minus those of a reference.

The data must have the sampler's log-probs. :class:`~klrl.kl.RetrieveKL` does not need them, since
it computes the policy's log-probs again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import Transform

from klrl.envs.llm.transforms.kl import wrappers as _language
from klrl.envs.llm.transforms.kl.charged import charged_rewards, token_kl
from klrl.envs.llm.transforms.kl.computation import per_token_spec
from klrl.envs.llm.transforms.kl.retrieve_kl import check_one_of, one_of, wants_ray
from klrl.envs.llm.transforms.kl.rows import (
    SIDES,
    either,
    for_rows,
    lengths,
    read_value,
    set_rows,
    to_rows,
)
from klrl.envs.llm.transforms.kl.served import Served
from klrl.envs.llm.transforms.kl.tokens import Encoded, Tokenizer
from klrl.envs.llm.transforms.kl.wrappers import Wrapper
from klrl.envs.transforms.base import NextTransform, one_choice, one_key, taking_arguments_of
from klrl.kl.coefficient import KeepsCoefficient
from klrl.kl.estimators import k1
from klrl.kl.policies import Key, as_key
from klrl.kl.reference import FrozenPolicy

__all__ = ["KLRewardTransform", "RayKLRewardTransform"]


@taking_arguments_of()
class KLRewardTransform(KeepsCoefficient, NextTransform):
    """reward <- reward - coef * (log pi - log pi_ref), per token.

    The policy writes log pi when it samples: [B, T] at ``log_prob_key``; or, only for the tokens
    after the prompt, at the sibling key "response". The reference computes log pi_ref of the same
    tokens. A scalar score goes to the last charged token. Three keys are written under "next": the
    charged reward, the KL without coef and log pi_ref, each [B, T, 1] or ragged; KL and log-probs
    are in nats.

    With ``assistant_only``, the charged tokens are those of ("masks", "all_assistant_mask"); if
    this mask is missing, the real tokens after the prompt. With ``assistant_only=False``, all real
    tokens are charged.

    Args:
        ref_model: an LLM wrapper with ``input_mode="tokens"`` and ``generate=False``.
        ref_model_factory: makes ``ref_model``; give either a model or a factory.
        coef: reward per nat; :attr:`coef` may be changed later.
        coeff: alias of ``coef``.
        in_keys: the key of the reward to read; exactly one. Default ``reward``.
        out_keys: keys of the charged reward, and optionally of KL and log pi_ref; default
            ``in_keys``, ``kl_penalty``, ``ref_log_prob``.
        log_prob_key: key of the sampler's log-probs.
        device: move the reference to this device permanently; results return to the data's device.
        add_to_reward: whether the reward is charged and written.
        tokenizer: replaces the reference's; its pad id marks padding if dense ids have no mask.
        assistant_only: charge only assistant tokens.
        detach: compute log pi_ref without a gradient.
        padding_side: where ragged sequences are padded, if the reference has ``pad_output=True``.
        temperature: the temperature at which the tokens were sampled; default that of the
            reference's ``generate_kwargs``, else 1.
        use_ray_service: older spelling of ``service_backend="ray"``.
        service_backend: "ray" makes a :class:`RayKLRewardTransform`, which also takes
            ``num_cpus``, ``num_gpus`` and ``actor_name``; "direct", or None without
            ``use_ray_service``, runs in this process.

    Raises:
        ValueError: neither or both of a reference and its factory; a reference that generates or
            does not read tokens; several in-keys; out-keys that are not one or three; shapes that
            do not fit each other.
        RuntimeError: the tokens or the sampler's log-probs are missing.
    """

    DEFAULT_IN_KEYS: ClassVar[list[Key]] = ["reward"]

    def __new__(cls, *args: Any, **kwargs: Any) -> Transform:
        """Build the Ray-backed class if the arguments choose Ray."""
        if wants_ray(kwargs):
            return RayKLRewardTransform(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        ref_model: Wrapper | None = None,
        *,
        ref_model_factory: Callable[[], Wrapper] | None = None,
        coef: float | Tensor = 1.0,
        coeff: float | Tensor | None = None,
        in_keys: Key | Sequence[Key] | None = None,
        out_keys: Key | Sequence[Key] | None = None,
        log_prob_key: Key = ("log_probs", "full"),
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        tokenizer: Tokenizer | None = None,
        assistant_only: bool = True,
        detach: bool = True,
        padding_side: str = "left",
        temperature: float | None = None,
        use_ray_service: bool = False,
        service_backend: str | None = None,
    ) -> None:
        ref_model = one_of("ref_model", ref_model, ref_model_factory)
        _language.check_wrapper(ref_model, "ref_model", assistant_only=False)
        if ref_model.input_mode != "tokens":
            raise ValueError(
                f"ref_model.input_mode={ref_model.input_mode!r}: wrap it with input_mode='tokens'"
            )
        self.reward_in, keys = check_keys(in_keys, out_keys)
        self.reward_out, self.kl_key, self.ref_key = keys
        super().__init__(in_keys=[self.reward_in, *map(as_key, ref_model.in_keys)], out_keys=keys)
        self.written = keys if add_to_reward else keys[1:]
        self.pad_output = ref_model.pad_output  # whether the results are dense
        ref_model = ref_model if device is None else ref_model.to(device)
        self.ref_model = FrozenPolicy.shared(ref_model)
        self.log_prob_full_key = as_key(log_prob_key)
        if not _language.is_full(self.log_prob_full_key):  # the sibling key "response" is read too
            raise ValueError(f"log_prob_key={log_prob_key}: give a tuple that ends in 'full'")
        self.add_to_reward, self.assistant_only, self.detach = add_to_reward, assistant_only, detach
        own = getattr(ref_model, "tokenizer", None)
        self.tokenizer: Tokenizer | None = own if tokenizer is None else tokenizer
        self.padding_side = one_choice("padding_side", padding_side, SIDES)
        self.temperature, self.device = temperature, device
        self.keep_coefficient(coef, coeff)

    coef: Tensor

    @property
    def action_key(self) -> Key:
        """The environment's key of the conversation, text or tokens, including the response."""
        return (self.parent.base_env.input_mode, "full")

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        key = as_key(self.ref_model.in_keys[0])
        if read_value(tensordict, key) is None:
            raise RuntimeError(f"no tokens at {key}: the policy that samples must write them")
        encoded = _language.encode(
            self.ref_model,
            tensordict,
            tokenizer=self.tokenizer,
            template={},
            assistant_only=False,
        )
        masks = encoded.charged if self.assistant_only else encoded.attention
        temperature = self.temperature
        if temperature is None:
            temperature = _language.temperature_of(self.ref_model)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            ref = _language.score(self.ref_model, tensordict, encoded, temperature)
        ref = [row.masked_fill(~mask, 0.0) for row, mask in zip(ref, masks, strict=True)]
        gen, scored = self._sampled(tensordict, encoded, masks)
        kl = token_kl(gen, ref, scored, k1.__name__)
        written = {self.kl_key: kl, self.ref_key: ref}
        if self.add_to_reward:
            reward = either(next_tensordict, next_tensordict, self.reward_in)
            charged = charged_rewards(reward, kl, masks, self.coef, self.padding_side)
            written[self.reward_out] = [row.squeeze(-1) for row in charged]
        arranged, ragged = _language.arrange(
            list(written.values()), encoded, self.pad_output, self.padding_side
        )
        next_tensordict = for_rows(next_tensordict, ragged)
        for name, rows in zip(written, arranged, strict=True):
            set_rows(next_tensordict, name, [row.unsqueeze(-1) for row in rows])
        return next_tensordict

    def _sampled(
        self, tensordict: TensorDictBase, encoded: Encoded, masks: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the sampler's log-probs [T_i], and the masks of the tokens to charge."""
        sizes = lengths(encoded.ids)
        log_probs = read_value(tensordict, self.log_prob_full_key)
        if log_probs is not None:
            rows = to_rows(log_probs)
            if lengths(rows) != sizes:
                raise ValueError(
                    f"the log-probs at {self.log_prob_full_key} have lengths {lengths(rows)}, the "
                    f"reference's {sizes}: use one pad_output and one padding token for both"
                )
            return rows, masks
        key = (*self.log_prob_full_key[:-1], "response")
        log_probs = read_value(tensordict, key)
        if log_probs is None:
            raise RuntimeError(
                f"no log-probs at {self.log_prob_full_key} nor at {key}: let the policy return them"
            )
        if not self.assistant_only:
            raise ValueError(
                f"assistant_only=False, but {key} has no log-probs of the prompt; set it to True"
            )
        rows = to_rows(log_probs)
        padded = zip(rows, sizes, strict=True)
        rows = [torch.cat([row.new_zeros(size - row.shape[0]), row]) for row, size in padded]
        return rows, _without_forced_zero(rows, masks)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Add the charged reward (as reward or observation), the KL and log pi_ref, per token."""
        observations = output_spec["full_observation_spec"]
        if self.add_to_reward:
            is_reward = self.reward_out == next(iter(self.parent.reward_keys), "reward")
            target = output_spec["full_reward_spec"] if is_reward else observations
            target[self.reward_out] = per_token_spec(output_spec, 1)
        for key in (self.kl_key, self.ref_key):
            observations[key] = per_token_spec(output_spec, 1)
        return output_spec


def check_keys(
    in_keys: Key | Sequence[Key] | None, out_keys: Key | Sequence[Key] | None
) -> tuple[Key, list[Key]]:
    """Return the key of the reward to read, and the three keys to write."""
    read = one_key("in_keys", "reward" if in_keys is None else in_keys)
    listed = list(out_keys) if isinstance(out_keys, list) else [out_keys or read]
    written = [one_key("out_keys", key) for key in listed]
    if len(written) == 1:
        written += ["kl_penalty", "ref_log_prob"]
    if len(written) != 3:
        raise ValueError(
            f"out_keys={written}: give one key for the reward, or three (reward, KL, reference "
            "log-prob)"
        )
    return read, written


def _without_forced_zero(gen: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    """Remove the first charged tokens from the masks if all their log-probs are exactly 0."""
    # TorchRL 0.14.1's TransformersWrapper writes these zeros when it generates. Each would count as
    # probability 1, and add -log pi_ref, several nats, to the KL of its sequence.
    # tests/transforms/test_llm_upstream.py fails when TorchRL fixes this.
    firsts = [(mask.cumsum(0) == 1) & mask for mask in masks]
    if any(bool(row[first].any()) for row, first in zip(gen, firsts, strict=True)):
        return masks
    warnings.warn(
        "the sampler's log-prob of every first response token is exactly 0 (set by "
        "TransformersWrapper of TorchRL 0.14.1): these tokens are not charged; use RetrieveKL",
        stacklevel=2,
    )
    return [mask & ~first for mask, first in zip(masks, firsts, strict=True)]


@taking_arguments_of(Served, KLRewardTransform, without=("build", "arguments", "more"))
class RayKLRewardTransform(Served):
    """:class:`KLRewardTransform` with the reference in a Ray actor.

    Args:
        ref_model: the reference; the Ray actor gets a copy.
        **kwargs: arguments of KLRewardTransform (``ref_model_factory`` runs in the Ray actor, and
            ``device`` is one of its devices; results return to the data's device); and arguments
            of the Ray actor: ``num_cpus`` (default 1), ``num_gpus``, ``actor_name`` (an existing
            one is reused).

    Raises:
        ValueError: neither or both of a reference and its factory; ``detach=False``. An error that
            a step raises in the Ray actor keeps its type.
        ImportError: Ray is not installed.
    """

    def __init__(self, ref_model: Wrapper | None = None, **kwargs: Any) -> None:
        check_one_of("ref_model", ref_model, kwargs.get("ref_model_factory"))
        super().__init__(KLRewardTransform, {"ref_model": ref_model}, **kwargs)
