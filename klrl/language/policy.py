"""The policy of a language run: a causal LM, its special tokens, and perhaps a value head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from klrl.checkpoint import load_component
from klrl.config import AdvantageConfig, CausalLMConfig, LanguageConfig, SortDigitsConfig
from klrl.errors import ConfigError
from klrl.language.base_model import base_model
from klrl.language.load import CausalLM, load_causal_lm
from klrl.language.lora import LoraSettings
from klrl.language.sampler import SpecialTokens
from klrl.language.supervised import recipe_for
from klrl.language.value_head import ValueHead
from klrl.models.actor import device_of
from klrl.preflight import find_run
from klrl.resume import stored_config


@dataclass(frozen=True)
class Policy:
    """What samples and learns.

    Attributes:
        causal: model and tokenizer.
        special: EOS and pad.
        value_head: the critic, with ``advantage=gae``.
    """

    causal: CausalLM
    special: SpecialTokens
    value_head: ValueHead | None = None

    @property
    def model(self) -> nn.Module:
        """The causal LM; a ``PeftModel`` with LoRA."""
        return self.causal.model

    @property
    def actor_parameters(self) -> list[nn.Parameter]:
        """What is trained of the model: all of it, or the adapters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The same and the value head's."""
        critic = [] if self.value_head is None else list(self.value_head.parameters())
        return [*self.actor_parameters, *critic]


def make_policy(
    config: LanguageConfig, *, chat: bool = False, say: Callable[[str], None] = print
) -> Policy:
    """Load the model, making the small base model first where none is named.

    Args:
        config: the job.
        chat: whether prompts are conversations, so that a chat template is needed.
        say: takes a line about a choice that was made for the user.

    Raises:
        ConfigError: it cannot be loaded; see :func:`klrl.language.load.load_causal_lm`.
    """
    actor, device = config.actor, device_of(config.device)
    lora = actor.lora
    adapters = LoraSettings(lora.r, lora.alpha, lora.dropout, lora.target_modules)
    causal = load_causal_lm(
        find_base(config),
        chat=chat,
        dtype=actor.dtype,
        device=device,
        gradient_checkpointing=actor.gradient_checkpointing,
        lora=adapters if lora.r else None,
        say=say,
    )
    critic = isinstance(config.advantage, AdvantageConfig)
    head = ValueHead(causal.model, detach=config.loss.separate_losses) if critic else None
    return Policy(causal, special_tokens(causal), head)


def find_base(config: LanguageConfig) -> str | Path:
    """``actor.model``; null stands for the small model of this task."""
    if config.actor.model is not None:
        return config.actor.model
    if not isinstance(config.env, SortDigitsConfig):
        raise ConfigError("actor.model=null: env=text needs a model; give a folder or a hub id")
    env = config.env
    return base_model(recipe_for(env.shortest, env.longest, env.shots))


def special_tokens(causal: CausalLM) -> SpecialTokens:
    """What ends a response, and the tokenizer's pad."""
    return SpecialTokens(causal.eos, causal.tokenizer.pad_token_id)


class Weights:
    """What a checkpoint holds of a model: its trained weights, or with LoRA the adapters alone.

    Args:
        model: a causal LM.
        value_head: the critic, where there is one.
        whole: every parameter, whether it is trained or not: of a reference.
    """

    def __init__(
        self, model: nn.Module, value_head: nn.Module | None = None, whole: bool = False
    ) -> None:
        named = list(model.named_parameters())  # tied weights once
        kept = [(n, p) for n, p in named if whole or p.requires_grad]
        self._parameters = dict(kept)
        if value_head is not None:
            self._parameters |= {f"value_head.{n}": p for n, p in value_head.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        """Name -> weight."""
        return {name: p.detach() for name, p in self._parameters.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take weights up, in place.

        Raises:
            RuntimeError: other names or shapes. A value head may be missing or superfluous: a run
                with another advantage starts without its own.
        """
        mine = {n: p for n, p in self._parameters.items() if n in state or not _of_head(n)}
        theirs = {n: v for n, v in state.items() if n in mine or not _of_head(n)}
        if odd := sorted(set(mine) ^ set(theirs)):
            raise RuntimeError(f"its weights are others ({odd[0]}, ...); choose the same actor.*")
        for name, parameter in mine.items():
            if parameter.shape != theirs[name].shape:
                shapes = f"{tuple(theirs[name].shape)}, here {tuple(parameter.shape)}"
                raise RuntimeError(f"its {name} is {shapes}; choose the same actor.*")
            parameter.copy_(theirs[name])


def _of_head(name: str) -> bool:
    return name.startswith("value_head.")


def trained_policy(
    run: str | Path, which: str = "last", device: str = "cpu", setting: str = "run"
) -> Policy:
    """The policy of a language run, frozen.

    Args:
        run: the run folder.
        which: last or best.
        device: where to put it.
        setting: for messages, as in ``reference.path``.

    Raises:
        ConfigError: no such run or checkpoint, a control run, or its model is gone.
    """
    folder = find_run(str(run), setting)
    config = language_config(folder, setting)
    config.device = device
    policy = make_policy(config)
    weights = Weights(policy.model, policy.value_head)
    load_component(folder, which, "agent", weights, torch.device(device))
    policy.model.requires_grad_(False).eval()
    return policy


def language_config(run: Path, setting: str = "run") -> LanguageConfig:
    """The settings of a language run.

    Raises:
        ConfigError: it is a control run.
    """
    config = stored_config(run)
    if not isinstance(config, LanguageConfig):
        raise ConfigError(f"{setting}={run}: is a control run; give a language run")
    return config


def same_network(mine: CausalLMConfig, theirs: CausalLMConfig) -> bool:
    """Whether one's weights fit into the other, by the settings."""
    return (mine.model, mine.lora) == (theirs.model, theirs.lora)
