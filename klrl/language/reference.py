"""pi_ref of a language run: a frozen copy, another run's model, or the policy without adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from klrl.base.errors import ConfigError
from klrl.config import (
    CausalLMConfig,
    CheckpointReferenceConfig,
    LanguageConfig,
    LoraConfig,
    SortDigitsConfig,
)
from klrl.config.stored import renamed
from klrl.kl.reference import NO_ADAPTERS, OTHER_RUN, THE_POLICY, freeze, memory_bytes
from klrl.language.causal_lm import head
from klrl.language.load import language_config, trained_policy
from klrl.language.lora import adapter_off
from klrl.language.policy import Policy, make_policy
from klrl.language.scoring import Layout
from klrl.language.vocabulary import NextTokens
from klrl.runs.find import find_run


class CopiedReference:
    """A model of its own beside the policy's.

    Args:
        model: frozen; its parameters may move between iterations.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def next_tokens(self, states: Tensor, temperature: float) -> NextTokens:
        """The distributions behind kept hidden states [B, R, D]."""
        return NextTokens(states, head(self.model), temperature)

    def states(self, batch: TensorDictBase, layout: Layout, prompts: int) -> Tensor:
        """The hidden states [B, R, D] of a rollout, computed once, ``prompts`` at a time."""
        return layout.annotation(self.model, batch, 1.0, prompts).states

    @property
    def bytes(self) -> int:
        """Memory beside the policy's."""
        return memory_bytes(self.model)


class AdapterOff:
    """The policy's model with its adapters switched off: no second copy.

    Args:
        model: the live ``PeftModel``.
    """

    bytes = 0

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def next_tokens(self, states: Tensor, temperature: float) -> NextTokens:
        """The distributions behind kept hidden states [B, R, D]; adapters on the head are off."""
        return NextTokens(states, _OffHead(self.model), temperature)

    def states(self, batch: TensorDictBase, layout: Layout, prompts: int) -> Tensor:
        """The hidden states [B, R, D] of a rollout, computed once, ``prompts`` at a time."""
        with adapter_off(self.model):
            return layout.annotation(self.model, batch, 1.0, prompts).states


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


Reference = CopiedReference | AdapterOff


def make_reference(
    config: LanguageConfig, source: str, policy: Policy, described: Mapping[str, Any] | None
) -> tuple[Reference | None, Mapping[str, Any] | None]:
    """pi_ref of the group's choice, and how to build it again on resume.

    Args:
        config: the job.
        source: what it starts as; see :class:`klrl.kl.reference.ReferenceRule`.
        policy: as it starts.
        described: on resume, what this run noted of a reference from another run.

    Returns:
        None for ``kl=none``; the description is for the manifest, None where it needs none.

    Raises:
        ConfigError: no such run, or its vocabulary is another one.
    """
    if config.kl.name == "none":
        return None, None
    if source == NO_ADAPTERS:
        return AdapterOff(policy.model), None
    if source == OTHER_RUN:
        assert isinstance(config.reference, CheckpointReferenceConfig)
        return _of_another_run(config, config.reference, policy, described)
    assert source == THE_POLICY, source
    return CopiedReference(freeze(policy.model)), None


def _of_another_run(
    config: LanguageConfig,
    reference: CheckpointReferenceConfig,
    policy: Policy,
    described: Mapping[str, Any] | None,
) -> tuple[Reference, Mapping[str, Any]]:
    setting = f"reference.path={reference.path}"
    if described is not None:  # the weights will come from this run's own checkpoint
        told = dict(described)
        found = make_policy(_like(config, told), say=lambda _: None)
    else:
        other = language_config(find_run(reference.path, "reference.path"), "reference.path")
        told = {"actor": asdict(other.actor)}
        if isinstance(other.env, SortDigitsConfig):
            told["env"] = asdict(other.env)
        device = str(next(policy.model.parameters()).device)
        found = trained_policy(reference.path, reference.which, device, "reference.path")
    if found.causal.tokenizer.get_vocab() != policy.causal.tokenizer.get_vocab():
        raise ConfigError(
            f"{setting}: its tokens are not this policy's; choose a run with the same tokenizer"
        )
    return CopiedReference(found.model.requires_grad_(False).eval()), told


def _like(config: LanguageConfig, described: Mapping[str, Any]) -> LanguageConfig:
    """The same job with the network of another run."""
    told = renamed(described)
    actor = told["actor"]
    network = CausalLMConfig(**{**actor, "lora": LoraConfig(**actor["lora"])})
    env = SortDigitsConfig(**told["env"]) if "env" in told else config.env
    return replace(config, actor=network, env=env)


def starts_at_reference(config: LanguageConfig) -> bool:
    """Whether KL(pi_0 || pi_ref) must be 0 in a fresh run."""
    kind = config.reference.name
    return kind != "checkpoint" and not (kind == "adapter_off" and config.actor.init is not None)


def checkpointed(config: LanguageConfig) -> bool:
    """Whether a checkpoint must hold the reference: it moves, or cannot be made from the model."""
    kind = config.reference.name
    return kind != "adapter_off" and (kind != "initial" or config.actor.init is not None)


def needs_base(config: LanguageConfig) -> bool:
    """Whether a checkpoint is worth nothing without the weights of ``actor.model``.

    With LoRA it holds the adapters alone; and a reference that it does not hold is made from them.
    """
    return bool(config.actor.lora.r) or (config.kl.name != "none" and not checkpointed(config))
