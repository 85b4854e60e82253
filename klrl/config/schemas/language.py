"""Language: the task, the model, the sampler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from omegaconf import MISSING

from klrl.config.fields import ChoiceConfig, Settings, added, choice, number


@dataclass
class LanguageEnvConfig(ChoiceConfig):
    """Prompts and reward functions; a response is an episode of one step."""

    # Any: a name, or a list of names.
    reward: Any = MISSING
    reward_weights: Optional[list[float]] = added(field(), None)  # noqa: UP045
    # A thread is waited for 9.2e9 seconds at most.
    reward_timeout: Optional[float] = number(gt=0, le=1e9)  # noqa: UP045
    #: klrl's to set: module behind ``reward`` -> its source.
    sources: dict[str, str] = field(default_factory=dict, metadata={"added": {}})

    #: Rewards that come with the task.
    own_rewards: ClassVar[tuple[str, ...]] = ()

    @property
    def rewards(self) -> list[str]:
        """The names of the reward functions."""
        return list(self.reward) if isinstance(self.reward, list) else [self.reward]


@dataclass
class SortDigitsConfig(LanguageEnvConfig):
    """A generated, verifiable task: the user gives digits, the assistant sorts them."""

    shortest: int = number(ge=1)
    longest: int = number(ge=1)
    shots: int = number(ge=0)

    own_rewards: ClassVar[tuple[str, ...]] = ("exact", "proxy")


@dataclass
class InstructionsConfig(LanguageEnvConfig):
    """A generated instruction that a function verifies: describe a thing in one short sentence."""

    own_rewards: ClassVar[tuple[str, ...]] = ("followed", "followed_share")


@dataclass
class TextConfig(LanguageEnvConfig):
    """Prompts from files, and the user's own reward function."""

    data: str = MISSING
    split: str = added(field(), "train")
    eval_data: Optional[str] = None  # noqa: UP045
    eval_split: Optional[str] = added(field(), None)  # noqa: UP045
    eval_share: float = added(number(ge=0), 0.0)
    template_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"added": {}})


@dataclass
class LoraConfig(Settings):
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
    samples_every: int = number(ge=0)
    samples_count: int = number(ge=1)
