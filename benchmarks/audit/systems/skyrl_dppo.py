"""SkyRL: ``dppo_policy_loss``, policy_loss_type=dppo: a mask, no penalty."""

from types import SimpleNamespace as Stub

from _skyrl import ppo_utils

SYSTEM, DIVERGENCE = "SkyRL 0.4.0", "none"


def loss(log_probs, old_log_probs, advantages, mask):
    bound = Stub(dppo_type="binary_tv", delta_low=0.1, delta_high=0.1)
    config = Stub(dppo=bound, off_policy_correction=None)
    policy_loss = ppo_utils.dppo_policy_loss
    return policy_loss(log_probs, old_log_probs, advantages, config, mask)[0] / len(mask)


ROWS = {"policy loss dppo, binary_tv, delta=0.1": loss}
