"""``kl.estimator=custom``, ``kl.divergence=custom``: a function of the log-ratio of the user's own.

Both are E_pi[f(log pi - log pi_ref)]: an estimator samples it by the action that was taken, a
divergence takes the expectation over all actions (of a Gaussian, over draws).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from klrl.config import OwnPart, RetrieveKLConfig
from klrl.config.own import Unfit, errors_of, find_target, moved_by
from klrl.config.placement import OWN
from klrl.kl.divergences import Which
from klrl.kl.estimators import Estimator

#: What a run opens with.
BLIND = (
    "kl.divergence=custom: E_pi[f] sees no action that the policy never takes (of a Gaussian: that "
    "no draw of the policy hits), whatever mass the reference has there; that E_pi[f] >= 0 is not "
    "checked"
)
#: Largest value of an estimator where policy and reference agree, nats.
_ZERO = 1e-6


def chosen_estimator(config: RetrieveKLConfig) -> Estimator:
    """``kl.estimator``."""
    own = config.estimator == OWN
    return _tried("kl.own_estimator", config.own_estimator) if own else config.estimator


def chosen_divergence(config: RetrieveKLConfig) -> Which:
    """``kl.divergence``."""
    own = config.divergence == OWN
    return _tried("kl.own_divergence", config.own_divergence) if own else config.divergence


def _tried(setting: str, part: OwnPart) -> Callable[[Tensor], Tensor]:
    """The user's function, called once; ``forgets``: it has state, which no checkpoint holds."""
    function = partial(find_target(setting, part), **part.args)
    log_ratio = torch.linspace(-2, 2, 9).reshape(3, 3).requires_grad_()  # 0 in the middle
    with errors_of(setting, part):
        value = function(log_ratio)
        if not isinstance(value, Tensor) or value.shape != log_ratio.shape:
            gave = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise Unfit(f"returned {gave} for log-ratios of shape (3, 3); give one each")
        if not value.isfinite().all():
            raise Unfit("is not finite at log-ratios of -2 to 2")
        if not value.requires_grad:
            raise Unfit("has no gradient in the log-ratio; remove detach or no_grad")
        if abs(zero := float(value[1, 1].detach())) > _ZERO:
            raise Unfit(
                f"is {zero:.3g} where policy and reference agree (log-ratio 0); a divergence is 0 "
                "there"
            )
        function.forgets = moved_by(part, function.func, lambda: function(log_ratio))  # type: ignore[attr-defined]
    return function
