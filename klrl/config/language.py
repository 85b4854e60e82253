"""The settings of language alone: task, model, sampler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from klrl.config.fields import ChoiceConfig, choice, number


@dataclass
class LanguageEnvConfig(ChoiceConfig):
    """Prompts and a reward function; a response is an episode of one step."""

    reward: str = MISSING
    reward_timeout: Optional[float] = number(gt=0)  # noqa: UP045 (OmegaConf reads this annotation)


@dataclass
class SortDigitsConfig(LanguageEnvConfig):
    """A generated, verifiable task: the user gives digits, the assistant sorts them."""

    shortest: int = number(ge=1)
    longest: int = number(ge=1)
    shots: int = number(ge=0)


@dataclass
class TextConfig(LanguageEnvConfig):
    """Prompts from a JSON Lines file, and the user's own reward function."""

    data: str = MISSING
    eval_data: Optional[str] = None  # noqa: UP045


@dataclass
class LoraConfig:
    """Low-rank adapters in place of the weights; r = 0 trains the weights."""

    r: int = number(ge=0)
    alpha: float = number(gt=0)
    dropout: float = number(ge=0, le=1)
    # Any: a list of names, or all-linear.
    target_modules: Any = MISSING


@dataclass
class CausalLMConfig(ChoiceConfig):
    """A causal language model of ``transformers``."""

    model: Optional[str] = None  # noqa: UP045
    dtype: str = choice("float32", "bfloat16", "float64")
    gradient_checkpointing: bool = MISSING
    lora: LoraConfig = field(default_factory=LoraConfig)
    init: Optional[str] = None  # noqa: UP045


@dataclass
class SamplerConfig(ChoiceConfig):
    """Responses to prompts, sampled in this process."""

    prompts: int = number(ge=1)
    group_size: int = number(ge=1)
    max_new_tokens: int = number(ge=1)
    temperature: float = number(gt=0)
    sampler: str = choice("cache", "wrapper")
    scoring: str = choice("auto", "padded")
    samples_every: int = number(ge=0)
    samples_count: int = number(ge=1)
