"""How far two language policies are apart at the tokens that one of them, or a third, samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase

from klrl.config import LANGUAGE, LanguageConfig, factory
from klrl.kl.reference import NO_ADAPTERS, OTHER_RUN
from klrl.language.data.batch import response_mask
from klrl.language.model.causal_lm import head
from klrl.language.model.vocabulary import Against, NextTokens, token_measures
from klrl.language.run.kl import Reference, checkpointed
from klrl.language.run.load import (
    SameBase,
    Weights,
    base_digest,
    check_place,
    language_config,
    with_model,
    with_network,
)
from klrl.language.run.policy import Policy, make_policy
from klrl.language.run.scoring import ScoringLayout
from klrl.runs.checkpoint import load_component
from klrl.runs.folder import RunFolder
from klrl.train.policy_kl import Parties

#: One row per response: the plain forward, of so many rows at a time.
_LAYOUT, _ROWS = ScoringLayout(1, False), 32
#: Batch -> the distributions of its response tokens.
Scored: TypeAlias = Callable[[TensorDictBase], NextTokens]


@torch.no_grad()
def measured(
    policy: Scored, other: Scored, batch: TensorDictBase, names: Sequence[str]
) -> list[dict[str, np.ndarray]]:
    """Of each response, divergence -> [T], at each of its tokens."""
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    against = Against(other(batch), names)
    _, [compared] = token_measures(policy(batch), tokens, mask, [against])
    table = {str(name): each.double().cpu() for name, each in compared.divergence.items()}
    rows = enumerate(mask.cpu())
    return [{name: each[row][real].numpy() for name, each in table.items()} for row, real in rows]


def scored_by(policy: Policy, temperature: float) -> Scored:
    """One row per response, the plain forward."""
    own = head(policy.model)
    return lambda batch: NextTokens(
        _LAYOUT.rollout_states(policy.model, batch, _ROWS), own, temperature
    )


def scored_by_reference(reference: Reference, temperature: float) -> Scored:
    """The same of a reference."""
    return lambda batch: reference.next_tokens(reference.states(batch, _LAYOUT, _ROWS), temperature)


def policy_of_run(parties: Parties, config: LanguageConfig, load: Callable[..., Policy]) -> Policy:
    """The policy of RUN; ``actor.model=FOLDER`` says where its base model is now."""
    stored = language_config(parties.run, "RUN")
    own = config if parties.on == parties.run else stored
    check_place(own, "actor.model=FOLDER")
    return load(parties.run, setting="RUN", model=own.actor.model)


def other_policy(
    path: Path, config: LanguageConfig, load: Callable[..., Policy], device: torch.device
) -> Policy:
    """The policy of another run, or a model as its folder has it."""
    if (path / "manifest.json").is_file():
        return load(path, setting="--to", beside=config)
    plain = replace(config.actor, model=str(path), lora=replace(config.actor.lora, r=0), init=None)
    policy = make_policy(replace(config, actor=plain, device=str(device)), say=lambda _: None)
    policy.model.requires_grad_(False).eval()
    return policy


def trained_reference(
    run: Path, which: str, policy: Policy, model: str | None, device: str
) -> Reference:
    """The reference of a run as its checkpoint has it, or as its model was before any update.

    Args:
        run: its folder.
        which: last or best.
        policy: the run's, whose adapters may be switched off.
        model: where the run's base model is now.
        device: where to put it.

    Raises:
        ConfigError: the base model is missing, or has other weights than the run started from.
    """
    stored = language_config(run, "RUN")
    config = replace(with_model(stored, model), device=device)
    rule = factory("reference", config.reference, LANGUAGE)(config.reference)
    if rule.source == NO_ADAPTERS:
        return Reference(rule, policy.model, own=False)
    if rule.source == OTHER_RUN:
        other = with_network(config, RunFolder(run).manifest["reference"])
        moved = other.actor.model == stored.actor.model
        config = with_model(other, model) if moved else other
    network = make_policy(config, say=lambda _: None).model
    if checkpointed(rule, config):
        component, weights = "reference", Weights(network, whole=True)
    else:  # the base model's, of whose weights the policy's checkpoint has a digest
        component, weights = "agent", SameBase(network, base=base_digest(network, model))
    load_component(run, which, component, weights, torch.device(device), say=lambda _: None)
    return Reference(rule, network)
