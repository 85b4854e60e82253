"""What comes first: the penalty is taken from the raw reward, and scaling or comparing follows.

The other order gives rewards of the same sign and size, and learns: only the number tells.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Normal

from klrl.config import GroupConfig
from klrl.kl.charge import ReferenceKL
from klrl.language.data.batch import LOG_PROBS, REF_LOG_PROBS, on_full, response_mask, set_scores
from klrl.language.run.advantage import group
from klrl.language.run.kl import EXACT, charge
from klrl.train.loop import Training
from tests.language.toys import GROUP, rollout

COEF, SCALE = 0.5, 0.1


@pytest.mark.parametrize("words", ["kl=legacy", "kl=retrieve", "kl=legacy kl.apply=step"])
def test_control_takes_the_penalty_before_it_scales_the_reward(settings, words: str) -> None:
    """With gamma 0 and values of 0 the advantage is scale * (raw - coef * KL), by torch."""
    given = (*words.split(), f"kl.coef={COEF}", f"env.reward_scale={SCALE}", "advantage.gamma=0")
    parts = Training(settings(*given)).parts
    reference = parts.reference.module
    with torch.no_grad():
        for weight in parts.actor.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
        for weight in parts.agent.critic.parameters():
            weight.zero_()
    rollout = parts.rollout(0)
    batch = rollout.collect()
    rollout.close()
    parts.charge_kl(batch)
    parts.estimate_advantage(batch)
    with torch.no_grad():
        seen = TensorDict({"observation": batch["observation"]}, batch.shape)
        said = [model.get_dist_params(seen.copy()) for model in (parts.actor, reference)]
        dists = [Normal(each["loc"], each["scale"]) for each in said]
        policy, ref = (dist.log_prob(batch["action"]).sum(-1, keepdim=True) for dist in dists)
    kl, raw = policy - ref, batch["next", "reward_raw"]
    assert kl.abs().mean() > 0.1
    expected = SCALE * (raw - COEF * kl)
    torch.testing.assert_close(batch["advantage"], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(batch["next", "reward"], raw - COEF * kl, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("baseline", ["normalized", "normalized_shaped"])
def test_language_compares_scores_before_it_charges(baseline: str) -> None:
    """A_t = (s - mean) / std - coef * KL to go, by hand; shaped: all of it over std."""
    batch = rollout(tail=1)
    mask, score = response_mask(batch), torch.randn(9)
    ratio = torch.randn(mask.shape).masked_fill(~mask, 0.0)
    set_scores(batch, score)
    batch[LOG_PROBS] = on_full(batch, ratio)
    batch[REF_LOG_PROBS], batch[EXACT] = torch.zeros_like(batch[LOG_PROBS]), ratio.abs()
    kl = ReferenceKL(COEF, "k1", "reward")
    charge(batch, kl)
    config = SimpleNamespace(
        advantage=GroupConfig(baseline, name="group"), collector=SimpleNamespace(group_size=GROUP)
    )
    group(config, None, kl)(batch)
    for row in range(9):
        others = score[row - row % GROUP :][:GROUP]
        spread = float(others.std())
        share = spread if baseline == "normalized_shaped" else 1.0
        for t in range(int(mask[row].sum())):
            own = float(score[row] - others.mean()) / spread
            expected = own - COEF * float(ratio[row, t:].sum()) / share
            assert float(batch["advantage"][row, t]) == pytest.approx(expected, abs=1e-5)
