"""Every number of a language update is of softmax(logits / T), against plain forwards.

At T = 1, or where one temperature is read back from what is tested, a forgotten one is not seen.
"""

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from klrl.language.data.batch import (
    LOG_PROBS,
    REF_LOG_PROBS,
    pad_to_full,
    response_mask,
    response_part,
)
from klrl.language.model.causal_lm import head
from klrl.language.model.vocabulary import NextTokens, response_log_probs
from klrl.language.run.kl import EXACT
from klrl.language.run.rollout import STATES, rescore
from klrl.language.run.scoring import ScoringLayout
from klrl.train.loop import Training
from tests.language.toys import GROUP, network, of_tokens, rollout, truth

T = 0.6
WORDS = (
    *("actor.dtype=float64", f"collector.temperature={T}", "loss=klpen", "loss.kl_old=exact"),
    *("loss.entropy_coeff=0.01", "kl.placement=split", "kl.estimator=exact"),
)
REFERENCES = {
    "initial": (),
    # with adapters in the head, which a PeftModel's backbone does not show
    "adapter_off": (
        *("reference=adapter_off", "actor.lora.r=2"),
        "actor.lora.target_modules=[q_proj,lm_head]",
    ),
}


def shaken(model: nn.Module) -> nn.Module:
    """The model after its trained weights moved; a copy as it is then."""
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.2 * torch.randn_like(p))
    return deepcopy(model)


def kl(p: list[Tensor], q: list[Tensor]) -> list[Tensor]:
    return [(a.exp() * (a - b)).sum(-1) for a, b in zip(p, q, strict=True)]


@pytest.mark.parametrize("reference", REFERENCES)
def test_each_number_is_that_of_a_plain_forward(job: Callable, reference: str) -> None:
    config = job(*WORDS, *REFERENCES[reference])
    training, base = Training(config), Training(config).parts.policy.model
    parts, steps = training.parts, training.parts.learner.steps
    sampler = shaken(parts.policy.model)
    batch = parts.rollout(0).collect()
    measured = parts.charge_kl(batch)
    parts.estimate_advantage(batch)
    frames = steps.lay_out(batch)
    learner = shaken(parts.policy.model)
    old, new, ref = (truth(model, batch, T) for model in (sampler, learner, base))

    mask = response_mask(batch)

    def chosen(tables: list[Tensor]) -> Tensor:
        return of_tokens(tables, batch)[mask]

    scored = steps.score(frames)
    found = {
        "log pi_old": (response_part(batch, LOG_PROBS), chosen(old)),
        "log pi_ref": (response_part(batch, REF_LOG_PROBS), chosen(ref)),
        "KL(old||ref)": (batch[EXACT], torch.cat(kl(old, ref))),
        "log pi": (scored.log_prob, chosen(new)),
        "KL(new||ref)": (scored.exact_ref, torch.cat(kl(new, ref))),
        "KL(old||new)": (scored.kl_old, torch.cat(kl(old, new))),
        "entropy": (scored.entropy, torch.cat([-(p.exp() * p).sum(-1) for p in new])),
    }
    for name, (mine, plain) in found.items():
        torch.testing.assert_close(mine[mask].double(), plain, rtol=1e-4, atol=1e-5, msg=name)
    assert float(measured["kl/ref/exact"]) == pytest.approx(
        float(torch.cat(kl(old, ref)).mean()), rel=1e-4
    )
    assert steps.kl_old(frames) == pytest.approx(float(torch.cat(kl(old, new)).mean()), rel=1e-4)
    assert min(float(plain.abs().mean()) for _, plain in found.values()) > 1e-3


@pytest.mark.parametrize("loss", [("loss=clip",), ("loss=klpen", "loss.kl_old=sampled")], ids=str)
def test_a_sampled_kl_old_is_k3_of_the_tokens_of_the_old_policy(job: Callable, loss) -> None:
    """w - 1 - ln w with w = pi_theta / pi_old; a gradient only where the loss charges it."""
    training = Training(job("actor.dtype=float64", f"collector.temperature={T}", *loss))
    parts, steps = training.parts, training.parts.learner.steps
    sampler = shaken(parts.policy.model)
    batch = parts.rollout(0).collect()
    parts.charge_kl(batch)
    parts.estimate_advantage(batch)
    learner = shaken(parts.policy.model)
    old, new = (of_tokens(truth(model, batch, T), batch) for model in (sampler, learner))
    mask, scored = response_mask(batch), steps.score(steps.lay_out(batch))
    log_w = (new - old)[mask]
    torch.testing.assert_close(
        scored.kl_old[mask].double(), log_w.exp() - 1 - log_w, rtol=1e-4, atol=1e-6
    )
    assert float(log_w.abs().mean()) > 0.05
    assert scored.kl_old.requires_grad == (loss != ("loss=clip",))


def test_a_rollout_is_scored_again_at_its_temperature() -> None:
    """Where rounding shows: states, log-probs, and how far the sampled ones were off."""
    model, batch = network(), rollout()
    mask, plain = response_mask(batch), of_tokens(truth(model, batch, T), batch)
    batch[LOG_PROBS] = pad_to_full(batch, (plain + 0.25).float().masked_fill(~mask, 0.0))
    told = rescore(batch, model, ScoringLayout(GROUP, False, ""), 2, T)
    scored = response_part(batch, LOG_PROBS).double()
    torch.testing.assert_close(scored, plain, rtol=1e-4, atol=1e-5)
    kept = NextTokens(batch[STATES], head(model), T)
    again = response_log_probs(kept, batch["tokens", "response"], mask).detach().double()
    torch.testing.assert_close(again, plain, rtol=1e-4, atol=1e-5)
    k3 = math.exp(-0.25) - 1 + 0.25
    assert told == pytest.approx({"kl/ref/floor": k3, "policy/gap": 0.25}, rel=1e-3)
