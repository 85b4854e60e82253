"""The sampler protocol over TorchRL's ``TransformersWrapper``.

Slower than :class:`CacheSampler` (a prompt is computed once per response, the
log-probs in a second forward). It is a baseline to compare with, and the pattern for wrappers of
engines. :meth:`WrapperSampler._corrected` and the settings below work around TorchRL 0.14.1's
faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules.llm import TransformersWrapper
from transformers import GenerationConfig

from klrl.base.context import check_length
from klrl.kl.from_logits import tempered_log_softmax
from klrl.kl.reference import evaluating
from klrl.language.data.batch import ATTENTION, Responses, make_batch
from klrl.language.model.causal_lm import head, unwrapped
from klrl.language.model.plain import (
    FAMILY_ERRORS,
    few_tokens,
    max_off,
    off_and_bound,
    off_plain,
    packed_states,
    reason_of,
)
from klrl.language.model.vocabulary import NextTokens, response_log_probs
from klrl.language.run.sampler import Decoding, SpecialTokens
from klrl.train.preflight import Check


class WrapperSampler:
    """Sampling by ``TransformersWrapper(generate=True)``.

    Args:
        model: a causal LM.
        tokenizer: with which the wrapper decodes the responses.
        special: EOS and pad.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, special: SpecialTokens) -> None:
        self.model, self.tokenizer, self.special = model, tokenizer, special

    @torch.no_grad()
    def __call__(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        group_size: int,
        decoding: Decoding,
        generator: torch.Generator | None = None,
    ) -> Responses:
        """As :class:`klrl.language.run.sampler.Sampler`."""
        network = unwrapped(self.model)
        check_length(network, int(prompt_mask.bool().sum(1).max()) + decoding.max_new_tokens)
        rows = prompt.repeat_interleave(group_size, 0)
        attention = prompt_mask.bool().repeat_interleave(group_size, 0)
        data = TensorDict({("tokens", "prompt"): rows, ATTENTION: attention}, [len(rows)])
        wrapper = TransformersWrapper(
            network,
            tokenizer=self.tokenizer,
            input_mode="tokens",
            generate=True,
            pad_output=True,
            return_log_probs=False,
        )
        config = _generation_config(decoding, self.special)
        seeded = _seeded(generator, prompt.device)
        with evaluating(self.model), _generating_with(network, config), seeded:
            output = wrapper(data)
        tokens = output["tokens", "response"]
        return self._corrected(prompt, prompt_mask, group_size, tokens, decoding.temperature)

    def without_states(self) -> WrapperSampler:
        """Itself: its states come from the forward that scores."""
        return self

    @torch.no_grad()
    def self_check(self, prompt: Tensor, prompt_mask: Tensor, group_size: int) -> Check:
        """Compare what ``generate`` draws from, and the log-probs given, with plain ones.

        Returns:
            The check.

        Raises:
            ValueError: ``generate`` fails, or draws from something else with left padding.
        """
        few, name = (prompt[:4], prompt_mask[:4]), type(unwrapped(self.model)).__name__
        remedy = "choose collector.sampler=cache"
        try:
            off, bound = off_and_bound(
                self.model, lambda: self._largest_difference(*few, group_size)
            )
        except FAMILY_ERRORS as error:
            raise ValueError(f"{name}: generate fails ({reason_of(error)}); {remedy}") from error
        if not off <= bound:
            raise ValueError(
                f"{name}: generate draws from log-probs {off:.3g} nats off plain ones (at most "
                f"{bound:g}), with prompts padded on the left; {remedy}"
            )
        return Check("generate's own log-probs, nats off plain log-probs", off, bound)

    def _largest_difference(self, prompt: Tensor, prompt_mask: Tensor, group_size: int) -> float:
        """Of what ``generate`` draws from, log-probs that are given, and plain ones, nats."""
        few = prompt, prompt_mask
        tokens, logits = self._drawn(*few, group_size)
        given = self._corrected(*few, group_size, tokens, 1.0)
        drawn_from = _log_probs(logits, given)
        drawn = make_batch(*few, replace(given, log_probs=drawn_from), group_size)
        off = off_plain(self.model, drawn, group_size)
        return max(off, max_off((given.log_probs, drawn_from)))

    def _drawn(self, prompt: Tensor, prompt_mask: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        """Up to four tokens [B, R] as ``__call__`` draws them, and the logits [B, R, V] behind."""
        longest = few_tokens(self.model, prompt_mask)
        config = _generation_config(Decoding(max_new_tokens=longest), self.special)
        config.update(output_logits=True, return_dict_in_generate=True)
        generator = torch.Generator(prompt.device).manual_seed(0)
        with evaluating(self.model), _seeded(generator, prompt.device):
            output = unwrapped(self.model).generate(
                input_ids=prompt.repeat_interleave(group_size, 0),
                attention_mask=prompt_mask.long().repeat_interleave(group_size, 0),
                generation_config=config,
            )
        return output.sequences[:, prompt.shape[1] :], torch.stack(output.logits, 1)

    def _corrected(
        self,
        prompt: Tensor,
        prompt_mask: Tensor,
        group_size: int,
        tokens: Tensor,
        temperature: float,
    ) -> Responses:
        """Masks and log-probs from the tokens alone."""
        # The wrapper's masks are by value (with pad == eos the EOS is lost); its log-probs ignore
        # the temperature and are 0 at the first token.
        ends = torch.isin(tokens, torch.tensor(self.special.eos, device=tokens.device))
        mask = (ends.long().cumsum(1) - ends.long()) == 0
        used = int(mask.sum(1).max())
        unscored = Responses(
            tokens=tokens.masked_fill(~mask, self.special.pad)[:, :used],
            mask=mask[:, :used],
            log_probs=torch.zeros(tokens.shape[0], used, device=tokens.device),
            truncated=~(ends & mask).any(1),
        )
        states = packed_states(self.model, make_batch(prompt, prompt_mask, unscored, group_size))
        log_probs = response_log_probs(
            NextTokens(states, head(self.model), temperature), unscored.tokens, unscored.mask
        )
        return replace(unscored, log_probs=log_probs, states=states)


def _log_probs(logits: Tensor, given: Responses) -> Tensor:
    """Log-probs [B, R] of the tokens under logits [B, R', V], R' >= R; 0 at padding."""
    log_p = tempered_log_softmax(logits[:, : given.tokens.shape[1]], 1.0)
    return log_p.gather(-1, given.tokens[..., None]).squeeze(-1).masked_fill(~given.mask, 0.0)


def _generation_config(decoding: Decoding, special: SpecialTokens) -> GenerationConfig:
    """Sets every sampling setting, because transformers' default is a top-k of 50."""
    sampling: dict[str, Any] = {"do_sample": False}
    if not decoding.greedy:
        sampling = {
            "do_sample": True,
            "temperature": decoding.temperature,
            "top_k": 0,
            "top_p": 1.0,
        }
    return GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        eos_token_id=list(special.eos),
        pad_token_id=special.pad,
        **sampling,
    )


@contextmanager
def _generating_with(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace the model's generation config (its penalties, min-p or top-k) for a while."""
    before, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = before


@contextmanager
def _seeded(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Seed torch's global generator for a while, because ``generate`` draws from it."""
    if generator is None:
        yield
        return
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
