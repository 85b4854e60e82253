"""pi_ref of a language run: a frozen copy, another run's model, or the policy without adapters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.config import LanguageConfig
from klrl.kl.reference import NO_ADAPTERS, THE_POLICY, FrozenReference
from klrl.language.causal_lm import head
from klrl.language.lora import adapter_off
from klrl.language.scoring import Layout
from klrl.language.vocabulary import NextTokens


class Reference(FrozenReference):
    """A model of its own beside the policy's; or the policy's with its adapters switched off."""

    def next_tokens(self, states: Tensor, temperature: float) -> NextTokens:
        """The distributions behind kept hidden states [B, R, D]."""
        own = head(self.module) if self.own else _OffHead(self.module)
        return NextTokens(states, own, temperature)

    def states(self, batch: TensorDictBase, layout: Layout, prompts: int) -> Tensor:
        """The hidden states [B, R, D] of a rollout, computed once, ``prompts`` at a time."""
        with self._scoring():
            return layout.annotation(self.module, batch, 1.0, prompts).states

    def _scoring(self) -> AbstractContextManager[None]:
        return nullcontext() if self.own else adapter_off(self.module)


@dataclass(frozen=True)
class _OffHead:
    """The head as it was before its adapters, where it has any."""

    model: nn.Module

    @property
    def weight(self) -> Tensor:
        """[V, D]; its size tells how many tokens fit a chunk."""
        return head(self.model).weight  # type: ignore[attr-defined]

    def __call__(self, states: Tensor) -> Tensor:
        with adapter_off(self.model):
            return head(self.model)(states)


def starts_at_reference(reference: FrozenReference, config: LanguageConfig) -> bool:
    """Whether KL(pi_0 || pi_ref) must be 0 in a fresh run: trained adapters are not off."""
    source = reference.rule.source
    return source == THE_POLICY or (source == NO_ADAPTERS and config.actor.init is None)


def checkpointed(config: LanguageConfig) -> bool:
    """Whether a checkpoint must hold the reference: it moves, or cannot be made from the model."""
    kind = config.reference.name
    return kind != "adapter_off" and (kind != "initial" or config.actor.init is not None)


def needs_base(config: LanguageConfig) -> bool:
    """Whether a checkpoint is worth nothing without the weights of ``actor.model``.

    With LoRA it holds the adapters alone; and a reference that it does not hold is made from them.
    """
    return bool(config.actor.lora.r) or (config.kl.name != "none" and not checkpointed(config))
