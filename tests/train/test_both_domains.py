"""A token is a frame: both domains get the same loss and gradient from the same numbers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from klrl.config import LANGUAGE, LearnerConfig, OptimConfig
from klrl.control.distributions import Categorical
from klrl.control.score import score
from klrl.language.data.batch import LOG_PROBS, REF_LOG_PROBS, on_full, on_response, response_mask
from klrl.language.model.causal_lm import ValueHead
from klrl.language.model.vocabulary import NextTokens, response_log_probs
from klrl.language.run.rollout import REF_STATES, STATES
from klrl.language.run.scoring import ScoringLayout
from klrl.language.run.update import LanguageSteps
from klrl.losses.policy import ClipLoss, KLPENLoss, PolicyLoss
from klrl.train.learner import Coefficients
from tests.language.toys import GROUP, network, rollout
from tests.losses.test_functional import CLIP, KLPEN

DOUBLE = torch.float64
COEFFICIENTS = Coefficients(lr=0.0, beta=0.7, kl_ref=0.3)
LOSSES = {"klpen": (KLPENLoss, KLPEN), "clip": (ClipLoss, CLIP)}


@pytest.fixture(scope="module")
def tokens() -> SimpleNamespace:
    """A policy that moved since it sampled, its reference, a critic, and its rollout."""
    policy, reference = network().double(), network(seed=1).double()
    value_head = ValueHead(policy)
    batch, layout = rollout(tail=2), ScoringLayout(GROUP, True, "")
    mask, generator = response_mask(batch), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, key, model in (
            (STATES, LOG_PROBS, policy),
            (REF_STATES, REF_LOG_PROBS, reference),
        ):
            said = layout.next_tokens(model, batch, 1.0)
            batch[name] = said.states
            log_prob = response_log_probs(said, batch["tokens", "response"], mask)
            batch[key] = on_full(batch, log_prob)
        for key in ("advantage", "value_target", "state_value"):
            batch[key] = torch.randn(*mask.shape, 1, generator=generator, dtype=DOUBLE)
        value_head.linear.weight.add_(0.1)
    return SimpleNamespace(
        policy=policy, reference=reference, value_head=value_head, layout=layout, batch=batch
    )


def language_steps(tokens: SimpleNamespace, config, estimator: str | None) -> LanguageSteps:
    job = SimpleNamespace(
        domain=LANGUAGE,
        loss=config,
        optim=OptimConfig(name="adam", lr=0.1, lr_floor=0.0, eps=1e-5, max_grad_norm=1.0),
        learner=LearnerConfig(name="ppo", epochs=1, minibatches=1, compile="false"),
        collector=SimpleNamespace(temperature=1.0, group_size=GROUP),
    )
    policy = SimpleNamespace(
        model=tokens.policy,
        value_head=tokens.value_head,
        parameters=list(tokens.policy.parameters()),
    )
    head = tokens.reference.get_output_embeddings()
    reference = SimpleNamespace(next_tokens=lambda states, _: NextTokens(states, head))
    return LanguageSteps(job, policy, tokens.layout, reference, estimator)


def as_frames(tokens: SimpleNamespace, old_head) -> tuple[dict, Tensor, dict]:
    """The new logits, the values and a minibatch of a control run: one frame per real token."""
    batch, mask = tokens.batch, response_mask(tokens.batch)
    now = tokens.layout.next_tokens(tokens.policy, batch, 1.0)
    ref_head = tokens.reference.get_output_embeddings()
    with torch.no_grad():
        old, ref = old_head(batch[STATES])[mask], ref_head(batch[REF_STATES])[mask]
    estimates = ("advantage", "value_target", "state_value")
    frames = {
        "action": batch["tokens", "response"][mask],
        "action_log_prob": on_response(batch, LOG_PROBS)[mask],
        "ref_log_prob": on_response(batch, REF_LOG_PROBS)[mask],
        "logits": old,
        "ref_logits": ref,
        **{key: batch[key].squeeze(-1)[mask] for key in estimates},
    }
    value = tokens.value_head(now.states, mask)[mask]
    return {"logits": now.head(now.states)[mask]}, value, frames


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("estimator", [None, "exact", "k1", "k2", "k3"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
def test_a_token_is_a_frame(tokens: SimpleNamespace, kind, estimator, normalize) -> None:
    loss_class, config = LOSSES[kind]
    config = replace(config, normalize_advantage=normalize, clip_value=0.4)
    steps = language_steps(tokens, replace(config, reduction="token"), estimator)
    batch: TensorDict = steps.lay_out(tokens.batch)
    before = {k: v.clone() for k, v in tokens.policy.state_dict().items()}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in tokens.policy.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=DOUBLE))

    parameters = [*tokens.policy.parameters(), *tokens.value_head.parameters()]
    language = steps.loss_terms(batch, COEFFICIENTS)
    control_loss: PolicyLoss = loss_class(config, estimator)
    scored = score(control_loss, Categorical(), *as_frames(tokens, steps._old_head))
    beta, coef = (torch.tensor(x, dtype=DOUBLE) for x in (0.7, 0.3))
    control = control_loss(scored, beta, coef)

    torch.testing.assert_close(language.total, control.total, rtol=1e-12, atol=1e-12)
    measured = [
        dict(zip(loss.measures, loss.measure(found.measured, mask), strict=True))
        for loss, found, mask in (
            (steps.loss, language, response_mask(batch)),
            (control_loss, control, None),
        )
    ]
    assert measured[0]["kl/old/exact"] > 1e-3, "else the policy did not move"
    if kind == "clip":  # only measured: by k3 of the tokens, and in closed form
        assert all(each.pop("kl/old/exact") > 0 for each in measured)
    torch.testing.assert_close(*measured, rtol=1e-12, atol=1e-12)
    pairs = zip(
        *(torch.autograd.grad(found.total, parameters) for found in (language, control)),
        strict=True,
    )
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    tokens.policy.load_state_dict(before)
