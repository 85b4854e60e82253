"""What comes first: the penalty is taken from the raw reward, and scaling follows.

The other order gives rewards of the same sign and size, and learns: only the number tells.
"""

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Normal

from klrl.train.loop import Training

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
