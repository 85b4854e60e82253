"""The policy of a language run: a causal LM, and perhaps a value head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from klrl.config import AdvantageConfig, LanguageConfig
from klrl.language.data.sort_digits import BASE_MODEL
from klrl.language.model import smollm
from klrl.language.model.causal_lm import ValueHead
from klrl.language.model.pretrained import CausalLM, load_causal_lm
from klrl.language.run.sampler import SpecialTokens
from klrl.runs.machine import device_of


@dataclass(frozen=True)
class Policy:
    """The model that samples and learns; with ``advantage=gae`` its critic."""

    causal: CausalLM
    value_head: ValueHead | None = None

    @property
    def model(self) -> nn.Module:
        """The causal LM; a ``PeftModel`` with LoRA."""
        return self.causal.model

    @property
    def special(self) -> SpecialTokens:
        """The ids that end a response, and the tokenizer's pad."""
        return SpecialTokens(self.causal.eos, self.causal.tokenizer.pad_token_id)

    @property
    def actor_parameters(self) -> list[nn.Parameter]:
        """The model's trained parameters: all, or the adapters' alone."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The actor's and the value head's parameters."""
        critic = [] if self.value_head is None else list(self.value_head.parameters())
        return [*self.actor_parameters, *critic]


def make_policy(
    config: LanguageConfig, *, chat: bool = False, say: Callable[[str], None] = print
) -> Policy:
    """Load the model; without ``actor.model``, the small one of ``env=sort_digits``.

    Args:
        config: the job.
        chat: whether prompts are conversations, so that a chat template is needed.
        say: takes a line about each automatic choice.
    """
    actor, device = config.actor, device_of(config.device)
    if config.mixed and config.learner.dtype is None:
        say(
            f"actor.dtype={actor.dtype}: taken for learner.dtype=mixed: weights of float32, "
            "arithmetic of bfloat16"
        )
    causal = load_causal_lm(
        find_base(config),
        chat=chat,
        dtype="float32" if config.mixed else actor.dtype,
        mixed=config.mixed,
        device=device,
        gradient_checkpointing=actor.gradient_checkpointing,
        lora=actor.lora if actor.lora.r else None,
        say=say,
    )
    critic = isinstance(config.advantage, AdvantageConfig)
    head = ValueHead(causal.model, detach=config.loss.separate_losses) if critic else None
    return Policy(causal, head)


def find_base(config: LanguageConfig) -> str | Path:
    """``actor.model``; for null, the small base model of ``env=sort_digits``."""
    if config.actor.model == smollm.NAME:
        return smollm.smollm()
    return BASE_MODEL if config.actor.model is None else config.actor.model
