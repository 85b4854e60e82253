"""Declares settings of language jobs: the task, the model, the sampler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Optional

from omegaconf import MISSING

from klrl.config.choices import registered
from klrl.config.fields import ChoiceConfig, Settings, added, choice, number, setting
from klrl.config.types import Values, Words


@dataclass
class LanguageEnvConfig(ChoiceConfig):
    """Prompts and reward functions; a response is an episode of one step."""

    reward: Words = MISSING
    reward_weights: Optional[list[float]] = added(field(), None)  # one per reward; null = 1 each
    # At most 1e9, since Python waits for a thread at most 9.2e9 seconds.
    #: seconds that a call of the reward function may take; null = no limit
    reward_timeout: Optional[float] = number(None, gt=0, le=1e9)
    # Set by klrl: the module in ``reward`` -> its source.
    sources: dict[str, str] = field(default_factory=dict, metadata={"added": {}})

    #: The names of the task's own rewards.
    own_rewards: ClassVar[tuple[str, ...]] = ()

    @property
    def rewards(self) -> list[str]:
        """The names of the reward functions."""
        return list(self.reward) if isinstance(self.reward, list) else [self.reward]


@registered("env", "sort_digits", language="language.data.tasks:sort_digits")
class SortDigitsConfig(LanguageEnvConfig):
    """A built-in language task: sort the digits; part of experiment=sort_digits."""

    shortest: int = number(4, ge=1)  # fewest digits of a problem
    longest: int = number(8, ge=1)  # most digits
    shots: int = number(0, ge=0)  # worked examples before the question; they need an actor.model

    #: exact (gold), proxy (hackable), module:function, FILE.py:function, model:FOLDER, or a list
    reward: Words = setting("exact")

    own_rewards: ClassVar[tuple[str, ...]] = ("exact", "proxy")


@registered("env", "instructions", language="language.data.tasks:instructions")
class InstructionsConfig(LanguageEnvConfig):
    """Describe a thing in one sentence, verified by a function; part of experiment=smollm."""

    #: followed (all), followed_share, module:function, FILE.py:function, model:FOLDER, or a list
    reward: Words = setting("followed_share")

    own_rewards: ClassVar[tuple[str, ...]] = ("followed", "followed_share")


@registered("env", "text", language="language.data.tasks:text")
class TextConfig(LanguageEnvConfig):
    """Prompts from files and your own reward function; part of experiment=text."""

    #: JSON lines or a JSON list; by klrl[data] parquet or a folder; rows have prompt or messages
    data: str = MISSING
    split: str = added(field(), "train")  # the split to read, as from files like train-0.parquet
    eval_data: Optional[str] = None  # data for evaluation; null = env.data
    eval_split: Optional[str] = added(field(), None)  # split of evaluations; null = env.split
    #: share of the prompts held out for evaluation, if eval_data and eval_split are null
    eval_share: float = added(number(ge=0), 0.0)
    #: arguments of the chat template, as in env.template_kwargs.enable_thinking=false
    template_kwargs: Values = field(default_factory=dict, metadata={"added": {}})
    #: module:function or FILE.py:function of (prompts, responses, rows), model:FOLDER, or a list
    reward: Words = MISSING
    #: seconds that a reward call may take; null = no limit, and calls run on the main thread
    reward_timeout: Optional[float] = number(60, gt=0, le=1e9)

    own_rewards: ClassVar[tuple[str, ...]] = ("exact",)  # if the rows have an answer


@dataclass
class LoraConfig(Settings):
    """Low-rank adapters, trained instead of the weights; r = 0 trains the weights."""

    r: int = number(0, ge=0)  # rank of the adapters; 0 = no adapters, all weights are trained
    alpha: float = number(16.0, gt=0)  # the adapters' update is scaled by alpha / r
    #: must be 0: dropout would make the updated policy differ from the policy that sampled
    dropout: float = number(0.0, ge=0, le=1)
    #: a list of names of layers, or all-linear: all linear layers except the head
    target_modules: Words = setting("all-linear")


@registered("actor", "causal_lm", language="language.run.load:make_policy")
class CausalLMConfig(ChoiceConfig):
    """A causal language model of transformers."""

    #: a folder of save_pretrained, or a hub id; null = klrl's own model for sort_digits
    model: Optional[str] = None
    #: dtype of the weights; LoRA adapters are float32; bfloat16 without LoRA: learner.dtype=mixed
    dtype: str = choice("float32", "bfloat16", "float64")
    #: true: compute activations again in the backward pass; less memory, a third slower
    gradient_checkpointing: bool = setting(False)
    lora: LoraConfig = field(default_factory=LoraConfig)
    init: Optional[str] = None  # a run to start from: its weights or adapters, and its value head
    init_which: str = added(choice("last", "best"), "last")  # the checkpoint of that run


@registered(
    "collector",
    "sampler",
    language="language.run.rollout:PromptRollout",
    free=("samples_every", "samples_count"),
)
class SamplerConfig(ChoiceConfig):
    """Responses sampled from a language model with a KV cache."""

    prompts: int = number(32, ge=1)  # prompts per rollout
    group_size: int = number(8, ge=1)  # responses to each prompt
    max_new_tokens: int = number(16, ge=1)  # a longer response is cut off, and flagged
    temperature: float = number(1.0, gt=0)  # the policy is softmax(logits / temperature)
    samples_every: int = number(5, ge=0)  # iterations between entries in samples.jsonl; 0 = never
    samples_count: int = number(4, ge=1)  # responses per entry

    #: Whether the batches contain answers from data instead of sampled responses.
    imitates: ClassVar[bool] = False
    patience: ClassVar[Optional[int]] = None  # a setting only if ``imitates``


@registered(
    "collector",
    "answers",
    language="language.run.answers:AnswerRollout",
    free=("samples_every", "samples_count"),
)
class AnswersConfig(SamplerConfig):
    """The answers of the data's rows, in place of sampled responses; part of experiment=sft."""

    group_size: int = setting(1)  # one answer to a prompt
    #: the run ends after this many rollouts without a better likelihood of the evaluation split's
    #: answers; null = never
    patience: Optional[int] = number(10, ge=1)  # type: ignore[misc]

    imitates = True
