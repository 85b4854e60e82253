"""KL(pi_theta || pi_ref) of a rollout by every estimator, whichever of them is charged."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from klrl.base.errors import NonFiniteError
from klrl.kl.estimators import ESTIMATORS, masked_mean, sequence_mean


@torch.no_grad()
def mean_kl(exact: Tensor, log_ratio: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Mean KL(pi_theta || pi_ref) of a rollout by every estimator, in nats.

    Args:
        exact: the closed form of every step, [N, T] or [B, R].
        log_ratio: log pi_theta - log pi_ref of what was done, the same shape.
        mask: bool, where steps are real; None: everywhere.

    Returns:
        ``exact``, ``k1``, ``k2``, ``k3``, means over steps. With a mask beside them ``exact_seq``
        and so on: sums over a row, means over rows.

    Raises:
        NonFiniteError: one of them is NaN or infinite.
    """
    per_step = {"exact": exact}
    per_step |= {name: estimator(log_ratio) for name, estimator in ESTIMATORS.items()}
    if mask is None:
        means = {name: value.mean() for name, value in per_step.items()}
    else:
        per_step = {name: value.double() for name, value in per_step.items()}
        means = {name: masked_mean(value, mask) for name, value in per_step.items()}
        means |= {f"{name}_seq": sequence_mean(value, mask) for name, value in per_step.items()}
    for name, value in means.items():
        if not torch.isfinite(value):
            raise NonFiniteError(
                f"kl/ref/{name} is {float(value)}; raise kl.coef or lower optim.lr"
            )
    return means


def in_unit(measured: Mapping[str, Tensor], unit: str | None) -> float:
    """The exact KL that a controller is given, in the unit of its target.

    Args:
        measured: of :func:`mean_kl`.
        unit: step or token: the mean over them; sequence: the sum over a row, mean over rows; None:
            as step or token.

    Returns:
        nats per unit.
    """
    return float(measured["exact_seq" if unit == "sequence" else "exact"])
