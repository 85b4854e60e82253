"""The preflight of a language run, numbers: sampling, scoring, KL at start, EOS."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDictBase
from torch import Tensor

from klrl.base.errors import ConfigError
from klrl.config import LanguageConfig
from klrl.domains import LANGUAGE
from klrl.kl.estimators import masked_mean
from klrl.kl.reference import NO_ADAPTERS, THE_POLICY
from klrl.language.data.batch import LOG_PROBS, response_mask, response_part
from klrl.language.data.prompts import PromptBatch
from klrl.language.model.causal_lm import (
    checkpoints_gradients,
    head,
    in_low_precision,
    model_device,
    model_dtype,
)
from klrl.language.model.plain import AGREEMENT, error_and_bound, max_difference
from klrl.language.model.vocabulary import NextTokens, exact_token_kl, response_log_probs
from klrl.language.run.kl import Reference
from klrl.language.run.load import Policy
from klrl.language.run.rollout import STATES, sample
from klrl.language.run.sampler import CacheSampler, SpecialTokens
from klrl.language.run.scoring import ScoringLayout, self_check
from klrl.train.preflight import Check, kl_at_start, run_checks

#: Number of prompts to which the preflight samples responses.
PROMPTS = 4
#: The preflight reports the KL due to rounding alone if it exceeds this; nats per token.
SHOWN_FLOOR = 1e-6


def preflight_checks(
    config: LanguageConfig,
    policy: Policy,
    reference: Reference | None,
    sampler: CacheSampler,
    prompts: PromptBatch,
    score: Callable[[TensorDictBase], object],
    *,
    fresh: bool,
    shared_before: bool | None = None,
) -> tuple[ScoringLayout, ScoringLayout, list[str]]:
    """Sample a few responses, and compare their log-probs in all ways that the run will use.

    The sampler is switched to a slower way if a faster one is wrong. ``score`` calls the reward
    functions on responses to the ``prompts``. On resume the policy may differ from its reference,
    and ``shared_before`` says whether the run has scored in one row per prompt.

    Returns:
        The layouts that policy and reference must use, and the lines to print when the run begins.
    """
    notes: list[Check | str] = []
    group_size = config.collector.group_size
    try:
        device = model_device(policy.model)
        ids, mask = prompts.ids.to(device), prompts.mask.to(device)
        notes.append(sampler.self_check(ids, mask, group_size))
        batch = sample(policy, sampler, prompts, config, seed=0)
        longest, tokens = config.collector.max_new_tokens, config.learner.tokens_per_batch
        rows = (group_size, longest, shared_before, tokens)
        layout = of_reference = self_check(policy.model, batch, *rows)
        if reference is not None and reference.own:
            of_reference = self_check(reference.module, batch, *rows)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"actor.model={config.actor.model}: {error}") from error
    score(batch)
    notes.append(layout.reason)
    checks = _checks(config, policy, layout, reference, of_reference, batch, fresh)
    return layout, of_reference, run_checks([*notes, *checks])


@torch.no_grad()
def _checks(
    config: LanguageConfig,
    policy: Policy,
    layout: ScoringLayout,
    reference: Reference | None,
    of_reference: ScoringLayout,
    batch: TensorDictBase,
    fresh: bool,
) -> Iterator[Check | str]:
    dtype, mask = model_dtype(policy.model), response_mask(batch)
    temperature = config.collector.temperature
    scored = layout.next_tokens(policy.model, batch, temperature)
    recomputed = response_log_probs(scored, batch["tokens", "response"], mask)
    sampled = response_part(batch, LOG_PROBS)
    yield sampled_against_recomputed(sampled, recomputed, mask, dtype)
    if checkpoints_gradients(policy.model):
        yield _training_mode(policy.model, layout, batch)
    kept = NextTokens(batch[STATES], head(policy.model), temperature)
    floor = float(masked_mean(exact_token_kl(kept, scored, mask), mask))
    if floor > SHOWN_FLOOR:
        words = f"{floor:.2g} nats/token from rounding alone; a smaller KL cannot be told from it"
        yield f"KL(policy||policy), sampled and scored: {words}"
    measured = scored if in_low_precision(policy.model) else kept
    if reference is not None:
        states = reference.states(batch, of_reference, PROMPTS)
        ref = reference.next_tokens(states, temperature)
        source = reference.rule.source
        untrained = source == NO_ADAPTERS and config.actor.init is None  # init loads adapters
        if fresh:
            # Like the run, use states from scoring in low precision, else states from sampling.
            kl = exact_token_kl(measured, ref, mask)
            remedy = "an untrained policy must equal its reference; try another actor.dtype"
            same = source == THE_POLICY or untrained
            yield kl_at_start(kl, LANGUAGE, dtype, remedy if same else None, mask)
    yield endings(batch, policy.special)


def sampled_against_recomputed(
    sampled: Tensor, recomputed: Tensor, mask: Tensor, dtype: torch.dtype
) -> Check:
    """Check the largest |log pi from sampling - log pi from scoring|, [B, R] nats, at real tokens.

    A large difference can mean that only one of the two applies a temperature, top-p or dropout, or
    that one omits the first token.
    """
    off = (sampled - recomputed).detach().masked_fill(~mask, 0.0).abs().max()
    remedy = "sampling and scoring disagree; try actor.dtype=float32"
    return Check("sampled - recomputed log-probs, nats", float(off), AGREEMENT[dtype], "", remedy)


def _training_mode(model: torch.nn.Module, layout: ScoringLayout, batch: TensorDictBase) -> Check:
    """Check the largest difference of log pi, nats, between training and evaluation mode."""

    def off() -> float:
        scored = []
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                scored.append(layout.next_tokens(model, batch, 1.0))
        tokens, mask = batch["tokens", "response"], response_mask(batch)
        one, other = (response_log_probs(each, tokens, mask).detach() for each in scored)
        return max_difference((one, other))

    remedy = "training mode changes its log-probs; set actor.gradient_checkpointing=false"
    return Check("training - evaluation mode, nats", *error_and_bound(model, off), "", remedy)


def endings(batch: TensorDictBase, special: SpecialTokens) -> Check:
    """Count responses with a lost EOS or a wrong truncated flag; both can happen if pad == eos.

    A truncated response has no EOS. Any other response has exactly one EOS in its mask, at the end.
    """
    tokens, mask = batch["tokens", "response"], response_mask(batch)
    eos = torch.tensor(special.eos, device=tokens.device)
    ends = torch.isin(tokens, eos) & mask
    last = mask.sum(1, keepdim=True) - 1
    ended = ends.gather(1, last).squeeze(1)
    wrong = (ended == batch["next", "truncated"].squeeze(-1)) | (ends.sum(1) > ended.long())
    detail = "pad equals EOS, so masks use positions" if special.pad in special.eos else ""
    remedy = "report this: a response must end with its EOS"
    return Check("responses that lost their EOS", float(wrong.sum()), 0.0, detail, remedy)
