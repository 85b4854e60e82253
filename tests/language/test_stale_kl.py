"""The KL that is charged, and the entropy, of responses that an older policy mu sampled.

Every response of a small policy is enumerated, as in ``tests/losses/test_sampler.py``.
"""

import pytest
import torch
from tensordict import TensorDict

from klrl.kl.charge import ReferenceKL
from klrl.language.data.batch import (
    LOG_PROBS,
    REF_LOG_PROBS,
    SAMPLER_LOG_PROBS,
    SCORE,
    Responses,
    make_batch,
    pad_to_full,
    response_mask,
)
from klrl.language.run.advantage import gae, group
from klrl.language.run.kl import CHARGED, charge, of_old
from tests.losses.test_sampler import LONGEST, PREFIXES, RESPONSES, places, tables

COEF = 0.3


def enumerated(logits) -> tuple[TensorDict, torch.Tensor]:
    """Every response, in a batch; and the prefix of each of its tokens."""
    real = torch.arange(LONGEST) < torch.tensor([len(each) for each in RESPONSES])[:, None]
    padded = [[*each, *[0] * (LONGEST - len(each))] for each in RESPONSES]
    at = torch.tensor([[p for p, _ in places(r)] + [0] * (LONGEST - len(r)) for r in RESPONSES])
    tokens, none = torch.tensor(padded), torch.zeros(real.shape).double()
    prompt = torch.ones(len(RESPONSES), 1, dtype=torch.long)
    batch = make_batch(prompt, prompt, Responses(tokens, real, none, ~real.all(1)), 1)
    keys = {LOG_PROBS: "old", SAMPLER_LOG_PROBS: "mu", REF_LOG_PROBS: "ref"}
    for key, name in keys.items():
        log_prob = logits[name].log_softmax(-1)[at, tokens].masked_fill(~real, 0.0)
        batch[key] = pad_to_full(batch, log_prob)
    batch[SCORE] = torch.zeros(len(batch), 1, 1).double()
    return batch, at


def gradient(logits, batch, at, ratio: str) -> torch.Tensor:
    """Of sum_responses mu sum_t r_t A_t at theta = old, where r = theta / ``ratio``."""
    theta = logits["old"].clone().requires_grad_()
    mask, tokens = response_mask(batch), batch["tokens", "response"]
    log_p, below, mu = (x.log_softmax(-1)[at, tokens] for x in (theta, logits[ratio], logits["mu"]))
    chance = mu.masked_fill(~mask, 0.0).sum(1, keepdim=True).exp()
    gain = (log_p - below).exp() * batch["advantage"].squeeze(-1)
    (found,) = torch.autograd.grad((chance * gain * mask).sum(), theta)
    return found


def true_gradient(logits, batch, at, ratio: str) -> torch.Tensor:
    """Each token's own KL in mu's states, and the exact KLs of pi_old in the states that follow."""
    theta = logits["old"].clone().requires_grad_()
    log_p, log_old, ref, mu, below = (
        x.log_softmax(-1)
        for x in (theta, logits["old"], logits["ref"], logits["mu"], logits[ratio])
    )
    kl_theta, kl_old = ((x.exp() * (x - ref)).sum(-1) for x in (log_p, log_old))
    total = torch.zeros(()).double()
    for prefix in PREFIXES:  # mu's chance of each state
        chance = sum(mu[PREFIXES.index(prefix[:t]), a] for t, a in enumerate(prefix))
        total = total + torch.as_tensor(chance).exp() * kl_theta[PREFIXES.index(prefix)]
    for response in RESPONSES:
        steps = places(response)
        chance = sum(mu[p, a] for p, a in steps).exp()
        for t, (p, a) in enumerate(steps):
            later = sum(float(kl_old[q]) for q, _ in steps[t + 1 :])
            total = total + chance * (log_p[p, a] - below[p, a]).exp() * later
    (found,) = torch.autograd.grad(-COEF * total, theta)
    return found


@pytest.mark.parametrize("kind", ["group", "gae"])
@pytest.mark.parametrize(("corrected", "ratio"), [(True, "mu"), (False, "old")])
def test_k1_in_the_reward_has_the_gradient_of_the_policys_kl(job, kind, corrected, ratio) -> None:
    """mu is four steps old: unweighted, later tokens would be charged KL(mu||ref) - KL(mu||old)."""
    logits = tables(4)
    batch, at = enumerated(logits)
    kl = ReferenceKL(COEF, "k1", "reward")
    charge(batch, kl, corrected=corrected)
    if kind == "group":
        config = job("collector.group_size=5", "advantage.baseline=mean")
        group(config, None, kl)(batch)
    else:
        config = job("advantage=gae", "advantage.gamma=1", "advantage.lmbda=1")
        batch["old", "states"] = torch.zeros(*at.shape, 2)
        policy = type("Critic", (), {"value_head": lambda states, mask: states[..., 0].double()})
        gae(config, policy, kl)(batch)
    found = gradient(logits, batch, at, ratio)
    expected = true_gradient(logits, batch, at, ratio)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert expected.abs().max() > 1e-2
    mean = (batch[CHARGED].squeeze(-1) * response_mask(batch)).sum(1)
    chance = sum(0 for _ in ()) + logits["mu"].log_softmax(-1)[at, batch["tokens", "response"]]
    chance = chance.masked_fill(~response_mask(batch), 0.0).sum(1).exp()
    assert float(chance.sum()) == pytest.approx(1.0)
    assert float((chance * mean).sum()) > 0


@pytest.mark.parametrize("reads", [True, False])
def test_the_entropy_is_pi_olds_not_the_cross_entropy_of_mu(reads: bool) -> None:
    logits = tables(4)
    batch, at = enumerated(logits)
    mu = batch[SAMPLER_LOG_PROBS][:, 1:]
    if not reads:
        del batch[SAMPLER_LOG_PROBS]
    old = batch[LOG_PROBS][:, 1:]
    first = PREFIXES.index(())
    chance = mu.masked_fill(~response_mask(batch), 0.0).sum(1).exp()
    found = float((chance[:, None] * of_old(-old, batch))[at[:, 0] == first, 0].sum())
    p, m = (logits[name].log_softmax(-1)[first] for name in ("old", "mu"))
    entropy, cross = float(-(p.exp() * p).sum()), float(-(m.exp() * p).sum())
    assert found == pytest.approx(entropy if reads else cross, abs=1e-9)
    assert abs(entropy - cross) > 1e-2
