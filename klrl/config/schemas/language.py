"""Declares settings of language jobs: the task, the model, the sampler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from omegaconf import MISSING
from pydantic import Field

from klrl.config.choices import registered
from klrl.config.fields import (
    ChoiceConfig,
    Count,
    Natural,
    Number,
    Place,
    Positive,
    Settings,
    Share,
    Values,
    Words,
    setting,
)

#: At most 1e9 seconds, since Python waits for a thread at most 9.2e9 seconds.
Timeout = Annotated[Number, Field(gt=0, le=1e9)]


@dataclass
class LanguageEnvConfig(ChoiceConfig):
    """Prompts and reward functions; a response is an episode of one step."""

    reward: Words = MISSING
    reward_weights: list[float] | None = setting(None, added=True)  # one per reward; null = 1 each
    #: seconds that a call of the reward function may take; null = no limit
    reward_timeout: Timeout | None = None
    # Set by klrl: the module in ``reward`` -> its source.
    sources: dict[str, str] = setting({}, added=True)

    #: The names of the task's own rewards.
    own_rewards: ClassVar[tuple[str, ...]] = ()

    @property
    def rewards(self) -> list[str]:
        """The names of the reward functions."""
        return list(self.reward) if isinstance(self.reward, list) else [self.reward]


@registered("env", "sort_digits", language="language.data.tasks:sort_digits")
class SortDigitsConfig(LanguageEnvConfig):
    """A built-in language task: sort the digits; part of experiment=sort_digits."""

    shortest: Count = 4  # fewest digits of a problem
    longest: Count = 8  # most digits
    shots: Natural = 0  # worked examples before the question; they need an actor.model

    #: exact (gold), proxy (hackable), module:function, FILE.py:function, model:FOLDER, or a list
    reward: Words = "exact"

    own_rewards: ClassVar[tuple[str, ...]] = ("exact", "proxy")


@registered("env", "instructions", language="language.data.tasks:instructions")
class InstructionsConfig(LanguageEnvConfig):
    """Describe a thing in one sentence, verified by a function; part of experiment=smollm."""

    #: followed (all), followed_share, module:function, FILE.py:function, model:FOLDER, or a list
    reward: Words = "followed_share"

    own_rewards: ClassVar[tuple[str, ...]] = ("followed", "followed_share")


@registered("env", "text", language="language.data.tasks:text")
class TextConfig(LanguageEnvConfig):
    """Prompts from files and your own reward function; part of experiment=text."""

    #: JSON lines or a JSON list; by klrl[data] parquet or a folder; rows have prompt or messages
    data: Place = MISSING
    #: the rows' field with the prompt, as in env.prompt_key=question
    prompt_key: str = setting("prompt", added=True)
    #: the split to read, as from files like train-0.parquet
    split: str = setting("train", added=True)
    eval_data: Place | None = None  # data for evaluation; null = env.data
    eval_split: str | None = setting(None, added=True)  # split of evaluations; null = env.split
    #: share of the prompts held out for evaluation, if eval_data and eval_split are null
    eval_share: Annotated[Number, Field(ge=0, lt=1)] = setting(0.0, added=True)
    #: arguments of the chat template, as in env.template_kwargs.enable_thinking=false
    template_kwargs: Values = setting({}, added=True)
    #: module:function or FILE.py:function of (prompts, responses, rows), model:FOLDER, or a list
    reward: Words = MISSING
    #: seconds that a reward call may take; null = no limit, and calls run on the main thread
    reward_timeout: Timeout | None = 60

    own_rewards: ClassVar[tuple[str, ...]] = ("exact",)  # if the rows have an answer


@dataclass
class LoraConfig(Settings):
    """Low-rank adapters, trained instead of the weights; r = 0 trains the weights."""

    r: Natural = 0  # rank of the adapters; 0 = no adapters, all weights are trained
    alpha: Positive = 16.0  # the adapters' update is scaled by alpha / r
    #: must be 0: dropout would make the updated policy differ from the policy that sampled
    dropout: Share = 0.0
    #: a list of names of layers, or all-linear: all linear layers except the head
    target_modules: Words = "all-linear"


@registered("actor", "causal_lm", language="language.run.load:make_policy")
class CausalLMConfig(ChoiceConfig):
    """A causal language model of transformers."""

    #: a folder of save_pretrained, or a hub id; null = klrl's own model for sort_digits
    model: Place | None = None
    #: dtype of the weights; LoRA adapters are float32; bfloat16 without LoRA: learner.dtype=mixed
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    #: true: compute activations again in the backward pass; less memory, a third slower
    gradient_checkpointing: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    init: Place | None = None  # a run to start from: its weights or adapters, and its value head
    init_which: Literal["last", "best"] = setting("last", added=True)  # the checkpoint of that run


@registered(
    "collector",
    "sampler",
    language="language.run.rollout:PromptRollout",
    free=("samples_every", "samples_count"),
)
class SamplerConfig(ChoiceConfig):
    """Responses sampled from a language model with a KV cache."""

    prompts: Count = 32  # prompts per rollout
    group_size: Count = 8  # responses to each prompt
    max_new_tokens: Count = 16  # a longer response is cut off, and flagged
    temperature: Positive = 1.0  # the policy is softmax(logits / temperature)
    #: bfloat16: sample in this precision, with a model that learns in float32
    dtype: Literal["bfloat16"] | None = setting(None, added=True)
    #: learn from the rollouts that the policy of this many updates ago sampled
    staleness: Natural = setting(0, added=True)
    samples_every: Natural = 5  # iterations between entries in samples.jsonl; 0 = never
    samples_count: Count = 4  # responses per entry

    #: Whether the batches contain answers from data instead of sampled responses.
    imitates: ClassVar[bool] = False
    patience: ClassVar[int | None] = None  # a setting only if ``imitates``


@registered(
    "collector",
    "answers",
    language="language.run.answers:AnswerRollout",
    free=("samples_every", "samples_count"),
)
class AnswersConfig(SamplerConfig):
    """The answers of the data's rows, in place of sampled responses; part of experiment=sft."""

    group_size: Count = 1  # one answer to a prompt
    #: the run ends after this many rollouts without a better likelihood of the evaluation split's
    #: answers; null = never
    patience: Count | None = 10  # type: ignore[misc]

    imitates = True
