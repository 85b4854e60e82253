"""``loss=custom``: a policy loss of the user's own, called once before the run begins."""

from __future__ import annotations

import torch
from torch import Tensor

from klrl.base.errors import ConfigError
from klrl.config import CustomLossConfig
from klrl.config.own import forgets, make_own
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

    def made() -> PolicyLoss:
        own: PolicyLoss = make_own("loss", config, given, PolicyLoss)
        return own

    forgotten = forgets(
        "loss", config, made, lambda trial: _try(config, trial), given=given.values(), saved=False
    )
    loss = made()
    loss.forgets = forgotten
    return loss


def _try(config: CustomLossConfig, loss: PolicyLoss) -> None:
    """Call it on a few made-up positions: frames [8], or tokens [2, 4] with padding."""
    if not hasattr(loss, "config"):
        raise ConfigError(
            f"loss.target={config.target}: its __init__ does not call PolicyLoss's; add "
            "super().__init__(**given)"
        )
    scored = example(tokens=config.reduction not in ("mean", "sum"))
    real = scored.without_padding()
    beta = scored.log_prob.new_tensor(loss.beta_rule().beta)
    gain = loss.gain(real, real.advantage, beta)
    text = f"loss.target={config.target}: gain"
    shape = tuple(scored.log_prob.shape)
    if not isinstance(gain, Tensor) or tuple(gain.shape) != shape:
        gave = f"shape {tuple(gain.shape)}" if isinstance(gain, Tensor) else type(gain).__name__
        raise ConfigError(f"{text} returned {gave} for positions of shape {shape}; give one each")
    if not torch.isfinite(gain).all():
        raise ConfigError(f"{text} is not finite at finite log-probs; look for log 0 and 0 / 0")
    moving = [getattr(scored, name) for name in _MOVES]
    grads = torch.autograd.grad(gain.sum(), moving, allow_unused=True) if gain.requires_grad else ()
    if not any(grad is not None for grad in grads):
        raise ConfigError(f"{text} has no gradient in the policy; look for detach() and no_grad()")
    if not all(torch.isfinite(grad).all() for grad in grads if grad is not None):
        raise ConfigError(f"{text} has a gradient that is not finite; look for log 0 and 0 / 0")
