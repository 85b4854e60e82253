"""``loss=custom``: a policy loss of the user's own, called once before the run begins."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from klrl.config import CustomLossConfig
from klrl.config.own import Unfit, make_tried
from klrl.kl.divergences import REVERSE, Divergence
from klrl.kl.estimators import Estimator
from klrl.losses.policy import PolicyLoss, example

#: What klrl differentiates a loss by.
_MOVES = ("log_prob", "kl_old", "entropy")


def custom(
    config: CustomLossConfig,
    reference_estimator: Estimator | None = None,
    divergence: Divergence = REVERSE,
    reward_scale: float = 1.0,
) -> PolicyLoss:
    """The user's :class:`PolicyLoss`."""
    given = {
        "config": config,
        "reference_estimator": reference_estimator,
        "divergence": divergence,
        "reward_scale": reward_scale,
    }

    tokens = config.reduction not in ("mean", "sum")
    use = partial(_try, tokens=tokens)
    # No checkpoint has a loss's state_dict.
    made, forgets = make_tried("loss", config, given, PolicyLoss, use, saved=False)
    loss: PolicyLoss = made
    loss.forgets = forgets
    return loss


def _try(loss: PolicyLoss, *, tokens: bool) -> None:
    """Call it on a few made-up positions: frames [8], or tokens [2, 4] with padding."""
    if not hasattr(loss, "config"):
        raise Unfit("its __init__ does not call PolicyLoss's; add super().__init__(**given)")
    scored = example(tokens=tokens)
    real = scored.without_padding()
    gain = loss.gain(real, real.advantage, scored.log_prob.new_tensor(loss.beta_rule().beta))
    shape = tuple(scored.log_prob.shape)
    if not isinstance(gain, Tensor) or tuple(gain.shape) != shape:
        gave = f"shape {tuple(gain.shape)}" if isinstance(gain, Tensor) else type(gain).__name__
        raise Unfit(f"gain returned {gave} for positions of shape {shape}; give one each")
    if not torch.isfinite(gain).all():
        raise Unfit("gain is not finite at finite log-probs; look for log 0 and 0 / 0")
    moving = [getattr(scored, name) for name in _MOVES]
    grads = torch.autograd.grad(gain.sum(), moving, allow_unused=True) if gain.requires_grad else ()
    if not any(grad is not None for grad in grads):
        raise Unfit("gain has no gradient in the policy; look for detach() and no_grad()")
    if not all(torch.isfinite(grad).all() for grad in grads if grad is not None):
        raise Unfit("gain has a gradient that is not finite; look for log 0 and 0 / 0")
