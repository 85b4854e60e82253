"""How far two language policies are apart at the tokens that one of them, or a third, samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase

from klrl.base.errors import ConfigError
from klrl.base.seeds import derived_seed
from klrl.config import LANGUAGE, LanguageConfig, factory
from klrl.kl.divergences import MEASURED
from klrl.kl.reference import NO_ADAPTERS, OTHER_RUN
from klrl.language.data.batch import response_mask
from klrl.language.data.tasks import make_task
from klrl.language.model.pretrained import prompt_limit
from klrl.language.model.vocabulary import Against, NextTokens, token_measures
from klrl.language.run.evaluate import AT_A_TIME, places, settled_sampler
from klrl.language.run.kl import Reference, checkpointed
from klrl.language.run.load import (
    Weights,
    check_place,
    language_config,
    trained_policy,
    with_network,
)
from klrl.language.run.policy import Policy, make_policy
from klrl.language.run.rollout import decoding_of, respond
from klrl.language.run.scoring import ScoringLayout
from klrl.runs.checkpoint import load_component
from klrl.runs.folder import RunFolder
from klrl.train.evaluate import Starts
from klrl.train.policy_kl import Parties, Visited
from klrl.train.schedule import Size

#: One row per response: the plain forward.
_LAYOUT = ScoringLayout(1, False)
#: Batch -> the distributions of its response tokens.
Scored: TypeAlias = Callable[[TensorDictBase], NextTokens]


def distances(
    parties: Parties, config: LanguageConfig, *, starts: Starts, size: Size, device: torch.device
) -> tuple[Iterator[Visited], list[str]]:
    """What :func:`klrl.train.policy_kl.kl_between` asks of language.

    ``config`` names the task; both policies are taken at its temperature.
    """
    task, temperature = make_task(config.env, config.seed), config.collector.temperature
    load = partial(trained_policy, which=parties.which, device=str(device))
    policy = _of_run(parties, config, load)
    known = {parties.run: policy}
    if parties.other is None:
        other = _by_reference(_reference(parties, policy, str(device)), temperature)
    else:
        known[parties.other] = _other(parties.other, config, load, device)
        other = _by(known[parties.other], temperature)
    if parties.on not in known:
        known[parties.on] = load(parties.on, setting="--on")
    for path, each in known.items():
        if each.causal.tokenizer.get_vocab() != policy.causal.tokenizer.get_vocab():
            raise ConfigError(
                f"{path}: its tokens are not those of {parties.run}; compare policies with the "
                "same tokenizer"
            )
    player = known[parties.on]
    sampler = settled_sampler(config, player, task)
    limit = prompt_limit(player.causal.context, config.collector.max_new_tokens)
    place = places(starts, size.episodes, task.evaluations)
    prompts = task.stream(player.causal.tokenizer, limit, "eval")
    prompts.served = place.start
    generator = torch.Generator(device).manual_seed(derived_seed(starts.seed, starts.use))

    def visited() -> Iterator[Visited]:
        for begin in range(0, len(place), AT_A_TIME):
            asked = prompts.take(min(AT_A_TIME, len(place) - begin))
            batch = respond(sampler.without_states(), asked, 1, decoding_of(config), generator)
            yield Visited(_measured(_by(policy, temperature), other, batch))

    notes = [] if temperature == 1 else [f"of softmax(logits / {temperature:g}), as they sample"]
    return visited(), notes


@torch.no_grad()
def _measured(policy: Scored, other: Scored, batch: TensorDictBase) -> list[dict[str, np.ndarray]]:
    """The divergences at each token of each response."""
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    against = Against(other(batch), MEASURED)
    _, [compared] = token_measures(policy(batch), tokens, mask, [against])
    table = {str(name): each.double().cpu() for name, each in compared.divergence.items()}
    rows = enumerate(mask.cpu())
    return [{name: each[row][real].numpy() for name, each in table.items()} for row, real in rows]


def _by(policy: Policy, temperature: float) -> Scored:
    return lambda batch: _LAYOUT.next_tokens(policy.model, batch, temperature)


def _by_reference(reference: Reference, temperature: float) -> Scored:
    def scored(batch: TensorDictBase) -> NextTokens:
        return reference.next_tokens(reference.states(batch, _LAYOUT, len(batch)), temperature)

    return scored


def _of_run(parties: Parties, config: LanguageConfig, load: Callable[..., Policy]) -> Policy:
    """The policy of RUN; ``actor.model=FOLDER`` says where its base model is now."""
    stored = language_config(parties.run, "RUN")
    own = config if parties.on == parties.run else stored
    check_place(own, "actor.model=FOLDER")
    return load(parties.run, setting="RUN", model=own.actor.model)


def _other(
    path: Path, config: LanguageConfig, load: Callable[..., Policy], device: torch.device
) -> Policy:
    """The policy of another run, or a model as its folder has it."""
    if (path / "manifest.json").is_file():
        return load(path, setting="--to", beside=config)
    plain = replace(config.actor, model=str(path), lora=replace(config.actor.lora, r=0), init=None)
    policy = make_policy(replace(config, actor=plain, device=str(device)), say=lambda _: None)
    policy.model.requires_grad_(False).eval()
    return policy


def _reference(parties: Parties, policy: Policy, device: str) -> Reference:
    """Pi_ref of RUN as its checkpoint has it, or as its model was before any update."""
    config = replace(language_config(parties.run, "RUN"), device=device)
    rule = factory("reference", config.reference, LANGUAGE)(config.reference)
    if rule.source == NO_ADAPTERS:
        return Reference(rule, policy.model, own=False)
    if rule.source == OTHER_RUN:
        config = with_network(config, RunFolder(parties.run).manifest["reference"])
    model = make_policy(config, say=lambda _: None).model
    if checkpointed(rule, config):
        whole = Weights(model, whole=True)
        load_component(parties.run, parties.which, "reference", whole, torch.device(device))
    return Reference(rule, model)
