"""Trained language policies, read back from a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from klrl.base.errors import ConfigError
from klrl.config import (
    CausalLMConfig,
    CheckpointReferenceConfig,
    LanguageConfig,
    LoraConfig,
    SortDigitsConfig,
)
from klrl.config.stored import renamed
from klrl.language.model import CausalLM
from klrl.language.policy import Policy, make_policy
from klrl.language.weights import Weights, base_digest
from klrl.runs.checkpoint import load_component
from klrl.runs.find import find_run
from klrl.runs.resume import stored_config

#: The setting that names a reference's run.
_PATH = "reference.path"


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
        ConfigError: no such run or checkpoint, a control run, or its model is missing or changed.
    """
    folder = find_run(str(run), setting)
    config = language_config(folder, setting)
    config.device = device
    policy = make_policy(config, say=lambda _: None)  # the run printed these lines when it began
    base = base_digest(policy.model, config.actor.model) if config.actor.lora.r else None
    weights = Weights(policy.model, policy.value_head, base=base)
    load_component(folder, which, "agent", weights, torch.device(device))
    policy.model.requires_grad_(False).eval()
    return policy


def trained_causal_lm(run: str | Path, which: str = "last", device: str = "cpu") -> CausalLM:
    """:func:`klrl.api.load_policy` of a language run."""
    return trained_policy(run, which, device).causal


def load_reference(
    config: LanguageConfig, policy: Policy, described: Mapping[str, Any] | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Another run's model as pi_ref.

    Args:
        config: the job, with ``reference=checkpoint``.
        policy: the live one; the reference must have its tokens.
        described: on resume, what this run noted of its reference: its weights then come from
            this run's own checkpoint, and the other folder may be gone.

    Returns:
        The model, and its description for the manifest.

    Raises:
        ConfigError: no such run, or its vocabulary is another one.
    """
    reference = config.reference
    assert isinstance(reference, CheckpointReferenceConfig)
    if described is not None:
        told = dict(described)
        other = make_policy(_like(config, told), say=lambda _: None)
    else:
        told = _describe(language_config(find_run(reference.path, _PATH), _PATH))
        device = str(next(policy.model.parameters()).device)
        other = trained_policy(reference.path, reference.which, device, _PATH)
    if other.causal.tokenizer.get_vocab() != policy.causal.tokenizer.get_vocab():
        raise ConfigError(
            f"{_PATH}={reference.path}: its tokens are not this policy's; choose a run with the "
            "same tokenizer"
        )
    return other.model, told


def _describe(config: LanguageConfig) -> dict[str, Any]:
    """What it takes to build a run's network and tokenizer again."""
    described = {"actor": asdict(config.actor)}
    if isinstance(config.env, SortDigitsConfig):
        described["env"] = asdict(config.env)
    return described


def _like(config: LanguageConfig, described: Mapping[str, Any]) -> LanguageConfig:
    """The same job with the network of another run."""
    told = renamed(described)
    actor = told["actor"]
    network = CausalLMConfig(**{**actor, "lora": LoraConfig(**actor["lora"])})
    env = SortDigitsConfig(**told["env"]) if "env" in told else config.env
    return replace(config, actor=network, env=env)


def language_config(run: Path, setting: str = "run") -> LanguageConfig:
    """The settings of a language run.

    Raises:
        ConfigError: it is a control run.
    """
    config = stored_config(run)
    if not isinstance(config, LanguageConfig):
        raise ConfigError(f"{setting}={run}: is a control run; give a language run")
    return config


def same_network(first: CausalLMConfig, second: CausalLMConfig) -> bool:
    """Whether the weights of one fit into the other, by the settings."""
    return (first.model, first.lora) == (second.model, second.lora)
