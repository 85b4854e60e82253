"""What is looked at before a language run begins: a line for each check, fatal where one fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from klrl.base.errors import ConfigError
from klrl.config import LanguageConfig
from klrl.language import checks as preflight
from klrl.language.batch import LOG_PROBS, on_response, response_mask
from klrl.language.causal_lm import head, model_dtype
from klrl.language.checks import Check
from klrl.language.exact import exact_token_kl
from klrl.language.policy import Policy
from klrl.language.prompts import PromptBatch
from klrl.language.reference import Reference, starts_at_reference
from klrl.language.rollout import STATES, sample
from klrl.language.sampler import CacheSampler, Sampler
from klrl.language.scoring import Layout, self_check
from klrl.language.vocabulary import NextTokens, response_log_probs

#: Prompts that are answered for it.
PROMPTS = 4
#: What to do about each check that fails.
REMEDIES = {
    "KL(policy": "a fresh policy must be its reference; look at actor.dtype",
    "sampled": "sampling and scoring disagree; try collector.sampler=wrapper, actor.dtype=float32",
    "temperature": "report this: one temperature must serve both",
    "responses": "report this: a response must end with its EOS",
    "positions": "mend the {% generation %} marks of the chat template, or take them out",
}


@dataclass(frozen=True)
class Ways:
    """How policy and reference are scored, and what was found.

    Attributes:
        policy: the layout of the policy's batches.
        reference: of the reference's, which may be another network.
        lines: what to print.
    """

    policy: Layout
    reference: Layout
    lines: list[str]


def look(
    config: LanguageConfig,
    policy: Policy,
    reference: Reference | None,
    sampler: Sampler,
    prompts: PromptBatch,
    *,
    fresh: bool,
) -> Ways:
    """Sample a few responses, score them in every way that the run will use, and compare.

    Args:
        config: the job.
        policy: as it starts.
        reference: pi_ref, None for ``kl=none``.
        sampler: of the run; may be set to the slower way where the faster is wrong.
        prompts: a few.
        fresh: not resumed: the policy may have to equal its reference.

    Raises:
        ConfigError: a check failed, or no way to score this model is right.
    """
    size = config.collector.group_size
    lines = []
    try:
        if isinstance(sampler, CacheSampler):
            device = next(policy.model.parameters()).device
            ids, mask = prompts.ids.to(device), prompts.mask.to(device)
            lines.append(sampler.self_check(ids, mask, size))
        batch = sample(policy, sampler, prompts, config, seed=0)
        mine = _layout(config, policy.model, batch)
        theirs = mine
        if reference is not None and reference.own:
            theirs = _layout(config, reference.module, batch)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"actor.model={config.actor.model}: {error}") from error
    lines.append(f"scoring: {mine.reason}")
    for check in _checks(config, policy, reference, mine, theirs, batch, prompts, fresh):
        if not check.ok:
            raise ConfigError(f"preflight: {check}; {_remedy(check)}")
        lines.append(str(check))
    return Ways(mine, theirs, [f"preflight: {line}" for line in lines])


def _layout(config: LanguageConfig, model: torch.nn.Module, batch: TensorDictBase) -> Layout:
    size = config.collector.group_size
    found = self_check(model, batch, size)
    if config.collector.scoring == "padded":
        return Layout(size, False, "one row per response: collector.scoring=padded")
    return found


@torch.no_grad()
def _checks(
    config: LanguageConfig,
    policy: Policy,
    reference: Reference | None,
    mine: Layout,
    theirs: Layout,
    batch: TensorDictBase,
    prompts: PromptBatch,
    fresh: bool,
) -> Iterator[Check]:
    dtype, mask = model_dtype(policy.model), response_mask(batch)
    temperature = config.collector.temperature
    scored = mine.next_tokens(policy.model, batch, temperature)
    recomputed = response_log_probs(scored, batch["tokens", "response"], mask)
    sampled = on_response(batch, LOG_PROBS)
    yield preflight.sampled_against_recomputed(sampled, recomputed, mask, dtype)
    scoring = {"policy": scored.temperature}
    if reference is not None:
        states = reference.states(batch, theirs, PROMPTS)
        ref = reference.next_tokens(states, temperature)
        scoring["reference"] = ref.temperature
        if fresh and starts_at_reference(config):
            # As the run measures it: the states kept while sampling against the reference's.
            kept = NextTokens(batch[STATES], head(policy.model), temperature)
            yield preflight.kl_at_start(exact_token_kl(kept, ref, mask), mask, dtype)
    yield preflight.same_temperature(temperature, **scoring)
    yield preflight.endings(batch, policy.special)
    conversation = next(
        (p.content for p in prompts.prompts if not isinstance(p.content, str)), None
    )
    if conversation is not None:
        answer = str(prompts.prompts[0].row.get("answer", "1234"))
        tokenizer = policy.causal.tokenizer
        ends = tokenizer.convert_ids_to_tokens(list(policy.special.eos))
        # A template ends turns with one of them: the one that fits best.
        found = (preflight.template_marks(tokenizer, conversation, answer, eos) for eos in ends)
        yield min(found, key=lambda check: check.value)


def _remedy(check: Check) -> str:
    return next(text for start, text in REMEDIES.items() if check.name.startswith(start))
