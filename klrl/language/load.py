"""Trained language policies, read back from a run folder."""

from __future__ import annotations

from pathlib import Path

import torch

from klrl.base.errors import ConfigError
from klrl.config import LanguageConfig
from klrl.config.language import CausalLMConfig
from klrl.language.model import CausalLM
from klrl.language.policy import Policy, make_policy
from klrl.language.weights import Weights, base_digest
from klrl.runs.checkpoint import load_component
from klrl.runs.find import find_run
from klrl.runs.resume import stored_config


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
